"""Tabulate the rows of `evaluations.jsonl`, and find what training has changed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fusion.telemetry.page.curves import number

RESULT: Mapping[str, type] = {
    "file": str,
    "step": int,
    "samples": int,
    "prompts": int,
    "failed": int,
    "estimates": dict,
}
"""Fields of every row of `evaluations.jsonl`"""
RIGHT, WRONG = "1", "0"
"""Characters of the field `right` of a row, one for each prompt: whether its first answer is correct; else it could not
be scored"""
EXAMPLES = 3
"""Number of examples of each kind of change"""


@dataclass(frozen=True)
class Answer:
    """Responses to one prompt before and after training. ``answer``: the reference answer; "": there is none."""

    prompt: str
    before: str
    after: str
    reward_before: float | None = None
    reward_after: float | None = None
    answer: str = ""


@dataclass(frozen=True)
class Changes:
    """What the first and the last evaluation of a file say of the first answer to each prompt.
    ``improved``, ``worsened``: number of prompts whose answer was wrong and is right, and was right and is wrong.
    ``answers``: examples of both, improved ones first."""

    file: str
    improved: int
    worsened: int
    answers: Sequence[Answer] = ()

    def describe(self) -> str:
        return f"{self.file}: wrong → right {self.improved}, right → wrong {self.worsened}"


def changes_of(results: Sequence[Mapping[str, Any]]) -> Changes | None:
    """Return the changes of the file that was evaluated first; None: it was not evaluated twice with the same content.
    ``results``: rows of `evaluations.jsonl`."""
    of_file = [result for result in results if result["file"] == results[0]["file"]]
    if len(of_file) < 2:
        return None
    ends = [of_file[0], of_file[-1]]
    before, after = (str(result.get("right") or "") for result in ends)
    if not before or len(before) != len(after) or ends[0].get("digest") != ends[1].get("digest"):
        return None
    pairs = list(zip(before, after, strict=True))
    kinds = [(WRONG, RIGHT), (RIGHT, WRONG)]
    kept = [_rows(result.get("answers")) for result in ends]
    examples = [
        _paired(old, new)
        for kind in kinds
        for old, new in [rows for rows, pair in zip(zip(*kept), pairs) if pair == kind][:EXAMPLES]  # noqa: B905
    ]
    improved, worsened = map(pairs.count, kinds)
    return Changes(of_file[0]["file"], improved, worsened, examples)


def _rows(answers: Any) -> list[Mapping[str, Any]]:
    """Return the answers of a row up to the first that is none."""
    rows = []
    for row in answers if isinstance(answers, list) else ():
        if not (isinstance(row, Mapping) and all(isinstance(row.get(name), str) for name in ("prompt", "response"))):
            break
        rows.append(row)
    return rows


def compare(before: Sequence[Mapping[str, Any]], after: Sequence[Mapping[str, Any]], count: int = 3) -> list[Answer]:
    """Pair up to `count` samples (`prompt`, `response`, `reward`) of the same prompt; a prompt that is not in both is
    left out."""
    later = {sample["prompt"]: sample for sample in after}
    pairs = {sample["prompt"]: (sample, later[sample["prompt"]]) for sample in before if sample["prompt"] in later}
    return [_paired(old, new) for old, new in list(pairs.values())[:count]]


def _paired(old: Mapping[str, Any], new: Mapping[str, Any]) -> Answer:
    return Answer(
        prompt=old["prompt"],
        before=old["response"],
        after=new["response"],
        reward_before=number(old.get("reward")),
        reward_after=number(new.get("reward")),
        answer=str(old.get("answer") or ""),
    )


def evaluation_rows(results: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return a title and a line for the first and the last evaluation of each file, as cells: prompts and answers to
    each, the mean reward and pass@k for the largest k with their 95 % intervals, and the tokens of a response."""
    ends: dict[str, dict[int, Mapping[str, Any]]] = {}
    for result in results:
        by_step = ends.setdefault(result["file"], {})
        first = next(iter(by_step), result["step"])
        ends[result["file"]] = {first: by_step.get(first, result), result["step"]: result}
    rows = [["evaluation", "step", "answers", "failed", "reward (95 %)", "pass@k (95 %)", "length"]]
    for file, by_step in ends.items():
        for step, result in by_step.items():
            k = result["samples"]
            counts = [str(step), f"{result['prompts']} x {k}", str(result["failed"])]
            mean, passed = (_cell(result, f"reward/{name}@{k}") for name in ("mean", "pass"))
            length = result["estimates"].get(f"response_length/mean@{k}")
            rows.append([file, *counts, mean, passed, "" if length is None else f"{length['value']:.1f}"])
    return rows if len(rows) > 1 else []


def _cell(result: Mapping[str, Any], statistic: str) -> str:
    """Return an estimate with its interval; empty where no answer could be scored."""
    estimate = result["estimates"].get(statistic)
    if estimate is None:
        return ""
    interval = "" if estimate["low"] is None else f" [{estimate['low']:.3f}, {estimate['high']:.3f}]"
    return f"{estimate['value']:.3f}{interval}"

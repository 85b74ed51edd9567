"""Tabulate the rows of `evaluations.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

RESULT: Mapping[str, type] = {
    "file": str,
    "step": int,
    "samples": int,
    "prompts": int,
    "failed": int,
    "estimates": dict,
}
"""Fields of every row of `evaluations.jsonl`"""


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
    found = result["estimates"].get(statistic)
    if found is None:
        return ""
    interval = "" if found["low"] is None else f" [{found['low']:.3f}, {found['high']:.3f}]"
    return f"{found['value']:.3f}{interval}"

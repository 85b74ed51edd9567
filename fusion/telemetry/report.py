"""Summarise a run for the terminal: how it ended, what is suspicious, what training has changed, where its files are.

The page (`page/`) shows the rest: curves, the time of every card, memory and settings."""

import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich import box, get_console
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusion.telemetry.columns import duration
from fusion.telemetry.evaluations import RESULT, Answer, Changes, changes_of, compare, evaluation_rows
from fusion.telemetry.files import iterate_jsonl, read_jsonl, write_atomic
from fusion.telemetry.page import default_path, read_run, render
from fusion.telemetry.run_contents import EVALUATIONS, SAMPLES, describe

SAMPLE: Mapping[str, type] = {"step": int, "prompt": str, "response": str}
"""Fields of every row of `samples.jsonl`"""
SHORT = 200
"""Maximum number of characters of a text that is not shortened"""
CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")


@dataclass
class RunReport:
    """The contents of the report; empty parts are left out."""

    folder: Sequence[str] = ()
    """Lines of `describe`"""
    outcome: str = "finished"
    """End of the run, in words: `finished`, `stopped by Ctrl-C at step 12`"""
    evaluated: str = ""
    """Name of what was evaluated alone, in words, without a step; "": the run trains"""
    steps: int | None = 0
    """Number of steps; None: unknown"""
    wall_s: float = 0.0
    reward_start: float | None = None
    reward_end: float | None = None
    reward_window: int = 1
    """Number of steps over which each of the two rewards is a mean"""
    answers: Sequence[Answer] = ()
    """Responses of the first and of the last step to the same prompts"""
    changes: Changes | None = None
    """Changes between the first and the last evaluation; their examples replace ``answers``"""
    evaluations: Sequence[Sequence[str]] = ()
    """Cells of `evaluation_rows`"""
    cautions: Sequence[str] = ()
    """Result of `cautions`"""
    notes: Sequence[str] = ()
    """Counts such as failed rewards or skipped prompts"""
    next_steps: Sequence[str] = ()

    @classmethod
    def from_folder(cls, path: Path | str, run: Mapping[str, Any] | None = None, **fields: Any) -> "RunReport":
        """Return the report of a run folder.
        ``run``: the data of its page; None: they are read.
        ``fields``: values that replace or complete those of the folder.
        Raise ValueError: a line of a file is not what a run writes; names file and line."""
        run = read_run(path, fields.get("outcome")) if run is None else run
        results = read_jsonl(Path(path) / EVALUATIONS, RESULT)
        from_folder: dict[str, Any] = {
            "folder": describe(path),
            "answers": compare(*_first_and_last(iterate_jsonl(Path(path) / SAMPLES, SAMPLE))),
            "changes": changes_of(results),
            "evaluations": evaluation_rows(results),
        }
        for name in ("outcome", "steps", "wall_s", "reward_start", "reward_end", "reward_window", "cautions"):
            from_folder |= {name: run[name]} if name in run else {}
        return cls(**(from_folder | fields))

    def render(self) -> Group:
        """Render for a rich console; print it with `crop=False`, so that paths stay whole."""
        parts: list[RenderableType] = [_line(self._headline(), "bold")]
        parts += [_line(f"! {caution}", "yellow") for caution in self.cautions]
        if self.changes:
            parts += ["", Text(self.changes.describe(), style="bold")]
        if shown := (self.changes and self.changes.answers) or self.answers:
            parts += ["", _answers(shown)]
        if self.evaluations:
            parts += ["", _table(*self.evaluations)]
        lists = {"Notes": self.notes, "Run folder": self.folder, "What to try next": self.next_steps}
        for title, lines in lists.items():
            if lines:
                parts += ["", Text(title, style="bold"), *(_line(f"  {line}") for line in lines)]
        return Group(*parts)

    def text(self, width: int = 100) -> str:
        """Render as plain text; tables fit `width`, paths and commands are never cut."""
        file = io.StringIO()
        Console(file=file, width=width, color_system=None, force_terminal=False).print(self.render(), crop=False)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"

    def show(self, console: Console | None = None) -> None:
        console = console or get_console()
        if console.is_terminal:
            console.print(self.render(), crop=False)
        else:
            console.print(self.text(), markup=False, highlight=False, soft_wrap=True, end="")

    def _headline(self) -> str:
        if self.evaluated:
            return f"{self.outcome}: evaluated {self.evaluated}"
        steps = "" if self.steps is None else f": {self.steps} steps"
        parts = [f"{self.outcome}{steps}" + (f" in {duration(self.wall_s)}" if self.wall_s else "")]
        if self.reward_start is not None and self.reward_end is not None:
            of = f" (means of {self.reward_window} steps)" if self.reward_window > 1 else ""
            parts.append(f"reward {self.reward_start:.3f} → {self.reward_end:.3f}{of}")
        return ", ".join(parts)


def report_run(folder: Path, **fields: Any) -> None:
    """Write `report.html` and print the report. A page that cannot be written, on a full disk for example, is a note of
    the report, and so is a damaged file, without whose figures the report then is: the run has its result or its error.
    ``fields``: of `RunReport`, beside what the folder holds."""
    report = RunReport(**({"steps": None} | fields))
    try:
        run = read_run(folder, fields.get("outcome"))
        report = RunReport.from_folder(folder, run, **fields)
        steps = {"total_steps": None} if report.evaluated else {}
        write_atomic(default_path([folder]), render([run | steps]))
    except (OSError, ValueError) as error:
        report.notes = [*report.notes, f"report.html could not be written: {error}"]
    report.folder = describe(folder)
    report.show()


def _first_and_last(samples: Iterable[Mapping[str, Any]]) -> tuple[list, list]:
    """Return the samples of the first and those of the last step; no others are kept in memory."""
    steps: list[list[Mapping[str, Any]]] = []
    for _, step in groupby(samples, key=itemgetter("step")):
        steps = [*steps[:1], list(step)]
    return (steps[0], steps[-1]) if steps else ([], [])


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, overflow="ignore", no_wrap=True)


def _answers(answers: Sequence[Answer]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    referenced = any(answer.answer for answer in answers)
    for title in ("prompt", *(["answer"] if referenced else []), "before", "after"):
        table.add_column(title, overflow="fold", ratio=1)
    for answer in answers:
        table.add_row(
            Text(_short(answer.prompt)),
            *([Text(_short(answer.answer))] if referenced else []),
            Text(_marked(answer.before, answer.reward_before)),
            Text(_marked(answer.after, answer.reward_after)),
        )
    return table


def _marked(text: str, reward: float | None) -> str:
    return _short(text) if reward is None else f"{_short(text)}  [{reward:.3g}]"


def _short(text: str) -> str:
    """Return a text as one line without control characters, which a terminal would obey; shorten a long text to its
    start and its end, which holds the answer."""
    text = CONTROL.sub("\ufffd", " ".join(text.split()))
    return text if len(text) <= SHORT else f"{text[: SHORT // 3]} … {text[-2 * SHORT // 3 :]}"


def _table(header: Sequence[str], *rows: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, title in enumerate(header):
        table.add_column(title, justify="left" if index == 0 else "right")
    for row in rows:
        table.add_row(*map(Text, row))
    return table

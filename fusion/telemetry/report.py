"""Report on a run at its end: from plain data, or from the folder of any run, also a killed one."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich import box, get_console
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusion.telemetry.by_card import card_rows, read_cards
from fusion.telemetry.columns import duration, seconds
from fusion.telemetry.evaluations import RESULT, Answer, Changes, changes_of, compare, evaluation_rows
from fusion.telemetry.files import iterate_jsonl, read_jsonl
from fusion.telemetry.memory import MemoryLedger
from fusion.telemetry.page.cautions import cautions
from fusion.telemetry.page.curves import number
from fusion.telemetry.run_folder import EVALUATIONS, describe
from fusion.telemetry.timeline import CardSummary

REWARD = "critic/rewards/mean"
SAMPLE: Mapping[str, type] = {"step": int, "prompt": str, "response": str}
"""Fields of every row of `samples.jsonl`"""
NOT_A_PHASE = ("step", "total")
"""Timers that contain the phases."""


@dataclass
class RunReport:
    """The contents of the report; empty parts are left out."""

    folder: Sequence[str] = ()
    """Lines of `run_folder.describe`."""
    outcome: str = "finished"
    """How the run ended, in words: `finished`, `stopped by Ctrl-C at step 12`."""
    evaluated: str = ""
    """What was evaluated alone, in words, without a step; "": the run trains."""
    steps: int | None = 0
    """None: unknown."""
    wall_s: float = 0.0
    reward_start: float | None = None
    reward_end: float | None = None
    reward_window: int = 1
    """Number of steps over which each of the two rewards is a mean."""
    answers: Sequence[Answer] = ()
    changes: Changes | None = None
    """Between the first and the last evaluation; shown in place of ``answers``."""
    evaluations: Sequence[Sequence[str]] = ()
    """Cells of `evaluation_rows`."""
    phase_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase over the whole run."""
    switch_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each part of the switch in one step, of the slowest card, over the whole run; `a/b` is part of `a`."""
    ledger: MemoryLedger = field(default_factory=MemoryLedger)
    cards: Sequence[CardSummary] = ()
    """Result of `summarize_run(spans)`."""
    cautions: Sequence[str] = ()
    """Result of `cautions`."""
    notes: Sequence[str] = ()
    """Counts such as failed rewards or skipped prompts."""
    next_steps: Sequence[str] = ()

    @classmethod
    def from_folder(cls, path: Path | str, **fields: Any) -> RunReport:
        """Read the report from a run folder; ``fields`` replace or complete the values from its files.

        Raises:
            ValueError: a line of a file is not what a run writes; names file and line.
        """
        logged = read_jsonl(Path(path) / "metrics.jsonl")
        rows, groups = [_numbers(row) for row in logged], iterate_jsonl(Path(path) / "groups.jsonl")
        from_files: dict[str, Any] = {"folder": describe(path), "steps": len(rows)}
        from_files |= rewards_of(rows)
        from_files["phase_s"] = _phases(rows)
        from_files["switch_s"] = _parts(rows, "switch")
        from_files["wall_s"] = sum(row.get("timing_s/step") or row.get("perf/time_per_step") or 0.0 for row in rows)
        from_files["ledger"] = MemoryLedger.merged(MemoryLedger.from_metrics(row) for row in rows)
        from_files["cards"], left_out = read_cards(Path(path) / "timeline.json")
        from_files["folder"] += left_out
        results = read_jsonl(Path(path) / EVALUATIONS, RESULT)
        from_files["evaluations"], from_files["changes"] = evaluation_rows(results), changes_of(results)
        ended = Counter(str(group.get("ended")) for group in groups)
        from_files["cautions"] = cautions(logged, ended, from_files["ledger"], failure=None)
        from_files["answers"] = compare(*_first_and_last(read_jsonl(Path(path) / "samples.jsonl", SAMPLE)))
        return cls(**(from_files | fields))

    def render(self) -> Group:
        """Render for a rich console; print it with `crop=False`, so that paths stay whole."""
        shown = self.changes.answers if self.changes and self.changes.answers else self.answers
        tables: list[RenderableType] = [Text(self.changes.describe(), style="bold")] if self.changes else []
        tables += [_answers(shown)] if shown else []
        tables += [_table(self.evaluations)] if self.evaluations else []
        tables += [_phase_table(self.phase_s)] if self.phase_s else []
        tables += [_part_table(self.switch_s, self.steps)] if self.switch_s and self.steps else []
        tables += [_table(self.ledger.rows())] if self.ledger.phases else []
        tables += [_table(card_rows(self.cards))] if self.cards else []
        parts: list[RenderableType] = [Text(self._headline(), style="bold", overflow="ignore", no_wrap=True)]
        if self.cautions:
            parts += [Text(f"! {line}", style="yellow", overflow="ignore", no_wrap=True) for line in self.cautions]
        for table in tables:
            parts += ["", table]
        lists = {"Notes": self.notes, "Run folder": self.folder, "What to try next": self.next_steps}
        for title, lines in lists.items():
            if lines:
                parts += ["", Text(title, style="bold")]
                parts += [Text(f"  {line}", overflow="ignore", no_wrap=True) for line in lines]
        return Group(*parts)

    def text(self, width: int = 100) -> str:
        """Render as plain text; tables fit `width`, paths and commands are never cut."""
        file = io.StringIO()
        Console(file=file, width=width, color_system=None, force_terminal=False).print(self.render(), crop=False)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"

    def show(self, console: Console | None = None) -> None:
        """Print it."""
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


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a row that are numbers."""
    return {name: value for name, found in row.items() if (value := number(found)) is not None}


def _first_and_last(samples: Sequence[Mapping[str, Any]]) -> tuple[list, list]:
    if not samples:
        return [], []
    first, last = samples[0]["step"], samples[-1]["step"]
    return [s for s in samples if s["step"] == first], [s for s in samples if s["step"] == last]


def rewards_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return `reward_start` and `reward_end`, means of `reward_window` steps each; nothing without rewards."""
    rewards = [row[REWARD] for row in rows if row.get(REWARD) is not None]
    if not rewards:
        return {}
    window = max(1, min(5, len(rewards) // 10))
    start, end = sum(rewards[:window]) / window, sum(rewards[-window:]) / window
    return {"reward_start": start, "reward_end": end, "reward_window": window}


def _phases(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    phases: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            phase = name.removeprefix("timing_s/")
            part = "/" in phase  # of a phase that is listed itself
            if phase != name and not part and phase not in NOT_A_PHASE and value is not None:
                phases[phase] = phases.get(phase, 0.0) + value
    return phases


def _parts(rows: Sequence[Mapping[str, Any]], phase: str) -> dict[str, float]:
    prefix, parts = f"timing_s/{phase}/", dict[str, float]()
    for row in rows:
        for name, value in row.items():
            if name.startswith(prefix) and value is not None:
                part = name.removeprefix(prefix)
                parts[part] = parts.get(part, 0.0) + value
    return parts


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


def _short(text: str, limit: int = 200) -> str:
    """Return a text as one line; shorten a long text to its start and its end, which holds the answer."""
    text = " ".join(text.split())
    return text if len(text) <= limit else f"{text[: limit // 3]} … {text[-2 * limit // 3 :]}"


def _phase_table(phase_s: Mapping[str, float]) -> Table:
    whole = sum(phase_s.values())
    rows = [["time by phase", "seconds", "share"]]
    for phase, value in sorted(phase_s.items(), key=lambda item: -item[1]):
        rows.append([phase, seconds(value), f"{value / whole:.0%}" if whole else ""])
    return _table(rows)


def _part_table(part_s: Mapping[str, float], steps: int) -> Table:
    """Return a table of milliseconds per step; parts of a part are below it."""
    rows = [["switch by part, both directions", "ms per step"]]
    for part in sorted(part_s):
        above, _, name = part.rpartition("/")
        rows.append([f"  {name}" if above else name, f"{1000 * part_s[part] / steps:.2f}"])
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, title in enumerate(rows[0]):
        table.add_column(title, justify="left" if index == 0 else "right")
    for row in rows[1:]:
        table.add_row(*(Text(cell) for cell in row))
    return table

"""A sample table that is too plain to be wrong: a list of rows, searched from the front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distqueue.samples import Selection, Span

LEASE_S = 10.0


@dataclass
class Row:
    number: int
    id: str
    group: str
    tasks: Sequence[str]
    born_s: float
    versions: Span = (-1, -1)
    end: str | None = None
    columns: dict[str, int] = field(default_factory=dict)
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    handed: dict[str, int] = field(default_factory=dict)
    claims: dict[str, float | str] = field(default_factory=dict)
    """the end of a lease, or "acked"; nothing while open"""

    def lacks(self, selection: Selection) -> bool:
        return not set(selection.columns) <= self.columns.keys()

    def widen(self, span: Span) -> None:
        if span != (-1, -1):
            known = (span, self.versions if self.versions != (-1, -1) else span)
            self.versions = (min(low for low, _ in known), max(high for _, high in known))


class Model:
    def __init__(self, tasks: Sequence[str]) -> None:
        self.tasks = tasks
        self.rows: list[Row] = []
        self.now_s = 0.0
        self.redelivered = dict.fromkeys(tasks, 0)

    def live(self) -> list[Row]:
        return [row for row in self.rows if row.end is None]

    def state(self, row: Row, task: str) -> str:
        claim = row.claims.get(task)
        if claim == "acked":
            return "acked"
        return "leased" if isinstance(claim, float) and claim > self.now_s else "open"

    def ready(self, row: Row, selection: Selection) -> bool:
        return self.state(row, selection.task) == "open" and not row.lacks(selection)

    def take(self, selection: Selection) -> list[Row] | None:
        ready = [row for row in self.live() if self.ready(row, selection)]
        if selection.partial and ready:
            return ready[: selection.count]
        return ready[: selection.count] if selection.count and len(ready) >= selection.count else None

    def lease(self, rows: list[Row], task: str) -> None:
        for row in rows:
            self.redelivered[task] += row.handed.get(task, 0) > 0
            row.handed[task] = row.handed.get(task, 0) + 1
            row.claims[task] = self.now_s + LEASE_S

    def ack(self, rows: list[Row], task: str) -> list[Row]:
        """The rows that are done by it."""
        done = []
        for row in rows:
            if row.end is None:
                row.claims[task] = "acked"
                if [row.claims.get(task) for task in self.tasks] == ["acked"] * len(self.tasks):
                    row.end = "done"
                    done.append(row)
        return done

    def segments(self) -> dict[int, int]:
        """Live rows per segment."""
        held = [segment for row in self.live() for segment in {segment for segment, _ in row.places.values()}]
        return {segment: held.count(segment) for segment in sorted(set(held))}

"""Where payloads lie: segments (a column of one put, kept as it came) and, per sample and column, the place in one.

Invariants: a byte is stored once; a segment is released with the last of its samples; all segments of a column have one
layout, so that any samples of it can be gathered, each byte copied once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from distqueue.column import Column, Layout, row_runs
from distqueue.packed import PackedBatch


@dataclass(eq=False)
class Segment:
    """A column of one put, and how many of its samples are still wanted."""

    column: Column
    live: int


class PayloadStore:
    def __init__(self) -> None:
        self.nbytes = 0
        """bytes of all segments held, offsets included"""
        self._layouts: dict[str, Layout] = {}
        self._places: dict[str, dict[str, tuple[Segment, int]]] = {}

    def check(self, batch: PackedBatch) -> None:
        """ValueError if a column comes in another layout than before."""
        for name, column in batch.columns.items():
            known = self._layouts.get(name, column.layout)
            if column.layout != known:
                raise ValueError(f"column {name!r}: put as {column.layout}, but this queue holds it as {known}")

    def put(self, batch: PackedBatch) -> None:
        """Keeps the batch's buffers: nobody writes to them from now on."""
        if not batch.ids:
            return
        for name, column in batch.columns.items():
            self._layouts.setdefault(name, column.layout)
            segment = Segment(column, len(batch))
            self.nbytes += column.nbytes
            for row, id in enumerate(batch.ids):
                self._places.setdefault(id, {})[name] = (segment, row)

    def views(self, ids: Sequence[str], name: str) -> list[Column]:
        """The column of `ids`, in order, as the fewest views; `Column.concat` makes them one."""
        views: list[Column] = []
        places = [self._places[id][name] for id in ids]
        start = 0
        while start < len(places):
            segment, stop = places[start][0], start + 1
            while stop < len(places) and places[stop][0] is segment:
                stop += 1
            views += [segment.column.rows(*run) for run in row_runs(row for _, row in places[start:stop])]
            start = stop
        return views

    def release(self, ids: Iterable[str]) -> None:
        """Forgets samples; a segment none of whose samples is left is freed."""
        for id in ids:
            for segment, _ in self._places.pop(id, {}).values():
                segment.live -= 1
                if not segment.live:
                    self.nbytes -= segment.column.nbytes

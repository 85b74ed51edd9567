"""Where the payload of a row lies: the puts it came in (segments of the store) and its position in each.

    part k of a row: | segment, 31 bits | position in it, 32 bits |     one part per put that brought the row a column

Which part has a column follows from what its segment has, so a row says nothing per column.

Invariants: a segment is alive exactly while a live row has a part in it; `release` names each segment once, when its
last row ended.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distqueue.samples.pages import NONE, Field, Pages

MAX_SEGMENT = (1 << 31) - 1


class Segments:
    """Parts of the rows in `rows`, and the live segments they lie in."""

    def __init__(self, rows: Pages, page_rows: int) -> None:
        self._rows = rows
        self.pages = Pages(page_rows)
        self.mask = self.pages.field(np.uint64)
        """columns that a segment has"""
        self.live = self.pages.field(np.int32)
        """live rows that have a part in it"""
        self.parts: list[Field] = []
        self.part_count = rows.field(np.uint8)

    def is_live(self, segment: int) -> bool:
        return int(self.pages.find(np.array([segment]))[0]) != NONE

    def open(self, segments: np.ndarray, masks: np.ndarray) -> None:
        slots = self.pages.add(segments)
        self.mask.values[slots], self.live.values[slots] = masks, 0

    def append(self, slots: np.ndarray, segments: np.ndarray, positions: np.ndarray) -> None:
        """Gives every row one more part; the segments are open."""
        parts, counts = segments.astype(np.int64) << 32 | positions, self.part_count.values[slots]
        for k in np.unique(counts).tolist():
            while k >= len(self.parts):
                self.parts.append(self._rows.field(np.int64))
            here = counts == k
            self.parts[k].values[slots[here]] = parts[here]
        self.part_count.values[slots] = counts + 1
        self._count(segments, 1)

    def find(self, slots: np.ndarray, c: int) -> tuple[np.ndarray, np.ndarray]:
        """(segment, position in it) of column c of each row; all rows hold it."""
        found = np.full(len(slots), NONE, np.int64)
        for _, inside, parts in self._parts_of(slots):
            masks = self.mask.values[self.pages.find(parts >> 32)]
            has = masks & np.uint64(1 << c) != 0
            found[inside[has]] = parts[has]
        assert (found != NONE).all(), "a row holds a column that none of its segments has"
        return found >> 32, found & 0xFFFFFFFF

    def release(self, slots: np.ndarray) -> tuple[int, ...]:
        """The rows have ended. Returns the segments that have no live row left."""
        segments = [parts >> 32 for _, _, parts in self._parts_of(slots)]
        if not segments:
            return ()
        touched = self._count(np.concatenate(segments), -1)
        dead = touched[self.live.values[touched] == 0]
        numbers = np.sort(self.pages.numbers(dead))
        self.pages.remove(dead)
        return tuple(numbers.tolist())

    def touching(self, slots: np.ndarray, segments: Sequence[int]) -> np.ndarray:
        """Those of the rows that have a part in one of the segments."""
        touched = np.zeros(len(slots), np.bool_)
        for _, inside, parts in self._parts_of(slots):
            touched[inside] |= np.isin(parts >> 32, np.asarray(segments, np.int64))
        return slots[touched]

    def flat(self, slots: np.ndarray) -> np.ndarray:
        """All parts of the rows, row after row."""
        counts = self.part_count.values[slots].astype(np.int64)
        starts, flat = np.cumsum(counts) - counts, np.zeros(counts.sum(), np.int64)
        for k, inside, parts in self._parts_of(slots):
            flat[starts[inside] + k] = parts
        return flat

    def _parts_of(self, slots: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray]]:
        """(k, which of the slots have a part k, that part of theirs) for every k that one of them has."""
        counts = self.part_count.values[slots]
        rows_with = [(k, np.flatnonzero(counts > k)) for k in range(int(counts.max(initial=0)))]
        return [(k, inside, self.parts[k].values[slots[inside]]) for k, inside in rows_with]

    def _count(self, segments: np.ndarray, by: int) -> np.ndarray:
        """Counts one row more or less for every mention of a segment. Returns the slots of those mentioned."""
        numbers, times = np.unique(segments, return_counts=True)
        slots = self.pages.find(numbers)
        self.live.values[slots] += (by * times).astype(np.int32)
        return slots

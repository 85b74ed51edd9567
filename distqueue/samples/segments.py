"""Where the payload of a row lies: the segments of the puts that brought its columns, and its position in each.

    part k of a row: | slot of the segment | position in it |     one part per put that brought the row a column

both in the narrowest integers that hold all values: two bytes each with puts of up to 65,536 samples.
Which part has a column follows from the columns of its segment, so a row stores nothing per column.

Invariants: a segment is alive exactly while a live row has a part in it; `release` returns each segment once, when its
last row ended."""

from collections.abc import Sequence

import numpy as np

from distqueue.samples.pages import NONE, Field, Pages

MAX_SEGMENT = (1 << 31) - 1


class RowSegments:
    """The parts of the rows in `rows`, and the live segments in which they lie."""

    def __init__(self, rows: Pages, page_rows: int) -> None:
        self._rows = rows
        self.pages = Pages(page_rows)
        self.mask = self.pages.field(np.uint64)
        """columns of the segment"""
        self.live = self.pages.field(np.int32)
        """live rows that have a part in it"""
        self.parts: list[tuple[Field, Field]] = []
        """(slot in `pages`, position) of part k of every row"""
        self.part_count = rows.field(np.uint8)

    def is_live(self, segment: int) -> bool:
        return int(self.pages.find(np.array([segment]))[0]) != NONE

    def open(self, segments: np.ndarray, masks: np.ndarray) -> None:
        """Add segments with these columns."""
        slots = self.pages.add(segments)
        self.mask.values[slots], self.live.values[slots] = masks, 0

    def append(self, slots: np.ndarray, segments: np.ndarray, positions: np.ndarray) -> None:
        """Add one part to every row; its segment is open."""
        where, counts = self.pages.find(segments), self.part_count.values[slots]
        for k in np.flatnonzero(np.bincount(counts)).tolist():
            while k >= len(self.parts):
                self.parts.append((self._rows.field(np.uint16), self._rows.field(np.uint16)))
            here = counts == k
            for field, values in zip(self.parts[k], (where[here], positions[here]), strict=True):
                field.widen(int(values.max()))
                field.values[slots[here]] = values
        self.part_count.values[slots] = counts + 1
        self._count(where, 1)

    def find(self, slots: np.ndarray, columns: Sequence[int]) -> list[tuple[list[int], np.ndarray, np.ndarray]]:
        """Locate columns that all rows hold: (columns, segment per row, position in it), grouped by equal places."""
        parts = [(inside, where, at, self.mask.values[where]) for _, inside, where, at in self._parts_of(slots)]
        masks = set[int]().union(*(np.unique(mask).tolist() for *_, mask in parts))
        alike: dict[tuple[int, ...], list[int]] = {}
        for c in columns:
            alike.setdefault(tuple(mask for mask in masks if mask >> c & 1), []).append(c)
        located = []
        for together in alike.values():
            segments, positions = np.full(len(slots), NONE, np.int64), np.empty(len(slots), np.int64)
            for inside, where, at, mask in parts:
                has = mask & np.uint64(1 << together[0]) != 0
                segments[inside[has]], positions[inside[has]] = where[has], at[has]
            assert (segments != NONE).all(), "a row holds a column that none of its segments has"
            located.append((together, self.pages.numbers(segments), positions))
        return located

    def release(self, slots: np.ndarray) -> tuple[int, ...]:
        """Remove ended rows. Return the segments that have no live row left, ascending."""
        segments = [where for _, _, where, _ in self._parts_of(slots)]
        if not segments:
            return ()
        touched = self._count(np.concatenate(segments), -1)
        dead = touched[self.live.values[touched] == 0]
        numbers = np.sort(self.pages.numbers(dead))
        self.pages.remove(dead)
        return tuple(numbers.tolist())

    def touching(self, slots: np.ndarray, segments: Sequence[int], first: int, last: int) -> np.ndarray:
        """Filter the rows that have a part in one of the segments, at a position from `first` to `last` - 1."""
        touched, wanted = np.zeros(len(slots), np.bool_), self.pages.find(np.asarray(segments, np.int64))
        for _, inside, where, at in self._parts_of(slots):
            touched[inside] |= np.isin(where, wanted) & (at >= first) & (at < last)
        return slots[touched]

    def flat(self, slots: np.ndarray) -> np.ndarray:
        """All parts of the rows, row after row: number of the segment << 32 | position."""
        counts = self.part_count.values[slots].astype(np.int64)
        starts, flat = np.cumsum(counts) - counts, np.zeros(counts.sum(), np.int64)
        for k, inside, where, at in self._parts_of(slots):
            flat[starts[inside] + k] = self.pages.numbers(where) << 32 | at
        return flat

    def _parts_of(self, slots: np.ndarray) -> list[tuple[int, np.ndarray, np.ndarray, np.ndarray]]:
        """(k, indices of the rows with a part k, slots of its segments, positions) for every k that occurs."""
        counts = self.part_count.values[slots]
        parts = []
        for k in range(int(counts.max(initial=0))):
            inside = np.flatnonzero(counts > k)
            where, at = (field.values[slots[inside]].astype(np.int64) for field in self.parts[k])
            parts.append((k, inside, where, at))
        return parts

    def _count(self, where: np.ndarray, by: int) -> np.ndarray:
        """Add `by` live rows for every occurrence of a segment's slot. Return the distinct slots."""
        slots, times = np.unique(where, return_counts=True)
        self.live.values[slots] += (by * times).astype(np.int32)
        return slots

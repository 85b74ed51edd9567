"""How samples ended: a count per reason, and the last ids, so that late puts and acks for them are recognised.

    id ──xxh3──► mark ──► dict of the last few ──merged──► arrays of marks (sorted), reasons and numbers of the endings

An id is remembered by its 64-bit checksum: nobody asks for its text, only whether it has ended, and how. So 100,000 ids
take 4 MB, all of it from the start: memory that fills up would look like a leak of a run that lasts for days.

Invariants: `counts` is exact; the last `remembered` ids that ended are found, each with its reason, and at most
1/32 more; an id that did not end is mistaken for one of them with a probability of `remembered` / 2**64."""

from collections import Counter
from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from distqueue.samples.pages import NONE

DONE = "done"
REMEMBERED = 100_000
"""Ended ids that are kept, so that a late put or ack for one of them is recognised"""
PIECE = 8192
"""Endings that are merged at a time"""


def marks_of(ids: Sequence[str]) -> np.ndarray:
    """(B,) uint64: what is remembered of each id; the same in all processes."""
    return np.fromiter(map(xxh3_64_intdigest, map(str.encode, ids)), np.uint64, len(ids))


class EndingArrays(NamedTuple):
    """Endings in the order of their marks."""

    marks: np.ndarray
    how: np.ndarray
    """Code of the reason; NONE: no id has ended here yet"""
    numbers: np.ndarray
    """Number of the ending"""


class Endings:
    """`remembered`: how many ended ids are kept."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.remembered = remembered
        self.counts: Counter[str] = Counter()
        self.reasons = {DONE: 0}
        """Code of each reason"""
        self._new: dict[int, int] = {}
        """Code of the reason by mark, in the order in which they ended"""
        self._total = 0
        """ids that ended, without those in `_new`"""
        self._kept, self._spare = _arrays(remembered), _arrays(remembered)

    def find(self, ids: Sequence[str]) -> np.ndarray:
        """(B,) int32: code of the `reason` each ended for; NONE where it did not end, or long ago."""
        marks = marks_of(ids)
        how = np.fromiter(map(self._new.get, marks.tolist(), repeat(NONE)), np.int32, len(ids))
        at = np.minimum(np.searchsorted(self._kept.marks, marks), self.remembered - 1)
        return np.where(self._kept.marks[at] == marks, self._kept.how[at], how)

    def code(self, reason: str) -> int:
        return self.reasons.setdefault(reason, len(self.reasons))

    def reason(self, code: int) -> str:
        return list(self.reasons)[code]

    def add(self, ids: Sequence[str], reason: str) -> None:
        """Add ids that have just ended, in this order, none of which is remembered."""
        self.counts[reason] += len(ids)
        self.remember(marks_of(ids), np.full(len(ids), self.code(reason)))

    def remember(self, marks: np.ndarray, how: np.ndarray) -> None:
        """Keep the marks of ended ids and the codes of their reasons, forgetting the oldest ones."""
        self._new |= zip(marks.tolist(), how.tolist(), strict=True)
        if len(self._new) > self.remembered // 32:
            self._merge()

    def _merge(self) -> None:
        """Move what is in `_new` to the arrays, in which it replaces the oldest; piece by piece, as the memory of large
        intermediate arrays would stay with the process in part."""
        count = min(len(self._new), self.remembered)
        self._total += len(self._new)
        marks, how = np.fromiter(self._new, np.uint64), np.fromiter(self._new.values(), np.int32)
        order = np.argsort(marks[-count:])
        new = EndingArrays(marks[-count:][order], how[-count:][order], self._total - count + order)
        end = first = 0
        for start in range(0, self.remembered, PIECE):
            piece = [array[start : start + PIECE] for array in self._kept]
            last = count if start + PIECE >= self.remembered else int(np.searchsorted(new.marks, piece[0][-1]))
            stays = piece[2] >= self._total - self.remembered
            at = np.searchsorted(piece[0][stays], new.marks[first:last])
            begin, end = end, end + int(stays.sum()) + last - first
            for target, old, added in zip(self._spare, piece, new, strict=True):
                target[begin:end] = np.insert(old[stays], at, added[first:last])
            first = last
        self._kept, self._spare, self._new = self._spare, self._kept, {}

    def recent(self) -> tuple[np.ndarray, np.ndarray]:
        """What is remembered: marks and codes, in the order in which the ids ended."""
        marks, how, numbers = self._kept
        order = np.argsort(numbers)
        order = order[how[order] != NONE]
        marks = np.concatenate([marks[order], np.fromiter(self._new, np.uint64)])
        return marks, np.concatenate([how[order], np.fromiter(self._new.values(), np.int32)])


def _arrays(count: int) -> EndingArrays:
    """Arrays in which no id has ended yet, written as a whole so that their memory is taken now."""
    marks = np.full(count, np.iinfo(np.uint64).max, np.uint64)
    return EndingArrays(marks, np.full(count, NONE, np.int32), np.arange(-count, 0))

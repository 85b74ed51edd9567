"""How samples ended: a count per reason, and the last ids, so that late puts and acks for them are recognised.

    id ──xxh3──► mark ──► dict of the last few ──merged──► arrays of marks, reasons, and the order that sorts the marks

An id is remembered by its 64-bit checksum: nobody asks for its text, only whether it has ended, and how. So 100,000 ids
take 2 MB, all of it from the start: memory that fills up would look like a leak of a run that lasts for days.

Invariants: `counts` is exact; the last `remembered` ids that ended are found, each with its reason, and at most
1/32 more; an id that did not end is mistaken for one of them with a probability of `remembered` / 2**64."""

from collections import Counter
from collections.abc import Sequence
from itertools import repeat

import numpy as np
from xxhash import xxh3_64_intdigest

from distqueue.samples.pages import NONE

DONE = "done"
REMEMBERED = 100_000
"""Ended ids that are kept, so that a late put or ack for one of them is recognised"""


def marks_of(ids: Sequence[str]) -> np.ndarray:
    """(B,) uint64: what is remembered of each id; the same in all processes."""
    return np.fromiter(map(xxh3_64_intdigest, map(str.encode, ids)), np.uint64, len(ids))


class Endings:
    """`remembered`: how many ended ids are kept."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.remembered = remembered
        self.counts: Counter[str] = Counter()
        self.reasons = {DONE: 0}
        """Code of each reason"""
        self._new: dict[int, int] = {}
        """Code of the reason by mark, in the order in which they ended"""
        # Before so many ids have ended: marks without a reason, written as a whole so that their memory is taken now.
        self._marks, self._how = np.full(remembered, 2**64 - 1, np.uint64), np.full(remembered, NONE, np.int32)
        self._order = np.arange(remembered)
        self._oldest = 0
        """Place of the ending that the next one replaces"""

    def find(self, ids: Sequence[str]) -> np.ndarray:
        """(B,) int32: code of the `reason` each ended for; NONE where it did not end, or long ago."""
        marks = marks_of(ids)
        how = np.fromiter(map(self._new.get, marks.tolist(), repeat(NONE)), np.int32, len(ids))
        rank = np.searchsorted(self._marks, marks, sorter=self._order)
        at = self._order[np.minimum(rank, self.remembered - 1)]
        return np.where(self._marks[at] == marks, self._how[at], how)

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
            marks, how = (array[-self.remembered :] for array in self._unmerged())
            places = (self._oldest + np.arange(len(marks))) % self.remembered
            self._marks[places], self._how[places] = marks, how
            self._order[:] = np.argsort(self._marks)
            self._oldest, self._new = (int(places[-1]) + 1) % self.remembered, {}

    def recent(self) -> tuple[np.ndarray, np.ndarray]:
        """What is remembered: marks and codes, in the order in which the ids ended."""
        marks, how = self._unmerged()
        marks = np.concatenate([np.roll(self._marks, -self._oldest), marks])
        how = np.concatenate([np.roll(self._how, -self._oldest), how])
        return marks[how != NONE], how[how != NONE]

    def _unmerged(self) -> tuple[np.ndarray, np.ndarray]:
        return np.fromiter(self._new, np.uint64), np.fromiter(self._new.values(), np.int32)

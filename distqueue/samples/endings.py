"""How samples ended: a count per reason, and the last ids, so that late puts and acks for them are recognised.

Invariants: `counts` is exact; exactly the last `remembered` ids that ended are found, each with its reason;
their memory is taken at the start, as arrays that double while a run lasts for days would grow by a multiple of it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from distqueue.samples.names import NONE, NameIndex, Names

DONE = "done"
REMEMBERED = 100_000
"""Ended ids that are kept, so that a late put or ack for one of them is recognised"""


class Endings:
    """`remembered`: how many ended ids are kept."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.remembered = remembered
        self.counts: Counter[str] = Counter()
        self._index = NameIndex(room=remembered)
        self._total = 0
        """ids remembered so far: the next one goes to slot _total % remembered of a ring"""
        self._how = np.zeros(remembered, np.int32)
        self._reasons = {DONE: 0}

    def find(self, names: Names) -> np.ndarray:
        """(B,) int32: code of the `reason` each ended for; NONE where it did not end, or long ago."""
        slots = self._index.find(names)
        return np.where(slots == NONE, NONE, self._how[np.maximum(slots, 0)])

    def code(self, reason: str) -> int:
        return self._reasons.setdefault(reason, len(self._reasons))

    def reason(self, code: int) -> str:
        return list(self._reasons)[code]

    def add(self, names: Names, reason: str) -> None:
        """Add ids that have just ended, in this order, none of which is remembered."""
        self.counts[reason] += len(names)
        self.remember(names, np.full(len(names), self.code(reason), np.int32))

    def remember(self, names: Names, how: np.ndarray) -> None:
        """Keep ended ids and the codes of their reasons, forgetting the oldest ones."""
        if len(names) > self.remembered:
            names, how = names.take(np.arange(len(names) - self.remembered, len(names))), how[-self.remembered :]
        slots = np.arange(self._total, self._total + len(names)) % self.remembered
        if len(forgotten := slots[np.arange(self._total, self._total + len(names)) >= self.remembered]):
            self._index.remove(forgotten)
        self._how[slots] = how
        self._index.insert(names, slots)
        self._total += len(names)

    def recent(self) -> tuple[tuple[str, ...], list[str]]:
        """The remembered ids and their reasons, in the order in which they ended."""
        first = max(0, self._total - self.remembered)
        slots = np.arange(first, self._total) % self.remembered
        reasons = list(self._reasons)
        return self._index.texts(slots), [reasons[code] for code in self._how[slots].tolist()]

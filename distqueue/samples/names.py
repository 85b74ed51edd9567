"""Names of slots, both ways: a dict from name to slot, and a list of the names by slot.

Invariants: a name is found exactly while it is in the index, under its slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from distqueue.samples.pages import NONE


class Names:
    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._texts: list[str] = []
        """"" at slots without a name"""

    def find(self, names: Sequence[str]) -> np.ndarray:
        """(B,) int64: slot per name; NONE: not in the index."""
        return np.fromiter(map(self._slots.get, names, repeat(NONE)), np.int64, len(names))

    def insert(self, names: Sequence[str], slots: np.ndarray) -> None:
        """Add distinct names that are not in the index."""
        self._texts += [""] * (int(slots.max(initial=-1)) + 1 - len(self._texts))
        self._slots.update(zip(names, slots.tolist(), strict=True))
        for name, slot in zip(names, slots.tolist(), strict=True):
            self._texts[slot] = name

    def remove(self, slots: np.ndarray) -> tuple[str, ...]:
        """Remove the names of distinct slots, and return them."""
        names = self.texts(slots)
        for name, slot in zip(names, slots.tolist(), strict=True):
            del self._slots[name]
            self._texts[slot] = ""
        return names

    def texts(self, slots: np.ndarray) -> tuple[str, ...]:
        """The names of these slots."""
        return tuple(map(self._texts.__getitem__, slots.tolist()))

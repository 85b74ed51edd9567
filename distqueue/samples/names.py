"""Names of slots, both ways: a dict from name to slot, and a list of the names by slot.

Invariants: a name is found exactly while it is in the index, under its slot."""

from collections.abc import Iterable, Sequence
from itertools import repeat

import numpy as np

from distqueue.samples.pages import NONE


class Texts:
    """A text per slot; "" where there is none."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def set(self, slots: np.ndarray, texts: Iterable[str]) -> None:
        self._texts += [""] * (int(slots.max(initial=-1)) + 1 - len(self._texts))
        for slot, text in zip(slots.tolist(), texts, strict=False):
            self._texts[slot] = text

    def clear(self, slots: np.ndarray) -> None:
        self.set(slots, repeat(""))

    def of(self, slots: np.ndarray) -> tuple[str, ...]:
        return tuple(map(self._texts.__getitem__, slots.tolist()))


class NameTable(Texts):
    """The slots of names, and their texts."""

    def __init__(self) -> None:
        super().__init__()
        self._slots: dict[str, int] = {}

    def find(self, names: Sequence[str]) -> np.ndarray:
        """(B,) int64: slot per name; NONE: not in the index."""
        return np.fromiter(map(self._slots.get, names, repeat(NONE)), np.int64, len(names))

    def insert(self, names: Sequence[str], slots: np.ndarray) -> None:
        """Add distinct names that are not in the index."""
        self._slots.update(zip(names, slots.tolist(), strict=True))
        self.set(slots, names)

    def remove(self, slots: np.ndarray) -> tuple[str, ...]:
        """Remove the names of distinct slots, and return them."""
        names = self.of(slots)
        for name in names:
            del self._slots[name]
        self.clear(slots)
        return names

"""Names to slots: an open-addressing hash table in two numpy arrays, searched and changed by whole batches.

    hash(name) ──low bits──► entries: | 32 bits of hash | slot + 2 |     0: empty, 1: erased; linear probing
                                                            └──► heads: the name's first bytes, by slot

Names are kept as UTF-8: up to HEAD_BYTES in an array as wide as the longest needs, the rest of the few longer ones in a
dict. No name holds a NUL, so zeros behind a name are padding.

Invariants (property-tested against a dict): a name is found exactly while it is in, under the slot it was given, also
where hashes collide, as equal hashes are only a reason to compare the bytes; at most MAX_FILL of the entries are used
or erased, so that every search meets an empty one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

HEAD_BYTES = 64
MAX_FILL = 0.65
EMPTY, ERASED, FIRST_SLOT = 0, 1, 2
NONE = -1


@dataclass(frozen=True, eq=False)
class Names:
    """B names, encoded and hashed once for all look-ups of a call."""

    texts: Sequence[str]
    hashes: np.ndarray
    """(B,) uint64, of which the lower 32 bits are set"""
    heads: np.ndarray
    """(B,) bytes: the first HEAD_BYTES of each"""
    tails: dict[int, bytes]
    """the rest of those that are longer, by position"""

    @classmethod
    def of(cls, texts: Sequence[str], hash_of: Callable[[str], int] = hash) -> Names:
        """ValueError: a NUL in a name, or what UTF-8 cannot hold."""
        if "\0" in "".join(texts):
            bad = next(text for text in texts if "\0" in text)
            raise ValueError(f"name {bad!r}: expected no NUL in a sample's or group's name")
        encoded = [text.encode() for text in texts]
        longest = max(map(len, encoded), default=1)
        heads = np.array(encoded, dtype=f"S{min(max(longest, 1), HEAD_BYTES)}")
        is_long = longest > HEAD_BYTES
        tails = {i: name[HEAD_BYTES:] for i, name in enumerate(encoded) if len(name) > HEAD_BYTES} if is_long else {}
        hashes = np.fromiter(map(hash_of, texts), np.int64, len(texts)).view(np.uint64) & np.uint64(0xFFFFFFFF)
        return cls(texts, hashes, heads, tails)

    def take(self, positions: np.ndarray) -> Names:
        texts = [self.texts[i] for i in positions.tolist()]
        tails = {k: self.tails[i] for k, i in enumerate(positions.tolist()) if i in self.tails} if self.tails else {}
        return Names(texts, self.hashes[positions], self.heads[positions], tails)

    def __len__(self) -> int:
        return len(self.texts)


class NameIndex:
    """Which slot has which name. The slots are the caller's; `hash_of` must be the one its `Names` were made with."""

    def __init__(self, hash_of: Callable[[str], int] = hash) -> None:
        self._hash_of = hash_of
        self._entries = np.zeros(64, np.uint64)
        self._used = self._erased = 0
        self._heads = np.zeros(64, "S8")
        self._tails: dict[int, bytes] = {}

    def names(self, texts: Sequence[str]) -> Names:
        return Names.of(texts, self._hash_of)

    def __len__(self) -> int:
        return self._used

    @property
    def nbytes(self) -> int:
        return self._entries.nbytes + self._heads.nbytes

    def find(self, names: Names) -> np.ndarray:
        """(B,) int64: slot per name, NONE where it is not in."""
        found = np.full(len(names), NONE, np.int64)
        pending, mask = np.arange(len(names)), np.uint64(len(self._entries) - 1)
        at = names.hashes & mask
        while pending.size:
            entries = self._entries[at]
            slots = (entries & np.uint64(0xFFFFFFFF)).astype(np.int64) - FIRST_SLOT
            alike = np.flatnonzero((entries >> np.uint64(32) == names.hashes[pending]) & (slots >= 0))
            equal = alike[self._same(names, pending[alike], slots[alike])]
            found[pending[equal]] = slots[equal]
            going_on = entries != EMPTY
            going_on[equal] = False
            pending, at = pending[going_on], at[going_on] + np.uint64(1) & mask
        return found

    def insert(self, names: Names, slots: np.ndarray) -> None:
        """Adds distinct names that are not in."""
        self._make_room(len(names))
        self._keep(names, slots)
        self._place(names.hashes << np.uint64(32) | (slots + FIRST_SLOT).astype(np.uint64))
        self._used += len(names)

    def remove(self, names: Names, slots: np.ndarray) -> None:
        """Takes out distinct names that are in, each under its slot."""
        wanted, mask = names.hashes << np.uint64(32) | (slots + FIRST_SLOT).astype(np.uint64), self._mask
        pending, at = np.arange(len(names)), names.hashes & mask
        places = at.copy()
        while pending.size:
            going_on = self._entries[at] != wanted[pending]
            places[pending] = at
            pending, at = pending[going_on], at[going_on] + np.uint64(1) & mask
        self._erase(places)
        self._used -= len(names)
        if self._tails:
            for slot in slots.tolist():
                self._tails.pop(slot, None)

    def texts(self, slots: np.ndarray) -> tuple[str, ...]:
        """The names under these slots."""
        if not len(slots):
            return ()
        encoded = self._heads[slots].tolist()
        if self._tails:
            encoded = [head + self._tails.get(slot, b"") for head, slot in zip(encoded, slots.tolist(), strict=True)]
        return tuple(b"\0".join(encoded).decode().split("\0"))

    @property
    def _mask(self) -> np.uint64:
        return np.uint64(len(self._entries) - 1)

    def _same(self, names: Names, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Whether the name at each position is the one under the slot."""
        same = self._heads[slots] == names.heads[positions]
        if self._tails or names.tails:
            for k in np.flatnonzero(same).tolist():
                same[k] = self._tails.get(int(slots[k]), b"") == names.tails.get(int(positions[k]), b"")
        return same

    def _keep(self, names: Names, slots: np.ndarray) -> None:
        """Stores the names by slot, making the array longer and wider as they need it."""
        size, width = len(self._heads), self._heads.dtype.itemsize
        needed = int(slots.max(initial=-1)) + 1
        if needed > size or names.heads.dtype.itemsize > width:
            width = max(width, -(-names.heads.dtype.itemsize // 4) * 4)
            heads = np.zeros(size if needed <= size else max(needed, 2 * size), f"S{width}")
            heads[:size] = self._heads
            self._heads = heads
        self._heads[slots] = names.heads
        for position, tail in names.tails.items():
            self._tails[int(slots[position])] = tail

    def _make_room(self, count: int) -> None:
        if self._used + self._erased + count <= MAX_FILL * len(self._entries):
            return
        entries = self._entries[self._entries >= FIRST_SLOT]
        size = len(self._entries)
        while size < 2 * (self._used + count):
            size *= 2
        self._entries, self._erased = np.zeros(size, np.uint64), 0
        self._place(entries)

    def _place(self, entries: np.ndarray) -> None:
        """Every entry in the first place from its hash on that is free; of those that want one place, one gets it."""
        pending, mask = entries, self._mask
        at = entries >> np.uint64(32) & mask
        while pending.size:
            held = self._entries[at]
            free = held < FIRST_SLOT
            self._entries[at[free]] = pending[free]
            placed = self._entries[at] == pending
            self._erased -= len(np.unique(at[placed & (held == ERASED)]))
            pending, at = pending[~placed], at[~placed] + np.uint64(1) & mask

    def _erase(self, places: np.ndarray) -> None:
        """An erased entry only has to keep a search going: before an empty one it is empty itself."""
        self._entries[places] = ERASED
        self._erased += len(places)
        while places.size:
            last = self._entries[places + np.uint64(1) & self._mask] == EMPTY
            places = places[last & (self._entries[places] == ERASED)]
            self._entries[places] = EMPTY
            self._erased -= len(places)
            places = places - np.uint64(1) & self._mask

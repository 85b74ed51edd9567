"""Maps names to slots: an open-addressing hash table in two numpy arrays, searched and changed by whole batches.

    hash(name) ──low bits──► bucket of WIDTH entries, and the next one if it is full:
                             | 32 bits of hash | slot + 2 |     0: empty, 1: erased
                                                   └──► heads: the name's first bytes, by slot

Names are stored as UTF-8: up to HEAD_BYTES in an array as wide as the longest one needs, the rest of the few longer
ones in a dict. No name contains a NUL, so trailing zeros are padding.

Invariants (property-tested against a dict): a name is found exactly while it is in the index, under its slot, also if
hashes collide, as names of equal hashes are compared byte by byte; at most MAX_FILL of the entries are used or erased,
so that every search meets an empty one; a bucket with an empty entry was never full, so no name that hashes to it is
stored in a later one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

HEAD_BYTES = 64
MAX_FILL = 0.65
WIDTH = 8
"""Entries per bucket, one cache line: most searches read one bucket"""
EMPTY, ERASED, FIRST_SLOT = 0, 1, 2
NONE = -1
LOW = np.uint64(0xFFFFFFFF)


@dataclass(frozen=True, eq=False)
class Names:
    """B names, encoded and hashed once for all look-ups of a call."""

    texts: Sequence[str]
    hashes: np.ndarray
    """(B,) uint64, of which the lower 32 bits are set"""
    heads: np.ndarray
    """(B,) bytes: the first HEAD_BYTES of each"""
    tails: dict[int, bytes]
    """the rest of longer names, by position"""

    @classmethod
    def of(cls, texts: Sequence[str], hash_of: Callable[[str], int] = hash) -> Names:
        """Encode and hash names. ValueError names one with a NUL; UnicodeEncodeError: one that UTF-8 cannot
        encode."""
        encoded = "\0".join(texts).encode().split(b"\0") if texts else []
        if len(encoded) != len(texts):
            invalid = next(text for text in texts if "\0" in text)
            raise ValueError(f"name {invalid!r}: expected no NUL in the name of a sample or group")
        longest = max(map(len, encoded), default=1)
        heads = np.array(encoded, dtype=f"S{min(max(longest, 1), HEAD_BYTES)}")
        is_long = longest > HEAD_BYTES
        tails = {i: name[HEAD_BYTES:] for i, name in enumerate(encoded) if len(name) > HEAD_BYTES} if is_long else {}
        hashes = np.fromiter(map(hash_of, texts), np.int64, len(texts)).view(np.uint64) & np.uint64(0xFFFFFFFF)
        return cls(texts, hashes=hashes, heads=heads, tails=tails)

    def take(self, positions: np.ndarray) -> Names:
        texts = list(map(self.texts.__getitem__, positions.tolist()))
        tails = {k: self.tails[i] for k, i in enumerate(positions.tolist()) if i in self.tails} if self.tails else {}
        return Names(texts, hashes=self.hashes[positions], heads=self.heads[positions], tails=tails)

    def __len__(self) -> int:
        return len(self.texts)


class NameIndex:
    """The slots of names. The caller chooses the slots; `hash_of` must be the one that made its `Names`.

    `room`: number of names for which memory is taken at once.
    """

    def __init__(self, hash_of: Callable[[str], int] = hash, room: int = 32) -> None:
        self._hash_of = hash_of
        self._buckets = np.zeros((1 << max(3, (2 * room // WIDTH - 1).bit_length()), WIDTH), np.uint64)
        self._used = self._erased = 0
        self._heads = np.zeros(max(64, room), "S8")
        self._hashes = np.zeros(max(64, room), np.uint32)
        """by slot, so that names are removed or copied to another index without encoding and hashing them again"""
        self._tails: dict[int, bytes] = {}

    def names(self, texts: Sequence[str]) -> Names:
        return Names.of(texts, self._hash_of)

    def __len__(self) -> int:
        return self._used

    def find(self, names: Names) -> np.ndarray:
        """(B,) int64: slot per name; NONE: not in the index."""
        slots_B = np.full(len(names), NONE, np.int64)
        pending, bucket = np.arange(len(names)), names.hashes & self._mask
        while pending.size:
            entries = self._buckets.take(bucket.view(np.int64), axis=0)  # a third of the time of indexing
            hashes = entries.view("<u4")[:, 1::2]
            alike = np.flatnonzero(hashes == names.hashes[pending, None].astype(np.uint32))
            slots = (entries.ravel()[alike] & LOW).astype(np.int64) - FIRST_SLOT
            alike, slots = alike[slots >= 0], slots[slots >= 0]
            equal = self._same(names, pending[alike // WIDTH], slots)
            found = alike[equal] // WIDTH
            slots_B[pending[found]] = slots[equal]
            is_missing = np.ones(len(pending), np.bool_)
            is_missing[found] = False
            missing = np.flatnonzero(is_missing)
            missing = missing[(entries[missing] != EMPTY).all(1)]
            pending, bucket = pending[missing], bucket[missing] + np.uint64(1) & self._mask
        return slots_B

    def at(self, slots: np.ndarray) -> Names:
        """The names of these slots, for an index with the same `hash_of`."""
        if not self._tails:
            tails = {}
        else:
            tails = {k: self._tails[slot] for k, slot in enumerate(slots.tolist()) if slot in self._tails}
        hashes = self._hashes[slots].astype(np.uint64)
        return Names(self.texts(slots), hashes=hashes, heads=self._heads[slots], tails=tails)

    def insert(self, names: Names, slots: np.ndarray) -> None:
        """Add distinct names that are not in the index."""
        self._make_room(len(names))
        self._keep(names, slots)
        self._place(names.hashes << np.uint64(32) | (slots + FIRST_SLOT).astype(np.uint64))
        self._used += len(names)

    def remove(self, slots: np.ndarray) -> None:
        """Remove the names of distinct slots."""
        hashes = self._hashes[slots].astype(np.uint64)
        wanted = hashes << np.uint64(32) | (slots + FIRST_SLOT).astype(np.uint64)
        bucket = hashes & self._mask
        while wanted.size:
            entries = self._buckets[bucket]
            row, k = np.nonzero(entries == wanted[:, None])
            never_full = (entries[row] == EMPTY).any(1)
            self._buckets[bucket[row], k] = np.where(never_full, EMPTY, ERASED)
            self._erased += int((~never_full).sum())
            unresolved = np.ones(len(wanted), np.bool_)
            unresolved[row] = False
            wanted, bucket = wanted[unresolved], bucket[unresolved] + np.uint64(1) & self._mask
        self._used -= len(slots)
        if self._tails:
            for slot in slots.tolist():
                self._tails.pop(slot, None)

    def texts(self, slots: np.ndarray) -> tuple[str, ...]:
        """The names of these slots."""
        if not len(slots):
            return ()
        encoded = self._heads[slots].tolist()
        if self._tails:
            encoded = [head + self._tails.get(slot, b"") for head, slot in zip(encoded, slots.tolist(), strict=True)]
        return tuple(b"\0".join(encoded).decode().split("\0"))

    @property
    def _mask(self) -> np.uint64:
        return np.uint64(len(self._buckets) - 1)

    def _same(self, names: Names, positions: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Whether the name at each position is that of the slot."""
        same = self._heads[slots] == names.heads[positions]
        if self._tails or names.tails:
            for k in np.flatnonzero(same).tolist():
                same[k] = self._tails.get(int(slots[k]), b"") == names.tails.get(int(positions[k]), b"")
        return same

    def _keep(self, names: Names, slots: np.ndarray) -> None:
        """Store names by slot, growing the array in length and width as needed."""
        size, width = len(self._heads), self._heads.dtype.itemsize
        needed = int(slots.max(initial=-1)) + 1
        if needed > size or names.heads.dtype.itemsize > width:
            width = max(width, -(-names.heads.dtype.itemsize // 4) * 4)
            heads = np.zeros(size if needed <= size else max(needed, 2 * size), f"S{width}")
            heads[:size] = self._heads
            hashes = np.zeros(len(heads), np.uint32)
            hashes[:size] = self._hashes
            self._heads, self._hashes = heads, hashes
        self._heads[slots], self._hashes[slots] = names.heads, names.hashes
        for position, tail in names.tails.items():
            self._tails[int(slots[position])] = tail

    def _make_room(self, count: int) -> None:
        """Rehash into more buckets if `count` more names would exceed MAX_FILL."""
        if self._used + self._erased + count <= MAX_FILL * self._buckets.size:
            return
        entries = self._buckets[self._buckets >= FIRST_SLOT]
        size = self._buckets.size
        while size < 2 * (self._used + count):
            size *= 2
        self._buckets, self._erased = np.zeros((size // WIDTH, WIDTH), np.uint64), 0
        self._place(entries)

    def _place(self, entries: np.ndarray) -> None:
        """Place every entry in the first bucket, from its hash on, with a free place: of those that begin at one
        bucket, entry r takes its free place r, and those for which there is none go on to the next bucket."""
        bucket = (entries >> np.uint64(32) & self._mask).astype(np.int64)
        while entries.size:
            order = np.argsort(bucket, kind="stable")
            entries, bucket = entries[order], bucket[order]
            starts = np.flatnonzero(np.diff(bucket, prepend=-1))
            rank = np.arange(len(bucket)) - np.repeat(starts, np.diff(starts, append=len(bucket)))
            held = self._buckets.take(bucket, axis=0)
            num_free = (held < FIRST_SLOT).cumsum(1, dtype=np.int8)
            has, k = num_free[:, -1] > rank, (num_free > rank[:, None]).argmax(1)
            self._buckets[bucket[has], k[has]] = entries[has]
            self._erased -= int((held[has, k[has]] == ERASED).sum())
            entries, bucket = entries[~has], bucket[~has] + 1 & int(self._mask)

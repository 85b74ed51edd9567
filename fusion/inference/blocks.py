"""Manage the blocks of the KV cache: reference counts, a free list, and a prefix cache. Pure, without tensors.

A block is in exactly one state:

    free ──take──► held (references ≥ 1) ──release, unnamed──► free
                     ▲   │ name (its content is complete: tokens of a whole block and all before it)
              share  │   └─release, named──► cached ──evict (least recently used first)──► free
                     └───────────────────────────┘

Invariants: free + cached + held = all blocks, disjoint; a block has as many references as holders; only a held or
cached block has a name, and no two blocks have the same; a name is a hash of the policy version and of all tokens up to
the block's end, so a lookup never returns a block of another version or another prefix.

Blocks that were never taken have no state, so that a large cache is made, and emptied, in the time of the blocks used.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

BlockName = bytes


def root_name(policy_version: int) -> BlockName:
    """Return the name that precedes the first block of every sequence under a policy version."""
    return hashlib.blake2b(b"version %d" % policy_version, digest_size=16).digest()


def next_name(previous: BlockName, tokens: Sequence[int]) -> BlockName:
    """Return the name of a full block: a hash of the previous block's name and its tokens, equal in every process."""
    return hashlib.blake2b(previous + array("q", tokens).tobytes(), digest_size=16).digest()


def extend_names(names: list[BlockName], count: int, *, version: int, tokens: Sequence[int], size: int) -> None:
    """Append the names of further full blocks of ``tokens``, until there are ``count``."""
    for i in range(len(names), count):
        names.append(next_name(names[-1] if names else root_name(version), tokens[i * size : (i + 1) * size]))


class BlockManager:
    """Manage blocks ``0 … count - 1`` of ``block_size`` tokens each."""

    def __init__(self, count: int, block_size: int):
        self.count, self.block_size = count, block_size
        self._free: list[int] = []
        """Free blocks, without those that were never taken"""
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._references: list[int] = []
        """Number of holders of each block that was ever taken, as `_names`"""
        self._names: list[BlockName | None] = []
        self._by_name: dict[BlockName, int] = {}

    @property
    def highest(self) -> int:
        """The highest block ever taken, -1 if none was: low ones are taken first."""
        return len(self._references) - 1

    @property
    def available(self) -> int:
        """Number of blocks that `take` can return: free ones, and cached ones that it would evict."""
        return self.count - len(self._references) + len(self._free) + len(self._cached)

    def find(self, names: Iterable[BlockName]) -> list[int]:
        """Return the blocks of the longest cached prefix of a chain of names. Take no reference."""
        blocks = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def idle(self, blocks: Iterable[int]) -> int:
        """Count the blocks that are available now and would not be after `share`."""
        return sum(self._references[block] == 0 for block in blocks)

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to blocks that `find` returned."""
        for block in blocks:
            if self._references[block] == 0:
                del self._cached[block]
            self._references[block] += 1

    def take(self, count: int) -> list[int]:
        """Take blocks in order, with one reference each and undefined content; evict the least recently used ones."""
        assert count <= self.available, f"{count} blocks requested, {self.available} available"
        return sorted(self._take() for _ in range(count))

    def name(self, block: int, name: BlockName) -> None:
        """Name a held block, so that `find` returns it. If another block has the name, this one stays unnamed."""
        assert self._references[block] > 0 and self._names[block] is None
        if name not in self._by_name:
            self._names[block] = name
            self._by_name[name] = block

    def release(self, blocks: Sequence[int]) -> None:
        """Release one reference of each block. The last blocks of a sequence are evicted first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} was released more often than taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._names[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def forget(self) -> None:
        """Remove all names and free the cached blocks, when their KV belongs to an older policy or was released."""
        for block in list(self._cached):
            self._evict(block)
        self._names = [None] * len(self._references)
        self._by_name.clear()

    def _take(self) -> int:
        if not self._free and len(self._references) < self.count:
            self._references.append(1)
            self._names.append(None)
            return self.highest
        if not self._free:
            self._evict(next(iter(self._cached)))
        block = self._free.pop()
        self._references[block] = 1
        return block

    def _evict(self, block: int) -> None:
        del self._cached[block]
        name = self._names[block]
        assert name is not None
        del self._by_name[name]
        self._names[block] = None
        self._free.append(block)

"""The segment ledger: which segment lies in which file of which shard, which files are free, which to spill. Pure.

    reserve ──► reserved ──commit──► live ──free──► its file is free: reused, or discarded
                    └── cancel / expired ───────────────▲

A shard is a folder of one node's shared memory (or, with a journal, of its disk) with a bound on its bytes. Nothing
here touches a file: files to unlink are listed in `discards`, for the shard.

Invariants (property-tested in tests/distqueue/test_segments.py):
1. A file belongs to at most one segment, and is free, live or reserved, never two of them.
2. `held` of a shard is the bytes of its files in memory, free ones included; no reservation raises it above
   `max_bytes`, except one with `exceed`.
3. A pinned segment's file is neither reused nor discarded until it is unpinned.
4. Numbers are never reused.
5. The file of a reservation that was not committed is not reused: its writer may be slow rather than dead."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field
from itertools import count

from distqueue.config import GRAIN
from distqueue.errors import PutTooLarge

FREE_BYTES = 256 << 20
"""Bytes of free files a shard keeps for reuse; or as many as are live, if that is more"""


@dataclass
class ShardState:
    """`node`: the node whose writers write here. `recycles`: files are reused (memory) or written only once (journal).
    `spill`: a folder on disk for segments that do not fit in memory, or None."""

    name: str
    _: KW_ONLY
    node: str
    folder: str
    max_bytes: int
    recycles: bool = True
    spill: str | None = None
    leaving: bool = False
    held: int = 0
    free: dict[str, int] = field(default_factory=dict)
    """Path → bytes, oldest first"""


@dataclass
class Segment:
    """The payload of one put, in one file."""

    number: int
    _: KW_ONLY
    shard: str
    path: str
    nbytes: int
    """Bytes of the contents"""
    size: int
    """Bytes of the file"""
    live: bool = False
    expires_s: float = float("inf")
    """Time at which a reservation expires"""
    spilled: bool = False
    pins: int = 0
    dead: bool = False
    """Freed while pinned"""


class SegmentLedger:
    def __init__(self, epoch: str) -> None:
        """`epoch`: part of file names, so that they differ from those of any earlier ledger."""
        self.shards: dict[str, ShardState] = {}
        self.segments: dict[int, Segment] = {}
        self._reserved: dict[int, Segment] = {}
        """The segments being written"""
        self.discards: list[tuple[str, str]] = []
        """(shard, path) of files to unlink"""
        self._epoch = epoch
        self._numbers = count(1)
        self._files = count()

    def add_shard(self, shard: ShardState) -> None:
        assert shard.name not in self.shards
        self.shards[shard.name] = shard

    def shard_for(self, node: str) -> ShardState | None:
        """Choose the shard for a writer of this node: the node's own, or the emptiest; None if all are leaving."""
        staying = [shard for shard in self.shards.values() if not shard.leaving]
        return min(staying, key=lambda shard: (shard.node != node, shard.held, shard.name), default=None)

    def reserve(self, name: str, nbytes: int, expires_s: float, *, exceed: bool = False) -> Segment | None:
        """Reserve a file for `nbytes`, or return None: no room. `exceed`: ignore the shard's bound.

        Raise PutTooLarge: the shard could never hold it."""
        shard = self.shards[name]
        size = max(nbytes + -nbytes % GRAIN, GRAIN)
        if size > shard.max_bytes and not exceed:
            bound = f"max_bytes={shard.max_bytes:,}, in whole blocks of {GRAIN:,}"
            raise PutTooLarge(
                f"a put of {nbytes:,} bytes; a shard of this queue holds {bound}: increase queue.max_bytes"
            )
        fitting = [(free, path) for path, free in shard.free.items() if size <= free <= 2 * size]
        if fitting:
            size, path = min(fitting)
            del shard.free[path]
        else:
            lacking = max(0, shard.held + size - shard.max_bytes)
            self._trim(shard, max(0, sum(shard.free.values()) - lacking))
            if shard.held + size > shard.max_bytes and not exceed:
                return None
            shard.held += size
            path = f"{shard.folder}/{self._epoch}-{next(self._files)}"
        segment = Segment(next(self._numbers), shard=name, path=path, nbytes=nbytes, size=size, expires_s=expires_s)
        self.segments[segment.number] = self._reserved[segment.number] = segment
        return segment

    def commit(self, number: int) -> None:
        segment = self.segments[number]
        segment.live, segment.expires_s = True, float("inf")
        self._reserved.pop(number, None)

    def free(self, numbers: Iterable[int]) -> None:
        """Free segments without live samples, or cancelled reservations; a pinned segment once it is unpinned."""
        for number in numbers:
            segment = self.segments[number]
            if segment.pins:
                segment.dead = True
                continue
            del self.segments[number]
            self._reserved.pop(number, None)
            self._release_file(segment)

    def adopt(self, segment: Segment) -> None:
        """Add a live segment that was recovered, whose file exists already."""
        self.segments[segment.number] = segment
        self._numbers = count(max(segment.number + 1, next(self._numbers)))
        if segment.shard in self.shards and not segment.spilled:
            self.shards[segment.shard].held += segment.size

    def assign(self, number: int, name: str) -> None:
        """Assign an adopted segment to a shard that sees its file."""
        segment = self.segments[number]
        segment.shard = name
        self.shards[name].held += segment.size

    def remove_shard(self, name: str) -> None:
        assert not self.of_shard(name), "a shard is removed before its segments have moved"
        del self.shards[name]

    def next_expiry_s(self) -> float | None:
        """When the next reservation expires; None: nothing is reserved."""
        return min((segment.expires_s for segment in self._reserved.values()), default=None)

    def expired(self, now_s: float) -> list[int]:
        return [segment.number for segment in self._reserved.values() if segment.expires_s <= now_s]

    @contextmanager
    def pinned(self, *numbers: int) -> Iterator[None]:
        """Keep the files of these segments unchanged inside the block, even if their samples end."""
        for number in numbers:
            self.segments[number].pins += 1
        try:
            yield
        finally:
            for number in numbers:
                segment = self.segments[number]
                segment.pins -= 1
                if segment.dead and not segment.pins:
                    self.free([number])

    def moved(self, number: int, name: str, path: str, *, spilled: bool = False) -> None:
        """Record that a segment lies in another file of its own now; the old file is released."""
        segment = self.segments[number]
        self._release_file(segment)
        segment.shard, segment.path, segment.spilled = name, path, spilled
        if name in self.shards and not spilled:  # a journal is replayed before any shard exists
            self.shards[name].held += segment.size

    def to_spill(self, name: str, nbytes: int) -> list[int]:
        """Choose segments to spill for a put of `nbytes`: the youngest, which are read last. []: not possible."""
        shard, chosen = self.shards[name], []
        held = shard.held - sum(shard.free.values()) + nbytes + -nbytes % GRAIN
        for segment in reversed(self.segments.values()):
            if held <= shard.max_bytes:
                break
            if segment.shard == name and segment.live and not segment.spilled and not segment.pins:
                chosen.append(segment.number)
                held -= segment.size
        return chosen if held <= shard.max_bytes else []

    def of_shard(self, name: str) -> list[Segment]:
        return [segment for segment in self.segments.values() if segment.shard == name]

    @property
    def live(self) -> list[Segment]:
        return [segment for segment in self.segments.values() if segment.live and not segment.dead]

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self.segments.values() if segment.live)

    def _release_file(self, segment: Segment) -> None:
        shard = self.shards.get(segment.shard)
        if shard is None:
            return  # the shard was removed, with its folder
        if segment.spilled or not segment.live or not shard.recycles or shard.leaving:
            self.discards.append((segment.shard, segment.path))
            shard.held -= 0 if segment.spilled else segment.size
            return
        shard.free[segment.path] = segment.size
        live = shard.held - sum(shard.free.values())
        self._trim(shard, max(FREE_BYTES, live))

    def _trim(self, shard: ShardState, max_bytes: int) -> None:
        """Discard free files, oldest first, until at most `max_bytes` of them are kept."""
        kept = sum(shard.free.values())
        for path in list(shard.free):
            if kept <= max_bytes:
                return
            size = shard.free.pop(path)
            kept -= size
            shard.held -= size
            self.discards.append((shard.name, path))

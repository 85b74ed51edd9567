"""Which segment lies in which file of which shard: what may be written where, what is free, what goes to disk. Pure.

    reserve ──► reserved ──commit──► live ──free──► its file is free: written again, or discarded
                    └── cancel / expired ───────────────▲

A shard is a folder of one node's shared memory (or, with a journal, of its disk) with a bound on its bytes. Nothing
here touches a file: what is to be unlinked is left in `discards` for the shard to do.

Invariants (property-tested in tests/distqueue/test_segments.py):
1. A file belongs to at most one segment, and is free, live or reserved, never two of them.
2. `held` of a shard is the bytes of its files in memory, free ones included; no reservation brings it above
   `max_bytes` but one that may go beyond.
3. A pinned segment's file is neither written again nor discarded until it is let go.
4. Numbers are never given twice.
5. The file of a reservation that was not committed is not written again: its writer may be slow rather than dead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count

GRAIN = 1 << 12
"""Files are made in multiples of this, a page"""

FREE_BYTES = 256 << 20
"""Bytes of free files a shard keeps warm beyond what is live"""


@dataclass
class Shard:
    """`node`: whose writers write here. `recycles`: whether files are written again (in memory) or only once (journal).
    `spill`: a folder on disk for segments that memory has no room for, or None."""

    name: str
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
    number: int
    shard: str
    path: str
    nbytes: int
    """Bytes of its contents"""
    size: int
    """Bytes of its file"""
    live: bool = False
    expires_s: float = float("inf")
    """When a reservation is given up"""
    spilled: bool = False
    pins: int = 0
    dead: bool = False
    """Freed while pinned"""


class SegmentLedger:
    def __init__(self, epoch: str, first: int = 1) -> None:
        """`epoch` makes the names of files differ from those of any ledger before."""
        self.shards: dict[str, Shard] = {}
        self.segments: dict[int, Segment] = {}
        self._reserved: dict[int, Segment] = {}
        """Those of them that are being written"""
        self.discards: list[tuple[str, str]] = []
        """(shard, path) to be unlinked"""
        self._epoch = epoch
        self._numbers = count(first)
        self._files = count()

    def add_shard(self, shard: Shard) -> None:
        assert shard.name not in self.shards
        self.shards[shard.name] = shard

    def shard_for(self, node: str) -> Shard | None:
        """The shard that a writer of this node writes to: its own, or the emptiest; None if all are leaving."""
        staying = [shard for shard in self.shards.values() if not shard.leaving]
        return min(staying, key=lambda shard: (shard.node != node, shard.held, shard.name), default=None)

    def reserve(self, name: str, nbytes: int, expires_s: float, beyond: bool = False) -> Segment | None:
        """A file for `nbytes`, or None: no room. `beyond`: the bound does not hold for this one.

        ValueError if the shard could never hold it.
        """
        shard = self.shards[name]
        size = max(nbytes + -nbytes % GRAIN, GRAIN)
        if size > shard.max_bytes and not beyond:
            raise ValueError(f"a put of {nbytes:,} bytes; a shard of this queue holds max_bytes={shard.max_bytes:,}")
        fitting = [(free, path) for path, free in shard.free.items() if size <= free <= 2 * size]
        if fitting:
            size, path = min(fitting)
            del shard.free[path]
        else:
            self._make_room(shard, size)
            if shard.held + size > shard.max_bytes and not beyond:
                return None
            shard.held += size
            path = f"{shard.folder}/{self._epoch}-{next(self._files)}"
        segment = Segment(next(self._numbers), name, path, nbytes, size, expires_s=expires_s)
        self.segments[segment.number] = self._reserved[segment.number] = segment
        return segment

    def commit(self, number: int) -> None:
        segment = self.segments[number]
        segment.live, segment.expires_s = True, float("inf")
        self._reserved.pop(number, None)

    def free(self, numbers: Iterable[int]) -> None:
        """Nobody wants these any more."""
        for number in numbers:
            segment = self.segments[number]
            if segment.pins:
                segment.dead = True
                continue
            del self.segments[number]
            self._reserved.pop(number, None)
            self._let_go(segment)

    def adopt(self, segment: Segment) -> None:
        """A live segment of a journal, in a file that is there already."""
        self.segments[segment.number] = segment
        self._numbers = count(max(segment.number + 1, next(self._numbers)))
        if segment.shard in self.shards and not segment.spilled:
            self.shards[segment.shard].held += segment.size

    def adopted_by(self, number: int, name: str) -> None:
        """A shard of this queue's new life sees the file of an adopted segment."""
        segment = self.segments[number]
        segment.shard = name
        self.shards[name].held += segment.size

    def remove_shard(self, name: str) -> None:
        assert not self.of_shard(name), "a shard leaves when its segments have left"
        del self.shards[name]

    def next_expiry_s(self) -> float | None:
        """When the next reservation is given up."""
        return min((segment.expires_s for segment in self._reserved.values()), default=None)

    def expired(self, now_s: float) -> list[int]:
        """Reservations to give up: their writers are gone."""
        return [segment.number for segment in self._reserved.values() if segment.expires_s <= now_s]

    @contextmanager
    def pinned(self, *numbers: int) -> Iterator[None]:
        """Inside, the files of these segments stay what they are, even if nobody wants them any more."""
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

    def moved(self, number: int, name: str, path: str, spilled: bool = False) -> None:
        """Segment `number` lies in another file now, of its own; the old one is let go."""
        segment = self.segments[number]
        self._let_go(segment)
        segment.shard, segment.path, segment.spilled = name, path, spilled
        if name in self.shards and not spilled:  # a journal tells of moves before there are shards
            self.shards[name].held += segment.size

    def to_spill(self, name: str, nbytes: int) -> list[int]:
        """Segments to bring to disk for a put of `nbytes`: the youngest, as they are read last. []: it does not do."""
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
        """Segments with samples that somebody wants."""
        return [segment for segment in self.segments.values() if segment.live and not segment.dead]

    @property
    def nbytes(self) -> int:
        """Bytes of all live segments."""
        return sum(segment.nbytes for segment in self.segments.values() if segment.live)

    def _let_go(self, segment: Segment) -> None:
        shard = self.shards.get(segment.shard)
        if shard is None:
            return  # it left, and its folder with it
        if segment.spilled or not segment.live or not shard.recycles or shard.leaving:
            self.discards.append((segment.shard, segment.path))
            shard.held -= 0 if segment.spilled else segment.size
            return
        shard.free[segment.path] = segment.size
        live = shard.held - sum(shard.free.values())
        self._trim(shard, max(FREE_BYTES, live))

    def _make_room(self, shard: Shard, size: int) -> None:
        self._trim(shard, max(0, sum(shard.free.values()) - max(0, shard.held + size - shard.max_bytes)))

    def _trim(self, shard: Shard, most: int) -> None:
        """Discards free files, oldest first, until at most `most` bytes of them are kept."""
        kept = sum(shard.free.values())
        for path in list(shard.free):
            if kept <= most:
                return
            size = shard.free.pop(path)
            kept -= size
            shard.held -= size
            self.discards.append((shard.name, path))

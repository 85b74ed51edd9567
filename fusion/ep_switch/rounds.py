"""Pack the hops of jobs into rounds of bounded size, and assign allocations and releases of storage to rounds. Pure.

Jobs are processed in order. Each hop is put into the earliest rounds in which its sender and its receiver have capacity
and the receiver may allocate the unit that it belongs to. A later job may therefore overtake an earlier one, but never
uses storage that an earlier one relies on, since the earlier one's rounds are already assigned.

Invariants: in no round does a rank send, or write, more than ``room`` elements; an element is forwarded at least
IN_FLIGHT rounds after it was received. If every rank stays within its limit while jobs are filled one after the other,
it stays within it in the rounds too, where a unit counts as held until IN_FLIGHT rounds after its last reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from fusion.ep_switch.hops import Hop, legal_stop
from fusion.ep_switch.moves import Round, UnitId
from fusion.ep_switch.order import Storage
from fusion.ep_switch.senders import Job

IN_FLIGHT = 2
"""Number of rounds in flight at a time."""

MIN_PIECE_FRACTION = 1 / 8
"""Smallest piece that a hop is cut into, as a fraction of a round's capacity; its remainder may be smaller."""


def pack_rounds(jobs: Iterable[Job], room: int, storage: Storage, itemsize: int) -> tuple[Round, ...]:
    """Pack jobs, in order, into rounds.

    Args:
        room: maximum number of elements that a rank sends, and writes, in a round.
        storage: the state before the first job.
        itemsize: bytes of an element of the target.
    """
    packer = _Packer(room, storage)
    for job in jobs:
        packer.add(job, itemsize)
    return tuple(
        Round(tuple(hops), tuple(sorted(packer.allocate[k])), tuple(sorted(packer.release[k])))
        for k, hops in enumerate(packer.rounds)
    )


class _Packer:
    def __init__(self, room: int, storage: Storage):
        self.storage = storage
        self.rounds: list[list[Hop]] = []
        self.send: dict[int, _Lane] = defaultdict(lambda: _Lane(room))
        self.write: dict[int, _Lane] = defaultdict(lambda: _Lane(room))
        self.held = {rank: _Held(nbytes, storage.limit[rank]) for rank, nbytes in storage.resident.items()}
        self.readers = dict(storage.readers)
        self.last_read: dict[UnitId, int] = {}
        self.allocate: dict[int, list[UnitId]] = defaultdict(list)
        self.release: dict[int, list[UnitId]] = defaultdict(list)

    def add(self, job: Job, itemsize: int) -> None:
        """Place all hops of a job, and the allocations and releases that they cause."""
        takes = job.takes()
        nbytes: dict[int, int] = defaultdict(int)
        for (rank, _), numel in takes.items():
            nbytes[rank] += numel * itemsize
        earliest = {rank: self.held[rank].earliest(size) for rank, size in nbytes.items()}
        first: dict[UnitId, int] = {}
        reads: dict[UnitId, int] = {}
        # (rank, fragment) → (start, stop, round) of each piece that the rank receives
        rounds_received: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for hop in job.hops:
            at = earliest[hop.target_rank]
            if hop.relayed:
                received = rounds_received[hop.source_rank, id(hop.fragment)]
                at = max([at, *[k + IN_FLIGHT for a, b, k in received if a < hop.stop and hop.start < b]])
            placed = self._place(hop, at)
            rounds_received[hop.target_rank, id(hop.fragment)] += placed
            if not hop.relayed:
                reads[hop.reads] = max(placed[-1][2], reads.get(hop.reads, 0))
            first[hop.writes] = min(placed[0][2], first.get(hop.writes, placed[0][2]))
        for unit in takes:
            first.setdefault(unit, earliest[unit[0]])  # no hop writes it: it is hosted, or all padding
        for unit, at in first.items():
            self._reach(at)
            self.held[unit[0]].add(takes[unit] * itemsize, at)
            self.allocate[at].append(unit)
        for unit, at in reads.items():
            self._read(unit, at)

    def _place(self, hop: Hop, at: int) -> list[tuple[int, int, int]]:
        """Put a hop into rounds from ``at`` on; return (start, stop, round) of each piece."""
        write = self.write[hop.target_rank]
        lanes = (write,) if hop.local else (write, self.send[hop.source_rank])
        start, stop, fragment, placed = hop.start, hop.stop, hop.fragment, []
        while start < stop:
            left = stop - start
            at, numel = _first_room(lanes, at, min_numel=min(left, write.min_numel), max_numel=left)
            end = start + numel
            if start or end < fragment.numel:
                end = legal_stop(fragment, start, end)
            for lane in lanes:
                lane.take(at, end - start)
            self._reach(at)
            whole = end - start == hop.stop - hop.start
            self.rounds[at].append(hop if whole else hop._replace(start=start, stop=end))
            placed.append((start, end, at))
            start = end
        return placed

    def _reach(self, at: int) -> None:
        while len(self.rounds) <= at:
            self.rounds.append([])

    def _read(self, unit: UnitId, at: int) -> None:
        if unit in self.storage.size:
            self.last_read[unit] = at = max(at, self.last_read.get(unit, 0))
            self.readers[unit] -= 1
            if self.readers[unit] == 0:
                self.held[unit[0]].add(-self.storage.size[unit], at + IN_FLIGHT)
                self.release[at].append(unit)


class _Lane:
    """Tracks what one rank may still send, or write, in each round. ``open``: the first round with at least
    ``min_numel`` elements left."""

    __slots__ = ("left", "min_numel", "open", "room")

    def __init__(self, room: int):
        self.room, self.min_numel, self.open = room, max(1, int(room * MIN_PIECE_FRACTION)), 0
        self.left: list[int] = []

    def take(self, at: int, numel: int) -> None:
        left = self.left
        if at >= len(left):
            left += [self.room] * (at + 1 - len(left))
        left[at] -= numel
        while self.open < len(left) and left[self.open] < self.min_numel:
            self.open += 1


def _first_room(lanes: tuple[_Lane, ...], at: int, *, min_numel: int, max_numel: int) -> tuple[int, int]:
    """Return the first round from ``at`` on in which all lanes have room for ``min_numel`` elements, and their room, up
    to ``max_numel``."""
    at = max([at, *[lane.open for lane in lanes]])
    while True:
        numel = max_numel
        for lane in lanes:
            room = lane.left[at] if at < len(lane.left) else lane.room
            if room < numel:
                numel = room
        if numel >= min_numel:
            return at, numel
        at += 1


class _Held:
    """Tracks the bytes that one rank holds in each round."""

    __slots__ = ("bytes", "final", "last", "limit")

    def __init__(self, nbytes: int, limit: int):
        self.limit, self.final, self.last = limit, nbytes, 0
        self.bytes = np.full(64, nbytes, dtype=np.int64)

    def earliest(self, nbytes: int) -> int:
        """Return the first round from which ``nbytes`` more fit until the end; the last round if they never do."""
        room = self.limit - nbytes
        if self.final > room:
            return self.last
        over = np.flatnonzero(self.bytes[: self.last] > room)
        return int(over[-1]) + 1 if len(over) else 0

    def add(self, nbytes: int, at: int) -> None:
        """Add ``nbytes`` from round ``at`` on."""
        if at >= len(self.bytes):
            grown = np.full(2 * at, self.final, dtype=np.int64)
            grown[: len(self.bytes)] = self.bytes
            self.bytes = grown
        self.final, self.last = self.final + nbytes, max(self.last, at)
        self.bytes[at:] += nbytes

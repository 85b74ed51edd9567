"""Packs the hops of jobs into rounds of bounded size, between which storage comes and goes. Pure.

Jobs are taken in their order. Each hop goes into the earliest rounds in which its sender and its receiver have room and
the receiver may take the unit that it is part of. So a later job may overtake an earlier one, but never in storage that
the earlier one counts on: that one has its rounds already.

Invariants: in no round does a rank send, or write, more than ``room`` elements; an element is passed on at least
IN_FLIGHT rounds after it came. If every rank stays within its limit while jobs are filled one after the other, it stays
within it in the rounds too, a unit counting as held until IN_FLIGHT rounds after its last reader.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from fusion.ep_switch.hops import Hop, legal_stop
from fusion.ep_switch.moves import Moves, Round, UnitId
from fusion.ep_switch.order import Storage
from fusion.ep_switch.senders import Job

IN_FLIGHT = 2
"""Rounds under way at a time."""

LEAST = 8
"""A hop is not cut into pieces smaller than one in so many of what a round has room for, but for its rest."""


def pack_rounds(jobs: Iterable[Job], room: int, storage: Storage, itemsize: int) -> tuple[Round, ...]:
    """The rounds of the jobs in their order.

    Args:
        room: elements that a rank may send, and write, in a round.
        storage: before the first job.
        itemsize: of the target.
    """
    packer = _Packer(room, storage)
    for job in jobs:
        packer.add(job, itemsize)
    return tuple(
        Round(Moves(hops), tuple(sorted(packer.allocate[k])), tuple(sorted(packer.release[k])))
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
        """Places all hops of a job, and the storage that they take and free."""
        takes = job.takes()
        nbytes: dict[int, int] = defaultdict(int)
        for (rank, _), numel in takes.items():
            nbytes[rank] += numel * itemsize
        earliest = {rank: self.held[rank].earliest(size) for rank, size in nbytes.items()}
        first = {unit: earliest[unit[0]] for unit in job.hosted}
        reads: dict[UnitId, int] = {}
        came: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        for hop in job.hops:
            at = earliest[hop.target_rank]
            if hop.relayed:
                brought = came[hop.source_rank, id(hop.fragment)]
                at = max([at, *[k + IN_FLIGHT for a, b, k in brought if a < hop.stop and hop.start < b]])
            placed = self._place(hop, at)
            came[hop.target_rank, id(hop.fragment)] += placed
            if not hop.relayed:
                reads[hop.reads] = max(placed[-1][2], reads.get(hop.reads, 0))
            first[hop.writes] = min(placed[0][2], first.get(hop.writes, placed[0][2]))
        for unit, at in first.items():
            self._reach(at)
            self.held[unit[0]].add(takes[unit] * itemsize, at)
            self.allocate[at].append(unit)
        for unit, at in reads.items():
            self._read(unit, at)

    def _place(self, hop: Hop, at: int) -> list[tuple[int, int, int]]:
        """Puts a hop into rounds from ``at`` on; (start, stop, round) of each piece."""
        write = self.write[hop.target_rank]
        lanes = (write,) if hop.local else (write, self.send[hop.source_rank])
        start, stop, fragment, placed = hop.start, hop.stop, hop.fragment, []
        while start < stop:
            at, amount = _first_room(lanes, at, min(stop - start, write.least), stop - start)
            end = start + amount
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
    """What one rank may still send, or write, in each round. ``open``: the first round with room worth taking."""

    __slots__ = ("least", "left", "open", "room")

    def __init__(self, room: int):
        self.room, self.least, self.open = room, max(1, room // LEAST), 0
        self.left: list[int] = []

    def take(self, at: int, amount: int) -> None:
        left = self.left
        if at >= len(left):
            left += [self.room] * (at + 1 - len(left))
        left[at] -= amount
        while self.open < len(left) and left[self.open] < self.least:
            self.open += 1


def _first_room(lanes: tuple[_Lane, ...], at: int, least: int, most: int) -> tuple[int, int]:
    """The first round from ``at`` on in which all lanes have room for ``least``, and for how much of ``most``."""
    at = max([at, *[lane.open for lane in lanes]])
    while True:
        amount = most
        for lane in lanes:
            room = lane.left[at] if at < len(lane.left) else lane.room
            if room < amount:
                amount = room
        if amount >= least:
            return at, amount
        at += 1


class _Held:
    """Bytes that one rank holds in each round."""

    __slots__ = ("bytes", "final", "last", "limit")

    def __init__(self, nbytes: int, limit: int):
        self.limit, self.final, self.last = limit, nbytes, 0
        self.bytes = np.full(64, nbytes, dtype=np.int64)

    def earliest(self, nbytes: int) -> int:
        """The first round from which on ``nbytes`` more may be held; if they never may, the last round."""
        room = self.limit - nbytes
        if self.final > room:
            return self.last
        over = np.flatnonzero(self.bytes[: self.last] > room)
        return int(over[-1]) + 1 if len(over) else 0

    def add(self, nbytes: int, at: int) -> None:
        """``nbytes`` more from round ``at`` on."""
        if at >= len(self.bytes):
            grown = np.full(2 * at, self.final, dtype=np.int64)
            grown[: len(self.bytes)] = self.bytes
            self.bytes = grown
        self.final, self.last = self.final + nbytes, max(self.last, at)
        self.bytes[at:] += nbytes

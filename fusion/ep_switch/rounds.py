"""Pack the hops of jobs into rounds of bounded size, and assign allocations and releases of storage to rounds. Pure.

Jobs are processed in order. Each hop is put into the earliest rounds in which its sender and its receiver have capacity
and the receiver may allocate the unit that it belongs to. A later job may therefore overtake an earlier one, but never
uses storage that an earlier one relies on, since the earlier one's rounds are already assigned.

Where no order is known to fit (`pack_through_host`), all units of the source wait in host memory. Unit by unit, the
next of each rank in turn, everything that it holds is sent: it is restored, the units of the target that it is the
first to fill are allocated, and it is released. What is forwarded follows.

Invariants: in no round does a rank send, or write, more than ``room`` elements; an element is forwarded at least
IN_FLIGHT rounds after it was received. If every rank stays within its limit while jobs are filled one after the other,
it stays within it in the rounds too, where a unit counts as held until IN_FLIGHT rounds after its last reader. Through
the host, a rank stays within its limit if that is at least its bytes of the target plus its largest unit of the source:
whenever a unit is placed, all earlier ones have been placed until their release, so that its rank finally holds units
of the target alone, and there is a round from which on the unit fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count

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
    packer = _Packer(room, storage, itemsize)
    for job in jobs:
        packer.add(job.hops, job.takes())
    return packer.result()


def pack_through_host(jobs: Iterable[Job], room: int, storage: Storage, itemsize: int) -> tuple[Round, ...]:
    """Pack jobs into rounds in which the units of the source (all of ``storage.size``) come from the host.

    Args:
        room, itemsize: as of `pack_rounds`.
        storage: the state without any of these units.
    """
    by_source: dict[UnitId, list[Hop]] = defaultdict(list)
    forwarded: list[Hop] = []
    unallocated: dict[UnitId, int] = {}
    for job in jobs:
        unallocated |= job.takes()
        for hop in job.hops:
            (forwarded if hop.relayed else by_source[hop.reads]).append(hop)
    packer = _Packer(room, replace(storage, readers=dict.fromkeys(by_source, 1)), itemsize)
    turns: dict[int, count[int]] = defaultdict(count)
    for _, unit in sorted((next(turns[unit[0]]), unit) for unit in sorted(by_source)):
        hops = by_source[unit]
        takes = {hop.writes: unallocated.pop(hop.writes) for hop in hops if hop.writes in unallocated}
        packer.add(hops, takes, restored=unit if unit in storage.size else None)
    packer.add(forwarded, unallocated)
    return packer.result()


class _Packer:
    def __init__(self, room: int, storage: Storage, itemsize: int):
        self.storage, self.itemsize = storage, itemsize
        self.rounds: list[list[Hop]] = []
        self.send: dict[int, _Lane] = defaultdict(lambda: _Lane(room))
        self.write: dict[int, _Lane] = defaultdict(lambda: _Lane(room))
        self.held = {rank: _Held(nbytes, storage.limit[rank]) for rank, nbytes in storage.resident.items()}
        self.readers = dict(storage.readers)
        self.last_read: dict[UnitId, int] = {}
        self.allocate: dict[int, list[UnitId]] = defaultdict(list)
        self.release: dict[int, list[UnitId]] = defaultdict(list)
        self.restore: dict[int, list[UnitId]] = defaultdict(list)
        self.allocated: dict[UnitId, int] = {}
        """Unit of the target → round before which it is allocated"""
        self.received: dict[tuple[int, int], list[tuple[int, int, int]]] = defaultdict(list)
        """(rank, fragment) → (start, stop, round) of each piece that the rank receives"""

    def result(self) -> tuple[Round, ...]:
        by_round = self.allocate, self.release, self.restore
        return tuple(
            Round(tuple(hops), *(tuple(sorted(of[k])) for of in by_round)) for k, hops in enumerate(self.rounds)
        )

    def add(self, hops: Iterable[Hop], takes: Mapping[UnitId, int], restored: UnitId | None = None) -> None:
        """Place hops, and the allocations and releases that they cause.

        Args:
            takes: units of the target that are allocated for them, with their elements.
            restored: the unit of the source that all of them read, if it comes back from the host for them.
        """
        nbytes: dict[int, int] = defaultdict(int)
        for (rank, _), numel in takes.items():
            nbytes[rank] += numel * self.itemsize
        if restored:
            nbytes[restored[0]] += self.storage.size[restored]
        earliest = {rank: self.held[rank].earliest(size) for rank, size in nbytes.items()}
        first: dict[UnitId, int] = {}
        reads: dict[UnitId, list[int]] = {}
        for hop in hops:
            at = earliest[hop.target_rank] if hop.writes in takes else self.allocated[hop.writes]
            if restored:
                at = max(at, earliest[restored[0]])
            if hop.relayed:
                received = self.received[hop.source_rank, id(hop.fragment)]
                at = max([at, *[k + IN_FLIGHT for a, b, k in received if a < hop.stop and hop.start < b]])
            placed = self._place(hop, at)
            self.received[hop.target_rank, id(hop.fragment)] += placed
            rounds = [k for *_, k in placed]
            if not hop.relayed:
                reads.setdefault(hop.reads, []).extend((min(rounds), max(rounds)))
            first[hop.writes] = min(rounds[0], first.get(hop.writes, rounds[0]))
        for unit, numel in takes.items():
            at = first.get(unit, earliest[unit[0]])  # no hop writes it: it is hosted, or all padding
            self._reach(at)
            self.held[unit[0]].add(numel * self.itemsize, at)
            self.allocate[at].append(unit)
            self.allocated[unit] = at
        if restored:
            at = min(reads[restored])
            self.held[restored[0]].add(self.storage.size[restored], at)
            self.restore[at].append(restored)
        for unit, rounds in reads.items():
            self._read(unit, max(rounds))

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
        (over,) = (self.bytes[: self.last] > room).nonzero()
        return int(over[-1]) + 1 if len(over) else 0

    def add(self, nbytes: int, at: int) -> None:
        """Add ``nbytes`` from round ``at`` on."""
        if at >= len(self.bytes):
            grown = np.full(2 * at, self.final, dtype=np.int64)
            grown[: len(self.bytes)] = self.bytes
            self.bytes = grown
        self.final, self.last = self.final + nbytes, max(self.last, at)
        self.bytes[at:] += nbytes

"""Pack the hops of families into rounds of bounded size; assign allocations and releases of storage to rounds. Pure.

Families are processed in order. Each hop is put into the earliest rounds in which its sender and its receiver have
capacity and the receiver may allocate the unit that it belongs to. A later family may therefore overtake an earlier
one, but never uses storage that an earlier one relies on, since the earlier one's rounds are already assigned.

Where no order is known to fit (`pack_through_host`), all units of the source wait in host memory. Unit by unit, the
next of each rank in turn, everything that it holds is sent: it is restored, the units of the target that it is the
first to fill are allocated, and it is released. What is forwarded follows.

Invariants: in no round does a rank send, or write, more than ``room`` elements; an element is forwarded at least
IN_FLIGHT rounds after it was received. If every rank stays within its limit while families are filled one after the
other, it stays within it in the rounds too, where a unit counts as held until IN_FLIGHT rounds after its last reader.
Through the host, a rank stays within its limit if that is at least its bytes of the target plus its largest unit of the
source: whenever a unit is placed, all earlier ones have been placed until their release, so that its rank finally holds
units of the target alone, and there is a round from which on the unit fits."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import count

import numpy as np

from fusion.ep_switch.hops import Hop, Hops, legal_stop
from fusion.ep_switch.moves import Round
from fusion.ep_switch.order import Storage

IN_FLIGHT = 2
"""Number of rounds in flight at a time."""

MIN_PIECE_FRACTION = 1 / 8
"""Smallest piece that a hop is cut into, as a fraction of a round's capacity; its remainder may be smaller."""


def pack_rounds(hops: Hops, order: Iterable[int], room: int, storage: Storage, itemsize: int) -> tuple[Round, ...]:
    """Pack the hops of families, in order, into rounds.
    ``room``: maximum number of elements that a rank sends, and writes, in a round.
    ``storage``: the state before the first family.
    ``itemsize``: bytes of an element of the target."""
    packer = _Packer(hops, room, storage, itemsize)
    for family in order:
        packer.add(hops.of(family), hops.takes(family))
    return packer.result()


def pack_through_host(hops: Hops, room: int, storage: Storage, itemsize: int) -> tuple[Round, ...]:
    """Pack all hops into rounds in which the units of the source (all that have a ``storage.size``) come from the host.
    ``room``, ``itemsize``: as of `pack_rounds`.
    ``storage``: the state without any of these units."""
    by_source: dict[int, list[tuple[int, Hop]]] = defaultdict(list)
    forwarded: list[tuple[int, Hop]] = []
    unallocated: dict[int, int] = {}
    for family in range(len(hops.families)):
        unallocated |= hops.takes(family)
        for number, hop in hops.of(family):
            (forwarded if hop.relayed else by_source[hop.reads]).append((number, hop))
    packer = _Packer(hops, room, replace(storage, readers=[1] * len(storage.readers)), itemsize)
    turns: dict[int, count[int]] = defaultdict(count)
    for _, unit in sorted((next(turns[storage.owner[unit]]), unit) for unit in sorted(by_source)):
        takes = {hop.writes: unallocated.pop(hop.writes) for _, hop in by_source[unit] if hop.writes in unallocated}
        packer.add(by_source[unit], takes, restored=unit if storage.size[unit] else None)
    packer.add(forwarded, unallocated)
    return packer.result()


class _Packer:
    def __init__(self, hops: Hops, room: int, storage: Storage, itemsize: int):
        self.hops, self.storage, self.itemsize = hops, storage, itemsize
        self.rounds: list[array[int]] = []
        """(Number of the hop, start, stop) of each piece, by round"""
        self.send = [_Lane(room) for _ in storage.limit]
        self.write = [_Lane(room) for _ in storage.limit]
        self.held = [_Held(*of_rank) for of_rank in zip(storage.resident, storage.limit, strict=True)]
        self.owner = hops.units[1].rank
        self.readers = list(storage.readers)
        self.last_read = [0] * len(self.readers)
        self.allocate: dict[int, list[int]] = defaultdict(list)
        self.release: dict[int, list[int]] = defaultdict(list)
        self.restore: dict[int, list[int]] = defaultdict(list)
        self.allocated = [0] * len(self.owner)
        """Unit of the target → round before which it is allocated"""
        self.received: dict[tuple[int, int, int], list[tuple[int, int, int]]] | None = None
        """(rank, family, fragment) → (start, stop, round) of pieces that the rank receives; None: none is relayed"""
        if hops.rows[:, Hop._fields.index("relayed")].any():
            self.received = defaultdict(list)

    def result(self) -> tuple[Round, ...]:
        source, target = (units.names for units in self.hops.units)
        by_round = (target, self.allocate), (source, self.release), (source, self.restore)
        rounds = []
        for at, pieces in enumerate(self.rounds):
            moves = self.hops.moves(np.array(pieces).reshape(-1, 3))
            exchange = bool((moves.ends[:, 0] != moves.ends[:, 1]).any())
            units = [tuple([names[unit] for unit in sorted(of[at])]) for names, of in by_round]
            rounds.append(Round(moves, exchange, *units))
        return tuple(rounds)

    def add(self, hops: Iterable[tuple[int, Hop]], takes: Mapping[int, int], restored: int | None = None) -> None:
        """Place hops, and the allocations and releases that they cause.
        ``takes``: units of the target that are allocated for them, with their elements.
        ``restored``: the unit of the source that all of them read, if it comes back from the host for them."""
        held, owner, nbytes = self.held, self.owner, defaultdict[int, int](int)
        for unit, numel in takes.items():
            nbytes[owner[unit]] += numel * self.itemsize
        if restored is not None:
            nbytes[self.storage.owner[restored]] += self.storage.size[restored]
        earliest = {rank: held[rank].earliest(size, self.write[rank].open) for rank, size in nbytes.items()}
        if restored is not None:
            rank = self.storage.owner[restored]
            earliest[rank] = held[rank].earliest(nbytes[rank])
        first: dict[int, int] = {}
        reads: dict[int, tuple[int, int]] = {}
        for number, hop in hops:
            writes, rank = hop.writes, hop.target_rank
            at = earliest[rank] if writes in takes else self.allocated[writes]
            if restored is not None:
                at = max(at, earliest[self.storage.owner[restored]])
            if hop.relayed:
                assert self.received is not None
                received = self.received[hop.source_rank, hop.family, hop.fragment]
                at = max([at, *[k + IN_FLIGHT for a, b, k in received if a < hop.stop and hop.start < b]])
            begin, end = self._place(number, hop, at)
            if not hop.relayed:
                least, most = reads.get(hop.reads, (begin, end))
                reads[hop.reads] = min(least, begin), max(most, end)
            first[writes] = min(begin, first.get(writes, begin))
        for unit in takes.keys() - first.keys():  # no hop writes it: it is hosted, or all padding
            first[unit] = held[owner[unit]].earliest(nbytes[owner[unit]])
        for unit, numel in takes.items():
            at = first[unit]
            self._reach(at)
            held[owner[unit]].add(numel * self.itemsize, at)
            self.allocate[at].append(unit)
            self.allocated[unit] = at
        if restored is not None:
            at, _ = reads[restored]
            held[self.storage.owner[restored]].add(self.storage.size[restored], at)
            self.restore[at].append(restored)
        for unit, (_, at) in reads.items():
            if self.storage.size[unit]:
                self._read(unit, at)

    def _place(self, number: int, hop: Hop, at: int) -> tuple[int, int]:
        """Put a hop into rounds from ``at`` on; return the first and the last one."""
        write = self.write[hop.target_rank]
        send = write if hop.source_rank == hop.target_rank else self.send[hop.source_rank]
        start, stop, first = hop.start, hop.stop, -1
        while start < stop:
            at, numel = _first_room(write, send, at, stop - start)
            end = start + numel
            if start or end < stop:
                end = legal_stop(self.hops.fragment(hop), start, end)
            write.take(at, end - start)
            if send is not write:
                send.take(at, end - start)
            self._reach(at)
            self.rounds[at].extend((number, start, end))
            if self.received is not None:
                self.received[hop.target_rank, hop.family, hop.fragment].append((start, end, at))
            first = at if first < 0 else first
            start = end
        return first, at

    def _reach(self, at: int) -> None:
        while len(self.rounds) <= at:
            self.rounds.append(array("q"))

    def _read(self, unit: int, at: int) -> None:
        self.last_read[unit] = at = max(at, self.last_read[unit])
        self.readers[unit] -= 1
        if self.readers[unit] == 0:
            self.held[self.storage.owner[unit]].add(-self.storage.size[unit], at + IN_FLIGHT)
            self.release[at].append(unit)


class _Lane:
    """Track what one rank may still send, or write, in each round. ``open``: the first round with at least
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


def _first_room(one: _Lane, other: _Lane, at: int, max_numel: int) -> tuple[int, int]:
    """Return the first round from ``at`` on in which both lanes have room for ``max_numel`` elements, or for the
    smallest piece, and their room, up to ``max_numel``."""
    at, min_numel, max_numel = max(at, one.open, other.open), min(max_numel, one.min_numel), min(max_numel, one.room)
    while True:
        numel = max_numel
        for left in one.left, other.left:
            if at < len(left) and left[at] < numel:
                numel = left[at]
        if numel >= min_numel:
            return at, numel
        at += 1


class _Held:
    """Track the bytes that one rank holds in each round."""

    __slots__ = ("change", "final", "last", "limit")

    def __init__(self, nbytes: int, limit: int):
        self.limit, self.final, self.last = limit, nbytes, 0
        self.change: list[int] = []

    def earliest(self, nbytes: int, least: int = 0) -> int:
        """Return the first round, from ``least`` on, from which ``nbytes`` more fit until the end; the last round if
        they never do."""
        over, at, change = self.final + nbytes - self.limit, self.last, self.change
        if over <= 0:
            while at > least and over <= change[at]:
                over -= change[at]  # and so remains at most 0
                at -= 1
        return at

    def add(self, nbytes: int, at: int) -> None:
        if at >= len(self.change):
            self.change += [0] * (at + 1 - len(self.change))
        self.change[at] += nbytes
        self.final, self.last = self.final + nbytes, max(self.last, at)

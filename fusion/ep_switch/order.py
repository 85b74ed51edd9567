"""In which order the slabs of the target are filled, so that storage is free before it is needed. Pure.

Filling a slab takes a unit on every rank that needs it. A unit of the source goes when the last slab that reads it is
filled; until then it is *open*, and what has been read of it is *owed*. If every slab were filled a little at a time,
all at once, each rank's bytes would follow a straight line from A to B, which is never above max(A, B). The order keeps
near that line:

    1. slabs of a kind (same ranks, same size) are spread evenly over the whole;
    2. of the next few, those first that read open units, the first is taken that leaves no rank noticeably tighter;
    3. if there is none, the one that helps the tightest ranks most (a rank counts e times as much for every half
       bucket that it is nearer to its limit), with what is owed counted as gone;
    4. a slab that opens units may not use a rank's last bucket, which is kept to close what is open;
    5. if nothing fits, all slabs that close some unit come together.

Nothing is promised by construction: the order says by how much it exceeds the limit, and `plan` asks again with
smaller wire buffers, which leave more room for weights.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import exp
from typing import NamedTuple

from fusion.ep_switch.moves import UnitId
from fusion.ep_switch.senders import Job


@dataclass
class Storage:
    """What every rank holds and may hold while slabs are filled one after the other, in bytes.

    Args:
        resident: held before the first. limit: not to be exceeded.
        size: of each source unit that goes when it has been read. readers: slabs that read it.
    """

    resident: dict[int, int]
    limit: dict[int, int]
    size: dict[UnitId, int]
    readers: dict[UnitId, int]


class Demand(NamedTuple):
    """Filling slabs takes bytes on ranks, and reads elements of units that will go."""

    takes: tuple[tuple[int, int], ...]
    reads: tuple[tuple[UnitId, int], ...]


WINDOW = 32
"""Slabs not yet begun that are looked at before one is chosen."""

NOTICEABLE = 0.02
"""Tightness, in half buckets at the limit, up to which a slab is taken without looking further."""


def fill_order(jobs: Iterable[Job], storage: Storage, itemsize: int, bucket_bytes: int) -> tuple[list[int], int]:
    """The indices of the jobs in order, and by how many bytes the worst rank exceeds its limit (0: none does).

    Args:
        itemsize: of the target.
    """
    demands = []
    for job in jobs:
        takes: dict[int, int] = defaultdict(int)
        for (rank, _), numel in job.takes().items():
            takes[rank] += numel * itemsize
        reads = tuple([(unit, numel) for unit, numel in job.reads().items() if unit in storage.size])
        demands.append(Demand(tuple(takes.items()), reads))
    search = _Search(demands, storage, bucket_bytes)
    while search.left:
        search.step()
    return search.order, search.worst


def evenly(demands: list[Demand]) -> list[int]:
    """The indices, those of a kind spread evenly over the whole."""
    kinds: dict[object, list[int]] = defaultdict(list)
    for index, (takes, reads) in enumerate(demands):
        kinds[takes, tuple([unit[0] for unit, _ in reads])].append(index)
    times = [((place + 0.5) / len(members), index) for members in kinds.values() for place, index in enumerate(members)]
    return [index for _, index in sorted(times)]


class _Search:
    def __init__(self, demands: list[Demand], storage: Storage, bucket_bytes: int):
        self.demands, self.bucket_bytes, self.scale = demands, bucket_bytes, bucket_bytes / 2
        self.resident, self.limit, self.size = dict(storage.resident), storage.limit, storage.size
        self.left = dict.fromkeys(evenly(demands))
        self.upcoming = iter(list(self.left))
        self.window: dict[int, None] = {}
        self.frontier: dict[int, None] = {}
        """Slabs that read an open unit."""
        self.readers: dict[UnitId, dict[int, None]] = defaultdict(dict)
        total: dict[UnitId, int] = defaultdict(int)
        for index in self.left:
            for unit, numel in demands[index].reads:
                self.readers[unit][index] = None
                total[unit] += numel
        self.shares = [[(unit, self.size[unit] * n / total[unit]) for unit, n in demand.reads] for demand in demands]
        self.owed: dict[UnitId, float] = {}
        """Of open units only."""
        self.owed_by = dict.fromkeys(self.resident, 0.0)
        self.weights = {rank: self._weights(rank) for rank in self.resident}
        self.order: list[int] = []
        self.worst = 0

    def step(self) -> None:
        """Puts one slab next, or several that together close a unit."""
        while len(self.window) < WINDOW and (index := next(self.upcoming, None)) is not None:
            if index in self.left:
                self.window[index] = None
        found: list[tuple[int, float, tuple[int, ...]]] = []
        for index in [*self.frontier, *(index for index in self.window if index not in self.frontier)]:
            over, tighter = self._look(index)
            if over <= 0 and tighter <= NOTICEABLE:
                return self._take((index,))
            found.append((max(0, over), tighter, (index,)))
        if min(found)[0] > 0:
            found = [(max(0, over), tighter, (index,)) for index in self.left for over, tighter in [self._look(index)]]
        if min(found)[0] > 0 and self.owed:
            closing = {tuple(self.readers[unit]) for unit in self.owed}
            found = [(self._over(readers), 0.0, readers) for readers in closing]
        self._take(min(found)[2])

    def _look(self, index: int) -> tuple[int, float]:
        """(bytes beyond what it may take on the worst rank, how much tighter the ranks get) if this slab came next."""
        over, real, fluid = -(1 << 62), 0.0, 0.0
        for rank, nbytes in self.demands[index].takes:
            over = max(over, self.resident[rank] + nbytes - self.limit[rank])
            weight = self.weights[rank]
            real += weight[0] * nbytes
            fluid += weight[1] * nbytes
        opens = False
        for unit, share in self.shares[index]:
            weight = self.weights[unit[0]]
            fluid -= weight[1] * share
            if len(self.readers[unit]) == 1:
                real -= weight[0] * self.size[unit]
            elif unit not in self.owed:
                opens = True
        return over + opens * self.bucket_bytes, (real + fluid) / self.scale

    def _over(self, indices: tuple[int, ...]) -> int:
        """Bytes beyond the limit on the worst rank on the way, if these slabs came next."""
        over, grown = 0, dict(self.resident)
        read: dict[UnitId, int] = defaultdict(int)
        for index in indices:
            takes, reads = self.demands[index]
            for rank, nbytes in takes:
                grown[rank] += nbytes
                over = max(over, grown[rank] - self.limit[rank])
            for unit, _ in reads:
                read[unit] += 1
                if read[unit] == len(self.readers[unit]):
                    grown[unit[0]] -= self.size[unit]
        return over

    def _take(self, indices: tuple[int, ...]) -> None:
        self.worst = max(self.worst, self._over(indices))
        for index in indices:
            self.order.append(index)
            for group in (self.left, self.window, self.frontier):
                group.pop(index, None)
            for rank, nbytes in self.demands[index].takes:
                self.resident[rank] += nbytes
            for unit, share in self.shares[index]:
                self._read(unit, index, share)
            for rank in {*dict(self.demands[index].takes), *(unit[0] for unit, _ in self.shares[index])}:
                self.weights[rank] = self._weights(rank)

    def _read(self, unit: UnitId, index: int, share: float) -> None:
        del self.readers[unit][index]
        if self.readers[unit]:
            self.owed[unit] = self.owed.get(unit, 0.0) + share
            self.owed_by[unit[0]] += share
            self.frontier.update(self.readers[unit])
        else:
            self.owed_by[unit[0]] -= self.owed.pop(unit, 0.0)
            self.resident[unit[0]] -= self.size[unit]

    def _weights(self, rank: int) -> tuple[float, float]:
        """How much a byte counts on a rank: as it is, and with what is owed counted as gone."""
        room = (self.limit[rank] - self.resident[rank]) / self.scale
        return exp(-room), exp(-room - self.owed_by[rank] / self.scale)

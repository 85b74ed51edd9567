"""Order the slabs of the target so that storage is free before it is needed. Pure.

Filling a slab allocates a unit on every rank that needs it. A unit of the source is released when the last slab that
reads it is filled; from its first read until then it is *open*, and the bytes already read from it are *owed*. If all
slabs were filled gradually and simultaneously, each rank's bytes would follow a straight line from A to B, which never
exceeds max(A, B). The order stays near that line:

    1. slabs of a kind (same ranks, same size) are spread evenly over the order;
    2. of the next slabs, readers of open units first, the first one that tightens no rank noticeably is taken;
    3. if there is none, the one that relieves the tightest ranks most (a rank's weight grows by a factor e for every
       half bucket that it is nearer to its limit), with owed bytes counted as released;
    4. a slab that opens units may not use a rank's last bucket, which is reserved for closing open units;
    5. if nothing fits, all slabs that close some unit are taken together.

Where units are large, as stacks of experts are, interleaving holds too many of them open. The alternative is an order
by *clusters*: slabs that read a unit in common follow one another, and the next cluster is the one that exceeds no
limit and leaves the tightest ranks most room or, as further attempts, the largest one that exceeds none, with sizes
weighted differently each time.

The limit is not guaranteed by construction: the result includes the excess over the limit, and `plan` retries with
smaller wire buffers, which leave more room for weights, then with clusters. Then it parks the source on the host.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import exp, inf
from typing import Literal, NamedTuple

import numpy as np

from fusion.ep_switch.connected import connected
from fusion.ep_switch.moves import UnitId
from fusion.ep_switch.senders import Job


@dataclass
class Storage:
    """Holds the bytes that every rank holds and may hold while slabs are filled one after the other.

    Args:
        resident: bytes held before the first slab, by rank.
        limit: maximum bytes, by rank.
        size: bytes of each source unit that is released after its last read.
        readers: number of slabs that read the unit.
    """

    resident: dict[int, int]
    limit: dict[int, int]
    size: dict[UnitId, int]
    readers: dict[UnitId, int]


Method = Literal["slabs", "clusters"] | int
"""Slab by slab; cluster by cluster, the one that relieves most first; or the largest first, by the number of the
weighting of their sizes."""


class Demand(NamedTuple):
    """Holds what filling slabs needs: (rank, bytes allocated), and (unit, elements read) of units to be released."""

    takes: tuple[tuple[int, int], ...]
    reads: tuple[tuple[UnitId, int], ...]


WINDOW = 32
"""Number of upcoming slabs that are considered for the next place."""

MAX_EXPONENT = 500.0
"""Half buckets beyond the limit from which all excess counts alike, so that no weight overflows"""

MANY = 32
"""Number of allocations of a slab from which on they are evaluated as arrays"""

LEAST = -(1 << 62)
"""Less than any excess over a limit"""

COMPACT = 0.7
"""Share of a table's slabs that are left below which it drops the others"""

NOTICEABLE = 0.02
"""Increase in tightness, in half buckets at the limit, up to which a slab is taken without considering others."""


def fill_order(
    jobs: Iterable[Job], storage: Storage, *, itemsize: int, bucket_bytes: int, method: Method = "slabs"
) -> tuple[list[int], int]:
    """Return the indices of the jobs in order, and the maximum bytes by which a rank exceeds its limit (0: none does).

    Args:
        itemsize: bytes of an element of the target.
        method: slab by slab, or cluster by cluster.
    """
    demands = []
    for job in jobs:
        takes: dict[int, int] = defaultdict(int)
        for (rank, _), numel in job.takes().items():
            takes[rank] += numel * itemsize
        reads = tuple([(unit, numel) for unit, numel in job.reads().items() if unit in storage.size])
        demands.append(Demand(tuple(takes.items()), reads))
    search = _Search(demands, storage, bucket_bytes)
    if method != "slabs":
        search.take_clusters(clusters_of(demands), None if method == "clusters" else method)
    while search.left:
        search.step()
    return search.order, search.worst


def evenly(demands: list[Demand]) -> list[int]:
    """Return the indices with those of each kind spread evenly over the order."""
    kinds: dict[object, list[int]] = defaultdict(list)
    for index, (takes, reads) in enumerate(demands):
        kinds[takes, tuple([unit[0] for unit, _ in reads])].append(index)
    times = [((place + 0.5) / len(members), index) for members in kinds.values() for place, index in enumerate(members)]
    return [index for _, index in sorted(times)]


def clusters_of(demands: list[Demand]) -> list[tuple[int, ...]]:
    """Return the indices of slabs that are connected by units that they read in common, in order."""
    readers: dict[UnitId, list[int]] = defaultdict(list)
    for index, demand in enumerate(demands):
        for unit, _ in demand.reads:
            readers[unit].append(index)
    return connected(len(demands), readers.values())


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
        """Bytes read, by open unit."""
        self.owed_by = dict.fromkeys(self.resident, 0.0)
        self.order: list[int] = []
        self.place = {rank: place for place, rank in enumerate(self.resident)}
        self.weights: dict[int, tuple[float, float]] = {}
        self.weight_arrays, self.over = np.zeros((2, len(self.place))), np.zeros(len(self.place), np.int64)
        """`weights`, and bytes beyond the limit, by place of the rank"""
        self.changed = dict.fromkeys(self.resident, 0)
        """Number of slabs in the order when a rank's state changed last"""
        for rank in self.resident:
            self._note(rank)
        self.evaluated: dict[int, tuple[int, tuple[int, ...], tuple[int, float]]] = {}
        """Slab → (number of slabs in the order at its last evaluation, ranks that it depends on, result)"""
        self.table = _Table(demands, self.shares, size=self.size, readers=self.readers, place=self.place)
        self.worst = 0

    def take_clusters(self, clusters: list[tuple[int, ...]], weighting: int | None) -> None:
        """Append all slabs, cluster by cluster: the largest first, if there is a ``weighting``."""
        kinds: dict[object, list[tuple[int, ...]]] = defaultdict(list)
        for cluster in reversed(clusters):
            kinds[tuple(sorted(self._change(cluster).items()))].append(cluster)
        while kinds:
            options = []
            for kind, queue in kinds.items():
                cost = self._tightening(queue[-1]) if weighting is None else -self._weighted(queue[-1], weighting)
                options.append((max(0, self._excess(queue[-1])), cost, queue[-1], kind))
            _, _, cluster, kind = min(options, key=lambda option: option[:3])
            kinds[kind].pop()
            if not kinds[kind]:
                del kinds[kind]
            for index in cluster:
                self._take((index,))

    def _change(self, cluster: tuple[int, ...]) -> dict[int, int]:
        """Return by rank the bytes allocated less the bytes released by a whole cluster."""
        change: dict[int, int] = defaultdict(int)
        units = {unit for index in cluster for unit, _ in self.demands[index].reads}
        for index in cluster:
            for rank, nbytes in self.demands[index].takes:
                change[rank] += nbytes
        for unit in units:
            change[unit[0]] -= self.size[unit]
        return change

    def _weighted(self, cluster: tuple[int, ...], weighting: int) -> float:
        """Return the bytes that a cluster allocates, times a factor from 0 to 1 by its number; weighting 0: times 1."""
        nbytes = sum(nbytes for index in cluster for _, nbytes in self.demands[index].takes)
        mixed = (cluster[0] + 1) * 2654435761 * (2 * weighting + 1) % (1 << 32)
        return nbytes * (mixed / (1 << 32) if weighting else 1.0)

    def _tightening(self, cluster: tuple[int, ...]) -> float:
        before = {rank: (self.limit[rank] - self.resident[rank]) / self.scale for rank in self.resident}
        return sum(
            exp(min(nbytes / self.scale - before[rank], MAX_EXPONENT)) - exp(min(-before[rank], MAX_EXPONENT))
            for rank, nbytes in self._change(cluster).items()
        )

    def step(self) -> None:
        """Append one slab to the order, or several that together close a unit."""
        while len(self.window) < WINDOW and (index := next(self.upcoming, None)) is not None:
            if index in self.left:
                self.window[index] = None
        options: list[tuple[int, float, tuple[int, ...]]] = []
        for index in [*self.frontier, *(index for index in self.window if index not in self.frontier)]:
            over, tighter = self._evaluate(index)
            if over <= 0 and tighter <= NOTICEABLE:
                return self._take((index,))
            options.append((max(0, over), tighter, (index,)))
        if min(options)[0] > 0:
            options = [self.table.best(self.over, self.weight_arrays, self.bucket_bytes)]
        if min(options)[0] > 0 and self.owed:
            closing = {tuple(self.readers[unit]) for unit in self.owed}
            options = [(self._excess(readers), 0.0, readers) for readers in closing]
        self._take(min(options)[2])

    def _evaluate(self, index: int) -> tuple[int, float]:
        """Return (excess bytes on the worst rank, increase in tightness of the ranks) if this slab were next."""
        if index in self.evaluated:
            at, ranks, result = self.evaluated[index]
            for rank in ranks:
                if self.changed[rank] > at:
                    break
            else:
                return result
        else:
            ranks = tuple({*dict(self.demands[index].takes), *(unit[0] for unit, _ in self.shares[index])})
        result = self._compute(index)
        self.evaluated[index] = len(self.order), ranks, result
        return result

    def _compute(self, index: int) -> tuple[int, float]:
        """Compute `_evaluate`; the increase is infinite where the slab does not fit, as it then decides nothing."""
        takes, shares, opens = self.demands[index].takes, self.shares[index], False
        for unit, _ in shares:
            opens = opens or (unit not in self.owed and len(self.readers[unit]) > 1)
        wide = self.table.wide.get(index)
        if wide is not None:
            over = int((self.over[wide[0]] + wide[1]).max())
        else:
            over = max([self.resident[rank] + nbytes - self.limit[rank] for rank, nbytes in takes])
        if (over := over + opens * self.bucket_bytes) > 0:
            return over, inf
        real, fluid = 0.0, 0.0
        if wide is not None:  # in sequence, as below: numpy's own sums are of pairs
            real, fluid = np.add.accumulate(self.weight_arrays[:, wide[0]] * wide[1], axis=1)[:, -1].tolist()
        else:
            for rank, nbytes in takes:
                weight = self.weights[rank]
                real += weight[0] * nbytes
                fluid += weight[1] * nbytes
        for unit, share in shares:
            weight = self.weights[unit[0]]
            fluid -= weight[1] * share
            if len(self.readers[unit]) == 1:
                real -= weight[0] * self.size[unit]
        return over, (real + fluid) / self.scale

    def _excess(self, indices: tuple[int, ...]) -> int:
        """Return the maximum bytes by which a rank would exceed its limit at any time if these slabs were next."""
        over = 0
        grown: dict[int, int] = {}  # only the ranks that these slabs change: there are many others
        read: dict[UnitId, int] = defaultdict(int)
        for index in indices:
            takes, reads = self.demands[index]
            for rank, nbytes in takes:
                grown[rank] = grown.get(rank, self.resident[rank]) + nbytes
                over = max(over, grown[rank] - self.limit[rank])
            for unit, _ in reads:
                read[unit] += 1
                if read[unit] == len(self.readers[unit]):
                    grown[unit[0]] = grown.get(unit[0], self.resident[unit[0]]) - self.size[unit]
        return over

    def _take(self, indices: tuple[int, ...]) -> None:
        self.worst = max(self.worst, self._excess(indices))
        for index in indices:
            self.order.append(index)
            self.table.left[index] = False
            for group in (self.left, self.window, self.frontier):
                group.pop(index, None)
            for rank, nbytes in self.demands[index].takes:
                self.resident[rank] += nbytes
            for unit, share in self.shares[index]:
                self._read(unit, index, share)
            for rank in {*dict(self.demands[index].takes), *(unit[0] for unit, _ in self.shares[index])}:
                self._note(rank)

    def _read(self, unit: UnitId, index: int, share: float) -> None:
        del self.readers[unit][index]
        self.table.note(unit, closing=len(self.readers[unit]) == 1)
        if self.readers[unit]:
            self.owed[unit] = self.owed.get(unit, 0.0) + share
            self.owed_by[unit[0]] += share
            self.frontier.update(self.readers[unit])
        else:
            self.owed_by[unit[0]] -= self.owed.pop(unit, 0.0)
            self.resident[unit[0]] -= self.size[unit]

    def _note(self, rank: int) -> None:
        """Update what depends on a rank's bytes: the weights of a byte are as it is, and with owed bytes counted as
        released."""
        over, place = self.resident[rank] - self.limit[rank], self.place[rank]
        room = -over / self.scale
        self.weights[rank] = weights = exp(-room), exp(-room - self.owed_by[rank] / self.scale)
        self.weight_arrays[0, place], self.weight_arrays[1, place] = weights
        self.over[place], self.changed[rank] = over, len(self.order)


class _Table:
    """Holds what slabs allocate and read as arrays, to evaluate all that are left at once, with the same results to the
    bit as `_Search._evaluate`.

    Args:
        shares: the units that every slab reads, with their bytes that it reads.
        place: rank → its place in arrays by rank.
    """

    def __init__(
        self,
        demands: list[Demand],
        shares: list[list[tuple[UnitId, float]]],
        *,
        size: Mapping[UnitId, int],
        readers: Mapping[UnitId, Collection[int]],
        place: Mapping[int, int],
    ):
        self.left = np.ones(len(demands), bool)
        """Whether a slab is not in the order"""
        self._number = {unit: number for number, unit in enumerate(readers)}
        self._closing = np.array([len(slabs) == 1 for slabs in readers.values()] + [True])
        self._opening = np.array([len(slabs) > 1 for slabs in readers.values()] + [False])
        """Whether the next reader of a unit closes it, or opens it; the last is for allocations, which have unit -1"""
        self.wide = {
            index: (np.array([place[rank] for rank, _ in takes]), np.array([nbytes for _, nbytes in takes]))
            for index, (takes, _) in enumerate(demands)
            if len(takes) > MANY
        }
        """(places of the ranks, bytes) of the allocations of slabs that have MANY"""
        columns = [array(kind) for kind in "qqqqd"]
        for index, ((takes, _), reads) in enumerate(zip(demands, shares, strict=True)):
            rows: list[tuple[float, ...]] = [(index, place[rank], -1, nbytes, nbytes) for rank, nbytes in takes]
            rows += [(index, place[unit[0]], self._number[unit], -size[unit], -share) for unit, share in reads]
            for column, values in zip(columns, zip(*rows, strict=True), strict=True):
                column.extend(values)
        self._keep([np.array(column) for column in columns])

    def _keep(self, columns: list[np.ndarray]) -> None:
        """Set the rows of the table: slab, place, unit, bytes allocated or released, bytes allocated or read."""
        slab, _, unit, _, _ = self._columns = columns
        self._slabs, self._number_of = np.unique(slab, return_inverse=True)
        """The slabs in the table, and for each row the number of its slab"""
        self._takes, self._reads = (unit < 0).nonzero()[0], (unit >= 0).nonzero()[0]
        self._starts = np.diff(self._number_of[self._takes], prepend=-1).nonzero()[0]

    def note(self, unit: UnitId, closing: bool) -> None:
        """Note that a unit was read, and whether its next reader closes it."""
        number = self._number[unit]
        self._closing[number], self._opening[number] = closing, False

    def best(self, over: np.ndarray, weights: np.ndarray, bucket_bytes: int) -> tuple[int, float, tuple[int, ...]]:
        """Return (excess bytes on the worst rank, increase in tightness of the ranks, slab) of the best next slab.

        Args:
            over: bytes of each rank beyond its limit.
            weights: of a byte on each rank: as it is, and with owed bytes counted as released.
        """
        if self.left[self._slabs].mean() < COMPACT:
            left = self.left[self._columns[0]]
            self._keep([column[left] for column in self._columns])
        number, (_, place, unit, real, fluid) = self._number_of, self._columns
        opens = np.bincount(number[self._reads], self._opening[unit[self._reads]], len(self._slabs)) > 0
        allocated = over[place[self._takes]] + real[self._takes]
        excess = np.maximum(np.maximum.reduceat(allocated, self._starts) + opens * bucket_bytes, 0)
        excess[~self.left[self._slabs]] = -LEAST
        tighter: np.ndarray = np.bincount(number, weights[0, place] * real * self._closing[unit])
        tighter = (tighter + np.bincount(number, weights[1, place] * fluid)) / (bucket_bytes / 2)
        least = int(excess.min())
        first = int(np.where(excess == least, tighter, np.inf).argmin())
        return least, float(tighter[first]), (int(self._slabs[first]),)

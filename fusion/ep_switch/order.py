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
smaller wire buffers, which leave more room for weights, then with clusters. Then it parks the source on the host."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import exp, inf
from typing import Literal

import numpy as np

from fusion.ep_switch.connected import connected
from fusion.ep_switch.demands import Demand, DemandTable


@dataclass
class Storage:
    """Hold the bytes that every rank holds and may hold while slabs are filled one after the other.
    ``resident``: bytes held before the first slab, by rank.
    ``limit``: maximum bytes, by rank.
    ``size``: bytes of each source unit, by its number; 0: it is not released after its last read.
    ``readers``: number of slabs that read the unit, by its number.
    ``owner``: rank of the unit, by its number."""

    resident: list[int]
    limit: list[int]
    size: list[int]
    readers: list[int]
    owner: list[int]


Method = Literal["slabs", "clusters"] | int
"""Slab by slab; cluster by cluster, the one that relieves most first; or the largest first, by the number of the
weighting of their sizes."""


WINDOW = 32
"""Number of upcoming slabs that are considered for the next place."""

MAX_EXPONENT = 500.0
"""Half buckets beyond the limit from which all excess counts alike, so that no weight overflows"""

MANY = 32
"""Number of allocations of a slab from which on they are evaluated as arrays"""

NOTICEABLE = 0.02
"""Increase in tightness, in half buckets at the limit, up to which a slab is taken without considering others."""


def fill_order(
    demands: list[Demand], storage: Storage, *, bucket_bytes: int, method: Method = "slabs"
) -> tuple[list[int], int]:
    """Return the indices of the demands in order, and the maximum bytes by which a rank exceeds its limit (0: none
    does).
    ``method``: slab by slab, or cluster by cluster."""
    search = _Search(demands, storage, bucket_bytes)
    if method != "slabs":
        search.take_clusters(clusters_of(demands), None if method == "clusters" else method)
    while search.left:
        search.step()
    return search.order, search.worst


def evenly(demands: list[Demand], owner: Sequence[int]) -> list[int]:
    """Return the indices with those of each kind spread evenly over the order."""
    kinds: dict[object, list[int]] = defaultdict(list)
    for index, (takes, reads) in enumerate(demands):
        kinds[id(takes), tuple([owner[unit] for unit, _ in reads])].append(index)
    times = [((place + 0.5) / len(members), index) for members in kinds.values() for place, index in enumerate(members)]
    return [index for _, index in sorted(times)]


def clusters_of(demands: list[Demand]) -> list[tuple[int, ...]]:
    """Return the indices of slabs that are connected by units that they read in common, in order."""
    readers: dict[int, list[int]] = defaultdict(list)
    for index, demand in enumerate(demands):
        for unit, _ in demand.reads:
            readers[unit].append(index)
    return connected(len(demands), readers.values())


class _Search:
    def __init__(self, demands: list[Demand], storage: Storage, bucket_bytes: int):
        self.demands, self.bucket_bytes, self.scale = demands, bucket_bytes, bucket_bytes / 2
        self.size, self.unread = storage.size, list(storage.readers)
        self.beyond = [held - most for held, most in zip(storage.resident, storage.limit, strict=True)]
        """Bytes beyond the limit, by rank"""
        self.left = dict.fromkeys(evenly(demands, storage.owner))
        self.upcoming = iter(list(self.left))
        self.window: dict[int, None] = {}
        self.frontier: dict[int, None] = {}
        """Slabs that read an open unit."""
        self.readers: dict[int, dict[int, None]] = defaultdict(dict)
        """Slabs that have yet to read a unit, of those that several read"""
        total: dict[int, int] = defaultdict(int)
        for index in self.left:
            for unit, numel in demands[index].reads:
                if self.unread[unit] > 1:
                    self.readers[unit][index] = None
                    total[unit] += numel
        owner, size = storage.owner, storage.size
        self.shares = [
            [(unit, owner[unit], size[unit] * n / total.get(unit, n)) for unit, n in demand.reads] for demand in demands
        ]
        """(unit, its rank, its bytes that are read) by slab"""
        self.owed: dict[int, float] = {}
        """Bytes read, by open unit."""
        self.owed_by = [0.0] * len(self.beyond)
        self.order: list[int] = []
        self.weights = [(0.0, 0.0)] * len(self.beyond)
        self.weight_arrays, self.over = np.zeros((2, len(self.beyond))), np.zeros(len(self.beyond), np.int64)
        """`weights` and `beyond`"""
        self.evaluated: list[tuple[int, float, tuple[int, ...]] | None] = [None] * len(demands)
        """Slab → its last evaluation, while the ranks that it depends on do not change. Where it does not fit, that is
        one rank on which it does not, and the excess is some number above 0."""
        self.dependent: list[set[int]] = [set() for _ in self.beyond]
        """Slabs whose evaluation depends on a rank"""
        self.of_many: dict[int, tuple[int, tuple[int, int, float, float]]] = {}
        """Length of the order then, and `_of_many`, by identity of the allocations"""
        self.changed = np.zeros(len(self.beyond), np.int64)
        """Length of the order at the last change of a rank"""
        self.table = DemandTable(demands, self.shares, self.size, self.unread)
        for rank in range(len(self.beyond)):
            self._note(rank)
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
        units = {(rank, unit) for index in cluster for unit, rank, _ in self.shares[index]}
        for index in cluster:
            for rank, nbytes in self.demands[index].takes:
                change[rank] += nbytes
        for rank, unit in units:
            change[rank] -= self.size[unit]
        return change

    def _weighted(self, cluster: tuple[int, ...], weighting: int) -> float:
        """Return the bytes that a cluster allocates, times a factor from 0 to 1 by its number; weighting 0: times 1."""
        nbytes = sum(nbytes for index in cluster for _, nbytes in self.demands[index].takes)
        mixed = (cluster[0] + 1) * 2654435761 * (2 * weighting + 1) % (1 << 32)
        return nbytes * (mixed / (1 << 32) if weighting else 1.0)

    def _tightening(self, cluster: tuple[int, ...]) -> float:
        before = [-over / self.scale for over in self.beyond]
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
        for index in chain(self.frontier, self.window):
            option = self.evaluated[index]
            if option is None:
                over, tighter, depends_on = self._evaluate(index)
                if over <= 0 and tighter <= NOTICEABLE:
                    return self._take((index,))
                option = max(0, over), tighter, (index,)
                self._keep(index, option, depends_on)
            if option[0] == 0:
                options.append(option)
        best = min(options) if options else self.table.best(self.over, self.weight_arrays, self.bucket_bytes)
        if best[0] > 0 and self.owed:
            closing = {tuple(self.readers[unit]) for unit in self.owed}
            best = min((self._excess(readers), 0.0, readers) for readers in closing)
        self._take(best[2])

    def _keep(self, index: int, option: tuple[int, float, tuple[int, ...]], depends_on: list[int]) -> None:
        """Keep an evaluation until a rank changes that it depends on, unless these are many."""
        if depends_on:
            self.evaluated[index] = option
        for rank in depends_on:
            self.dependent[rank].add(index)

    def _evaluate(self, index: int) -> tuple[int, float, list[int]]:
        """Return (excess bytes on the worst rank, increase in tightness of the ranks, ranks on which this depends) if
        this slab were next. The increase is infinite where the slab does not fit, as it then decides nothing. No ranks:
        on too many to keep it."""
        takes, shares, weights = self.demands[index].takes, self.shares[index], self.weights
        wide, real, fluid = len(takes) > MANY, 0.0, 0.0
        if wide:
            over, rank, real, fluid = self._of_many(takes)
        else:
            over, rank = max([(self.beyond[rank] + nbytes, rank) for rank, nbytes in takes])
        if over > 0:
            return over, inf, [rank]
        opens = any([self.unread[unit] > 1 and unit not in self.owed for unit, *_ in shares])
        depends_on = [] if wide else [rank for rank, _ in takes] + [rank for _, rank, _ in shares]
        if (over := over + opens * self.bucket_bytes) > 0:
            return over, inf, depends_on
        for rank, nbytes in () if wide else takes:
            weight = weights[rank]
            real += weight[0] * nbytes
            fluid += weight[1] * nbytes
        for unit, rank, share in shares:
            weight = weights[rank]
            fluid -= weight[1] * share
            if self.unread[unit] == 1:
                real -= weight[0] * self.size[unit]
        return over, (real + fluid) / self.scale, depends_on

    def _of_many(self, takes: tuple[tuple[int, int], ...]) -> tuple[int, int, float, float]:
        """Return (excess bytes on the worst rank, that rank) and what `_evaluate` sums over many allocations, which
        slabs have in common."""
        ranks, nbytes = self.table.takes[id(takes)]
        at, fit = self.of_many.get(id(takes), (-1, (0, 0, 0.0, 0.0)))
        if np.maximum.reduce(self.changed[ranks]) > at:
            beyond, real, fluid = self.over[ranks] + nbytes, inf, inf
            worst = int(beyond.argmax())
            if beyond[worst] <= 0:  # in sequence, as `_evaluate`: numpy's own sums are of pairs
                real, fluid = np.add.accumulate(self.weight_arrays[:, ranks] * nbytes, axis=1)[:, -1].tolist()
            fit = int(beyond[worst]), int(ranks[worst]), real, fluid
            self.of_many[id(takes)] = len(self.order), fit
        return fit

    def _excess(self, indices: tuple[int, ...]) -> int:
        """Return the maximum bytes by which a rank would exceed its limit at any time if these slabs were next."""
        over = 0
        grown: dict[int, int] = {}  # only the ranks that these slabs change: there are many others
        read: dict[int, int] = defaultdict(int)
        for index in indices:
            for rank, nbytes in self.demands[index].takes:
                grown[rank] = grown.get(rank, self.beyond[rank]) + nbytes
                over = max(over, grown[rank])
            for unit, rank, _ in self.shares[index]:
                read[unit] += 1
                if read[unit] == self.unread[unit]:
                    grown[rank] = grown.get(rank, self.beyond[rank]) - self.size[unit]
        return over

    def _take(self, indices: tuple[int, ...]) -> None:
        for index in indices:
            self.order.append(index)
            self.table.left[index] = False
            for group in (self.left, self.window, self.frontier):
                group.pop(index, None)
            takes, shares, beyond = self.demands[index].takes, self.shares[index], self.beyond
            for rank, nbytes in takes:
                beyond[rank] += nbytes
            self.worst = max(self.worst, *[beyond[rank] for rank, _ in takes])
            for unit, rank, share in shares:
                self._read(unit, rank, index, share)
            for rank in {rank for rank, _ in takes}.union([rank for _, rank, _ in shares]):
                self._note(rank)

    def _read(self, unit: int, rank: int, index: int, share: float) -> None:
        self.unread[unit] -= 1
        if self.unread[unit]:
            del self.readers[unit][index]
            self.table.note(unit, closing=self.unread[unit] == 1)
            self.owed[unit] = self.owed.get(unit, 0.0) + share
            self.owed_by[rank] += share
            self.frontier.update(self.readers[unit])
        else:
            self.owed_by[rank] -= self.owed.pop(unit, 0.0)
            self.beyond[rank] -= self.size[unit]

    def _note(self, rank: int) -> None:
        """Update what depends on a rank's bytes: the weights of a byte are as it is, and with owed bytes counted as
        released."""
        over = self.beyond[rank]
        room = -over / self.scale
        self.weights[rank] = weights = exp(-room), exp(-room - self.owed_by[rank] / self.scale)
        self.weight_arrays[0, rank], self.weight_arrays[1, rank] = weights
        self.over[rank], self.changed[rank] = over, len(self.order)
        for index in self.dependent[rank]:
            self.evaluated[index] = None
        self.dependent[rank].clear()

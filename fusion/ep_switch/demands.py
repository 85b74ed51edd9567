"""Hold what filling slabs needs: bytes allocated and units read, by slab and as arrays over all that are left."""

from collections import defaultdict
from itertools import chain
from typing import NamedTuple

import numpy as np

from fusion.ep_switch.hops import Hops

MOST = 1 << 62
"""More than any excess over a limit"""

COMPACT = 0.7
"""Share of a table's slabs that are left below which it drops the others"""


class Demand(NamedTuple):
    """Hold what filling slabs needs: (rank, bytes allocated), one object for equal ones, and (unit, elements read) of
    units to be released."""

    takes: tuple[tuple[int, int], ...]
    reads: list[tuple[int, int]]


def demands_of(hops: Hops, size: list[int], itemsize: int) -> list[Demand]:
    """Return what every family of a plan needs.
    ``size``: as of `Storage`.
    ``itemsize``: bytes of an element of the target."""
    takes_by_groups: dict[object, tuple[tuple[int, int], ...]] = {}
    same: dict[object, tuple[tuple[int, int], ...]] = {}
    demands = []
    for family in hops.families:
        slabs = [family.slabs[number] for number in family.cut.slabs]
        key = tuple([(slab.groups, slab.unit.numel) for slab in slabs])
        if key not in takes_by_groups:
            bytes_by_rank: dict[int, int] = defaultdict(int)
            for slab in slabs:
                for rank in chain.from_iterable(slab.groups):
                    bytes_by_rank[rank] += slab.unit.numel * itemsize
            takes = tuple(bytes_by_rank.items())
            takes_by_groups[key] = same.setdefault(takes, takes)  # as `evenly` and others go by identity
        demands.append(Demand(takes_by_groups[key], []))
    for family, unit, numel in hops.reads.tolist():
        if size[unit]:
            demands[family].reads.append((unit, numel))
    return demands


class DemandTable:
    """Hold what slabs allocate and read as arrays, to evaluate all that are left at once, with the same results to the
    bit as the search has one by one. Many slabs have the same allocations, which are summed once.
    ``shares``: the units that every slab reads, with their ranks and bytes that it reads.
    ``size``: bytes of each unit.
    ``unread``: number of slabs that read it."""

    def __init__(
        self, demands: list[Demand], shares: list[list[tuple[int, int, float]]], size: list[int], unread: list[int]
    ):
        self.left = np.ones(len(demands), bool)
        """Whether a slab is not in the order"""
        self._closing, self._opening = np.array(unread) == 1, np.array(unread) > 1
        """Whether the next reader of a unit closes it, or opens it"""
        distinct = {id(takes): takes for takes, _ in demands}
        self.takes = {key: np.array(takes).T for key, takes in distinct.items()}
        """[2, allocations]: (rank, bytes), by identity of the allocations"""
        numbers = {key: number for number, key in enumerate(distinct)}
        self._takes, counts = np.concatenate([*self.takes.values()], axis=1), [*map(len, distinct.values())]
        self._takes_number, self._starts = np.repeat(np.arange(len(counts)), counts), np.cumsum([0, *counts[:-1]])
        self._slabs = np.arange(len(demands))
        """The slabs in the table"""
        self._takes_of = np.array([numbers[id(takes)] for takes, _ in demands])
        self._number = np.repeat(self._slabs, [*map(len, shares)])
        """Place in `_slabs` of the slab of every read"""
        reads = np.array([*chain.from_iterable(shares)], "q, q, d")
        self._reads = [reads["f0"].copy(), reads["f1"].copy(), reads["f2"].copy(), np.array(size)[reads["f0"]]]
        """Unit, rank, bytes read, bytes released"""

    def note(self, unit: int, closing: bool) -> None:
        """Note that a unit was read, and whether its next reader closes it."""
        self._closing[unit], self._opening[unit] = closing, False

    def best(self, over: np.ndarray, weights: np.ndarray, bucket_bytes: int) -> tuple[int, float, tuple[int, ...]]:
        """Return (excess bytes on the worst rank, increase in tightness of the ranks, slab) of the best next slab.
        ``over``: bytes of each rank beyond its limit.
        ``weights``: of a byte on each rank: as it is, and with owed bytes counted as released."""
        left = self.left[self._slabs]
        if left.mean() < COMPACT:
            kept = left[self._number]
            self._number, self._reads = (left.cumsum() - 1)[self._number[kept]], [of[kept] for of in self._reads]
            self._slabs, self._takes_of, left = self._slabs[left], self._takes_of[left], left[left]
        rank, nbytes = self._takes
        excess = np.maximum.reduceat(over[rank] + nbytes, self._starts)[self._takes_of]
        excess[self._number[self._opening[self._reads[0]]]] += bucket_bytes  # once, however often it is indexed
        excess = np.where(left, np.maximum(excess, 0), MOST)
        least = int(excess.min())
        of_best = excess == least
        chosen, rows = of_best.nonzero()[0], of_best[self._number].nonzero()[0]
        takes_of, number = self._takes_of[chosen], np.concatenate([chosen, self._number[rows]])
        asked = np.zeros(len(self._starts), bool)
        asked[takes_of] = True
        asked_rows = asked[self._takes_number].nonzero()[0]
        rank, nbytes, of_takes = rank[asked_rows], nbytes[asked_rows], self._takes_number[asked_rows]
        unit, from_rank, share, size = (of[rows] for of in self._reads)
        tighter = np.zeros(len(excess))
        for weight, less in zip(weights, (size * self._closing[unit], share), strict=True):
            # Sums as the search makes them: of what is allocated, then of what is read, in sequence.
            taken = np.bincount(of_takes, weight[rank] * nbytes, len(asked))[takes_of]
            tighter += np.bincount(number, np.concatenate([taken, -(weight[from_rank] * less)]), len(excess))
        tighter = tighter[chosen] / (bucket_bytes / 2)
        first = int(tighter.argmin())
        return least, float(tighter[first]), (int(self._slabs[chosen[first]]),)

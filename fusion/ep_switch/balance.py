"""Shares loads among those who can carry them, so that the busiest carries as little as possible. Pure.

A *demand* is an amount that any mix of a set of ranks may carry. The least possible load of the busiest is the maximum,
over sets of ranks T, of (demands that only members of T can carry) / |T|: max-flow, min-cut. Invariants: the parts of a
demand sum to 1; the busiest under `shares` is within TOLERANCE of that optimum.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

Ranks = tuple[int, ...]

TOLERANCE = 1.005
"""How far above the optimum the busiest may stay."""


def shares(demands: Mapping[Ranks, float]) -> tuple[dict[Ranks, dict[int, float]], float]:
    """The part of each demand that every rank of its set takes, and the load of the busiest.

    Set after set pours its demand anew onto its ranks, the least loaded first, until some set of ranks proves that the
    busiest is busy for want of others. Each pouring is the exact minimum of the sum of squared loads over one demand,
    so the sum falls to its minimum, where the busiest is at the optimum too.
    """
    given = {ranks: dict.fromkeys(ranks, amount / len(ranks)) for ranks, amount in demands.items()}
    load: dict[int, float] = defaultdict(float)
    for parts in given.values():
        for rank, amount in parts.items():
            load[rank] += amount
    choosing = [ranks for ranks, amount in demands.items() if len(ranks) > 1 and amount]
    while choosing and max(load.values()) > TOLERANCE * _least(demands, load):
        for ranks in choosing:
            parts = given[ranks]
            others = {rank: load[rank] - parts[rank] for rank in ranks}
            level = _level(sorted(others.values()), demands[ranks])
            for rank in ranks:
                parts[rank] = max(0.0, level - others[rank])
                load[rank] = others[rank] + parts[rank]
    found = {r: {rank: part / (demands[r] or 1.0) for rank, part in parts.items()} for r, parts in given.items()}
    return found, max(load.values(), default=0.0)


def _level(heights: list[float], amount: float) -> float:
    """The level to which ``amount`` fills columns of these heights, ascending."""
    total, level = amount, 0.0
    for count, height in enumerate(heights, start=1):
        total += height
        level = total / count
        if count == len(heights) or level <= heights[count]:
            break
    return level


def _least(demands: Mapping[Ranks, float], load: Mapping[int, float]) -> float:
    """A lower bound on the load of the busiest, from the sets of the busiest one, two, three, … ranks."""
    order = sorted(load, key=lambda rank: (-load[rank], rank))
    place = {rank: index for index, rank in enumerate(order)}
    only = [0.0] * len(order)
    for ranks, amount in demands.items():
        only[max(place[rank] for rank in ranks)] += amount
    best = total = 0.0
    for count, amount in enumerate(only, start=1):
        total += amount
        best = max(best, total / count)
    return best


class Deal:
    """Deals pieces to ranks so that each demand's set carries its parts, and each rank its sum, at every time.

    A piece goes whole to the rank that is furthest behind; one of more than ``grain`` is cut among those behind.
    """

    def __init__(self, parts: Mapping[Ranks, Mapping[int, float]], grain: float):
        self.parts, self.grain = parts, grain
        self.load: dict[int, float] = defaultdict(float)
        self._behind: dict[int, float] = defaultdict(float)
        self._behind_in: dict[Ranks, dict[int, float]] = {ranks: dict.fromkeys(ranks, 0.0) for ranks in parts}

    def take(self, ranks: Ranks, amount: float) -> list[tuple[int, float]]:
        """(rank, amount) whose amounts sum to ``amount``; what they really take is to be told by `charge`."""
        if len(ranks) == 1:
            return [(ranks[0], amount)]
        parts, behind = self.parts[ranks], self._behind_in[ranks]
        if amount <= self.grain:
            return [(max(ranks, key=lambda r: (self._behind[r] + behind[r] + 2 * parts[r] * amount, -r)), amount)]
        want = {rank: max(0.0, behind[rank] + parts[rank] * amount) for rank in ranks}
        least = min(self.grain / 4, max(want.values()))
        want = {rank: wish for rank, wish in want.items() if wish >= least and wish > 0}
        total = sum(want.values())
        return [(rank, amount * wish / total) for rank, wish in want.items()]

    def charge(self, ranks: Ranks, rank: int, amount: float) -> None:
        """Counts that ``rank`` carries ``amount`` of a demand of ``ranks``."""
        self.load[rank] += amount
        if len(ranks) == 1:
            return
        behind = self._behind_in[ranks]
        for other, part in self.parts[ranks].items():
            behind[other] += part * amount
            self._behind[other] += part * amount
        behind[rank] -= amount
        self._behind[rank] -= amount

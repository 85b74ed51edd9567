"""Balance loads among the ranks that can carry them, minimising the maximum load. Pure.

A *demand* is an amount that may be split among a set of ranks in any way. The minimum of the maximum load is the
maximum, over sets of ranks T, of (demands that only members of T can carry) / |T|: max-flow, min-cut. Invariants: the
fractions of a demand sum to 1; the maximum load of `shares` is within TOLERANCE of that optimum."""

from collections import defaultdict
from collections.abc import Mapping
from operator import add

Ranks = tuple[int, ...]

TOLERANCE = 1.005
"""Accepted ratio of the maximum load to the optimum."""


def shares(demands: Mapping[Ranks, float]) -> tuple[dict[Ranks, dict[int, float]], float]:
    """Compute the fraction of each demand that every rank of its set carries, and the maximum load.

    Redistributes each demand over its ranks by water-filling (least loaded rank first), in turn, until a set of ranks
    proves the maximum load to be within TOLERANCE of its lower bound. Each redistribution is the exact minimum of the
    sum of squared loads over one demand, so the sum converges to its minimum, at which the maximum load is optimal too.
    """
    amounts = {ranks: dict.fromkeys(ranks, amount / len(ranks)) for ranks, amount in demands.items()}
    load: dict[int, float] = defaultdict(float)
    for amount_by_rank in amounts.values():
        for rank, amount in amount_by_rank.items():
            load[rank] += amount
    divisible = [ranks for ranks, amount in demands.items() if len(ranks) > 1 and amount]
    while divisible and max(load.values()) > TOLERANCE * _lower_bound(demands, load):
        for ranks in divisible:
            amount_by_rank = amounts[ranks]
            others = {rank: load[rank] - amount_by_rank[rank] for rank in ranks}
            level = _level(sorted(others.values()), demands[ranks])
            for rank in ranks:
                amount_by_rank[rank] = max(0.0, level - others[rank])
                load[rank] = others[rank] + amount_by_rank[rank]
    fractions = {
        ranks: {rank: amount / (demands[ranks] or 1.0) for rank, amount in amount_by_rank.items()}
        for ranks, amount_by_rank in amounts.items()
    }
    return fractions, max(load.values(), default=0.0)


def _level(heights: list[float], amount: float) -> float:
    """Return the level to which ``amount`` fills columns of these heights, ascending."""
    total, level = amount, 0.0
    for count, height in enumerate(heights, start=1):
        total += height
        level = total / count
        if count == len(heights) or level <= heights[count]:
            break
    return level


def _lower_bound(demands: Mapping[Ranks, float], load: Mapping[int, float]) -> float:
    """Return a lower bound on the maximum load, from the sets of the one, two, three, … most loaded ranks."""
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
    """Assign pieces to ranks so that, at any time, each rank has carried about its fraction of every demand.

    A piece is assigned whole to the rank with the largest deficit; one of more than ``grain`` is split among the ranks
    with a deficit."""

    def __init__(self, fractions: Mapping[Ranks, Mapping[int, float]], grain: float):
        self.grain = grain
        self.load: dict[int, float] = defaultdict(float)
        self._deficit: dict[int, float] = defaultdict(float)
        self._sets = {ranks: ([*of_set.values()], [0.0] * len(ranks)) for ranks, of_set in fractions.items()}
        """(fraction, deficit) of each rank by set"""

    def take(self, ranks: Ranks, amount: float) -> list[tuple[int, float]]:
        """Propose (rank, amount) pairs that sum to ``amount``; report the amounts actually assigned by `charge`.
        ``ranks``: ascending."""
        if len(ranks) == 1:
            return [(ranks[0], amount)]
        deals = zip(ranks, *self._sets[ranks], strict=True)
        if amount <= self.grain:
            deficits = self._deficit
            dues = [deficits[rank] + deficit + 2 * fraction * amount for rank, fraction, deficit in deals]
            return [(ranks[dues.index(max(dues))], amount)]
        due = {rank: max(0.0, deficit + fraction * amount) for rank, fraction, deficit in deals}
        min_due = min(self.grain / 4, max(due.values()))
        due = {rank: rank_due for rank, rank_due in due.items() if rank_due >= min_due and rank_due > 0}
        total = sum(due.values())
        return [(rank, amount * rank_due / total) for rank, rank_due in due.items()]

    def charge(self, ranks: Ranks, rank: int, amount: float) -> None:
        """Record that ``rank`` carries ``amount`` of a demand of ``ranks``."""
        self.load[rank] += amount
        if len(ranks) == 1:
            return
        fractions, deficit = self._sets[ranks]
        deficits, parts = self._deficit, [fraction * amount for fraction in fractions]
        deficit[:] = map(add, deficit, parts)
        for other, part in zip(ranks, parts, strict=True):
            deficits[other] += part
        deficit[ranks.index(rank)] -= amount
        deficits[rank] -= amount

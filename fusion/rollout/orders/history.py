"""Take the request with the most tokens left, by an estimate from the last epoch and from finished siblings.

The estimate pools the lengths that the same row had in the last epoch (RhymeRL, arXiv 2508.18588: ranks of lengths move
by 2 to 4 %) with those of finished siblings. The most remaining tokens first is optimal for known lengths where work
can be divided (McNaughton, 1959). Where several steps are in progress, the oldest is first: the trainer waits for it. A
group of which nothing is known has a probe, unless all requests are taken at once. A response that has outgrown its
estimate is taken for a long one, the longer the more.

Where responses run away, no estimate is trusted: while more than `HEDGE` of the responses do
(`LengthHistory.runaway_share`), the ranks of a step are those of `least_generated`. Where the last epoch does not
foretell lengths (`LengthHistory.foretells`: they are drawn anew, or reversed), it is left out: groups that are admitted
then are estimated from finished siblings alone."""

from typing import ClassVar

from fusion.rollout.entry import Entry
from fusion.rollout.orders.interface import Lengths, OrderInputs
from fusion.rollout.orders.ranked import RankedOrder
from fusion.rollout.orders.stamped_heap import Rank

OVERDUE = 0.5
"""Estimated remaining tokens of a response that has outgrown its estimate, relative to those that it has"""
HEDGE = 0.003, 0.0015
"""Share of responses that run away at or above which no estimate is trusted; below which they are again"""


class HistoryOrder(RankedOrder):
    """A change to the ranks of `least_generated` or back costs O(n log n)."""

    knows_last_epoch: ClassVar[bool] = True
    knows_siblings: ClassVar[bool] = True

    def __init__(self, inputs: OrderInputs) -> None:
        super().__init__(inputs)
        self._hedges = False
        """Whether responses run away, so that no estimate is trusted"""

    def add_group(self, group: str, lengths: Lengths) -> None:
        if not self.history.foretells:
            lengths.forget_earlier()
        super().add_group(group, lengths)
        hedges = self.history.runaway_share >= HEDGE[self._hedges]
        if hedges != self._hedges:
            self._hedges = hedges
            for siblings in self._groups.values():
                self._rank(siblings)

    def rank(self, request: Entry, lengths: Lengths) -> Rank:
        if self._hedges:
            return (lengths.step, request.generated)
        if request.member == 0 and not lengths.num_known:
            return (lengths.step, 0, request.generated)
        return (lengths.step, 1, -remaining(lengths.mean, request.generated))

    def estimate(self, lengths: Lengths) -> float:
        return lengths.mean

    def take_all(self, *, ranked: bool) -> list[Entry]:
        if not ranked or self._hedges:
            return super().take_all(ranked=ranked)
        # Without probes: what a probe would say comes too late for its siblings.
        return self._take_sorted(lambda request, known: (known.step, -remaining(known.mean, request.generated)))


def remaining(estimate: float, generated: int) -> float:
    """Estimate the tokens that a response still needs, from the estimate of its length and those that it has."""
    return max(estimate - generated, OVERDUE * generated)

"""Take the request with the fewest tokens so far: every response gets its share of time.

Where responses run away, estimates of lengths are worth nothing: what was expected to be short is begun last, and a
runaway among it ends long after everything else. With this order a runaway has had as much time as any other when it is
discovered."""

from fusion.rollout.entry import Entry
from fusion.rollout.orders.interface import Lengths
from fusion.rollout.orders.ranked import RankedOrder
from fusion.rollout.orders.stamped_heap import Rank


class LeastGeneratedOrder(RankedOrder):
    def rank(self, request: Entry, lengths: Lengths) -> Rank:
        return (request.generated,)

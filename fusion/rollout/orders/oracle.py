"""Take the request with the most tokens left, where the length of every response is known, to measure other orders.

Optimal where work can be divided (McNaughton, 1959)."""

from typing import ClassVar

from fusion.rollout.entry import Entry
from fusion.rollout.orders.interface import Lengths
from fusion.rollout.orders.ranked import RankedOrder
from fusion.rollout.orders.stamped_heap import Rank


class OracleOrder(RankedOrder):
    shares_rank: ClassVar[bool] = False

    def rank(self, request: Entry, lengths: Lengths) -> Rank:
        return (request.generated - lengths.exact[request.member],)

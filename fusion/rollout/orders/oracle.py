"""Take the request with the most tokens left, where the length of every response is known, to measure other orders.

Optimal where work can be divided (McNaughton, 1959)."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fusion.rollout.orders.interface import Lengths
from fusion.rollout.orders.ranked import RankedOrder
from fusion.rollout.orders.stamped_heap import Rank

if TYPE_CHECKING:
    from fusion.rollout.entry import Entry


class OracleOrder(RankedOrder):
    shares_rank: ClassVar[bool] = False

    def rank(self, request: Entry, lengths: Lengths) -> Rank:
        return (request.generated - lengths.exact[request.member],)

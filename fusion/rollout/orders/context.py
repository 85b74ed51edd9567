"""Take probes first, then the group whose longest finished sibling is longest (Seer, arXiv 2511.14617).

The first request of each group is a probe; probes go first, the shortest first. A group's estimate is its longest
finished sibling, before that the upper bound. So that no group starves, every `SERVE_STARVED`-th take returns a request
of the group that was served longest ago; a take that is put back counts as not served."""

from collections.abc import Iterable, Sequence
from typing import ClassVar

from fusion.rollout.entry import Entry
from fusion.rollout.orders.interface import Lengths, OrderInputs
from fusion.rollout.orders.ranked import RankedOrder
from fusion.rollout.orders.stamped_heap import Rank, StampedHeap

SERVE_STARVED = 16
"""Takes of which one serves the group that has waited longest"""


class ContextOrder(RankedOrder):
    knows_siblings: ClassVar[bool] = True

    def __init__(self, inputs: OrderInputs) -> None:
        super().__init__(inputs)
        self._by_service: StampedHeap[Entry] = StampedHeap()
        """All requests, by the number of takes when their group was last served"""
        self._served: dict[str, int] = {}
        """Group → number of takes when one of its requests was last taken"""
        self._taken = self._served_before = 0
        """Number of requests ever taken; value of `_served` of the last one's group before that"""

    def rank(self, request: Entry, lengths: Lengths) -> Rank:
        return (0, request.generated) if request.member == 0 else (1, -lengths.longest)

    def estimate(self, lengths: Lengths) -> float:
        return lengths.longest

    def add(self, requests: Iterable[Entry]) -> None:
        requests = list(requests)
        super().add(requests)
        for request in requests:
            self._by_service.push((self._served.get(request.group, 0),), request)

    def take(self) -> Entry | None:
        if not len(self):
            return None
        self._taken += 1
        if self._taken % SERVE_STARVED:
            request = self._take_first()
            self._by_service.discard(request)
        else:
            request = self._longest_unserved()
            self._remove(request)
        self._served_before = self._served.get(request.group, 0)
        self._served[request.group] = self._taken
        return request

    def put_back(self, request: Entry) -> None:
        self._taken -= 1
        self._served[request.group] = self._served_before
        self.add([request])

    def take_all(self, *, ranked: bool) -> list[Entry]:
        taken = super().take_all(ranked=ranked)
        self._by_service = StampedHeap()
        return taken

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        super().discard(group, waiting)
        for request in waiting:
            self._by_service.discard(request)
        self._served.pop(group, None)

    def _longest_unserved(self) -> Entry:
        """Take out a request of the group served longest ago, whose others are ranked again when it is their turn."""
        while True:
            (ranked,), request = self._by_service.first
            served = self._served.get(request.group, 0)
            if ranked == served:
                return self._by_service.pop()
            self._by_service.push((served,), request)

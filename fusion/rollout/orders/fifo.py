"""Take the oldest request first."""

import heapq
from collections.abc import Iterable, Sequence

from fusion.rollout.entry import Entry
from fusion.rollout.orders.interface import Lengths, Order, OrderInputs


class FifoOrder(Order):
    """The oldest first. Cost: O(1) to add a new request, O(log n) to add one that returns and to take one."""

    def __init__(self, inputs: OrderInputs) -> None:
        super().__init__(inputs)
        self._waiting: list[tuple[int, Entry]] = []
        """A heap by position"""
        self._discarded: set[str] = set()
        """Requests that are still in it, and do not wait any more"""

    def __len__(self) -> int:
        return len(self._waiting) - len(self._discarded)

    def add_group(self, group: str, lengths: Lengths) -> None: ...

    def observe_finished(self, group: str, tokens: int) -> None: ...

    def add(self, requests: Iterable[Entry]) -> None:
        for request in requests:
            heapq.heappush(self._waiting, (request.position, request))

    def take(self) -> Entry | None:
        while self._waiting:
            request = heapq.heappop(self._waiting)[1]
            if request.id not in self._discarded:
                return request
            self._discarded.remove(request.id)
        return None

    def put_back(self, request: Entry) -> None:
        self.add([request])

    def take_all(self, *, ranked: bool) -> list[Entry]:
        waiting = [request for _, request in sorted(self._waiting) if request.id not in self._discarded]
        self._waiting, self._discarded = [], set()
        return waiting

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        self._discarded.update(request.id for request in waiting)

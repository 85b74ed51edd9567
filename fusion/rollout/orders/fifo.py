"""Take the oldest request first. New requests come in order, so only those that return need a heap."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fusion.rollout.orders.interface import Lengths, Order, OrderInputs

if TYPE_CHECKING:
    from fusion.rollout.entry import Entry


class FifoOrder(Order):
    """The oldest first. Cost: O(1) for a new request, O(log n) for one that returns."""

    def __init__(self, inputs: OrderInputs) -> None:
        super().__init__(inputs)
        self._new: deque[Entry] = deque()
        """Requests that have been added in order"""
        self._returned: list[tuple[int, Entry]] = []
        """The others, a heap by position"""
        self._newest = -1
        """Position of the newest request in `_new`"""
        self._discarded: set[str] = set()
        """Requests that are still here, and do not wait any more"""

    def __len__(self) -> int:
        return len(self._new) + len(self._returned) - len(self._discarded)

    def add_group(self, group: str, lengths: Lengths) -> None: ...

    def observe_finished(self, group: str, tokens: int) -> None: ...

    def add(self, requests: Iterable[Entry]) -> None:
        for request in requests:
            if request.position > self._newest:
                self._newest = request.position
                self._new.append(request)
            else:
                heapq.heappush(self._returned, (request.position, request))

    def take(self) -> Entry | None:
        new, returned = self._new, self._returned
        while new or returned:
            if not returned or (new and new[0].position < returned[0][0]):
                request = new.popleft()
            else:
                request = heapq.heappop(returned)[1]
            if request.id not in self._discarded:
                return request
            self._discarded.remove(request.id)
        return None

    def put_back(self, request: Entry) -> None:
        self.add([request])

    def take_all(self, *, ranked: bool) -> list[Entry]:
        if self._returned or self._discarded:
            return list(iter(self.take, None))
        waiting, self._new = list(self._new), deque()
        return waiting

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        self._discarded.update(request.id for request in waiting)

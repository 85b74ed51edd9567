"""Keep items by a rank that may change. Pure.

An item whose rank changes is pushed again, and its previous place stays until it comes to the top: the stamp shows
which is valid. Stale ones are removed when they are the larger part, so the cost stays amortized O(log n)."""

import heapq
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

Rank = tuple[float, ...]
MIN_ITEMS = 64
"""Number of items of a heap below which stale ones are not looked for"""


class Ranked(Protocol):
    """What a heap holds. ``id`` is its own; of equal ranks the lowest ``position`` is first."""

    @property
    def id(self) -> Hashable: ...

    @property
    def position(self) -> float: ...


Item = TypeVar("Item", bound=Ranked)


class StampedHeap(Generic[Item]):
    """A heap by rank, of equal ranks by position."""

    def __init__(self) -> None:
        self._items: list[tuple[Rank, float, int, Item]] = []
        """(rank, position, stamp, item)"""
        self._stamp: dict[Hashable, int] = {}
        """Id → the valid stamp"""
        self._stamped = 0

    def __len__(self) -> int:
        return len(self._stamp)

    def push(self, rank: Rank, item: Item) -> None:
        """Add an item, or change its rank."""
        self._stamped += 1
        self._stamp[item.id] = self._stamped
        heapq.heappush(self._items, (rank, item.position, self._stamped, item))
        if len(self._items) > MIN_ITEMS and len(self._items) > 2 * len(self._stamp):
            self._items = [one for one in self._items if self._stamp.get(one[3].id) == one[2]]
            heapq.heapify(self._items)

    @property
    def first(self) -> tuple[Rank, Item]:
        """The item of the lowest rank, and its rank."""
        while self._stamp.get(self._items[0][3].id) != self._items[0][2]:
            heapq.heappop(self._items)
        rank, _, _, item = self._items[0]
        return rank, item

    def pop(self) -> Item:
        item = self.first[1]
        heapq.heappop(self._items)
        del self._stamp[item.id]
        return item

    def discard(self, item: Item) -> None:
        self._stamp.pop(item.id, None)

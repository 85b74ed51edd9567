"""Keep the waiting requests of all groups by a rank, the lowest first. Pure.

Siblings that have not begun have one rank, so a group has one place in the heap for all of them.

Cost, for n waiting requests in groups of G: `add` and `take` O(log n), of siblings that have not begun O(1);
`observe_finished` O(log n), and as much for each sibling that has begun and waits, with orders that know no siblings
O(1).

Invariants (property-tested in tests/rollout/orders/test_ranked.py): `take` returns the waiting request of the lowest
rank, of equals the one that was added first (of a group its first, then those that have not begun, then the others)."""

from abc import abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar

from fusion.rollout.entry import Entry
from fusion.rollout.orders.interface import Lengths, Order, OrderInputs
from fusion.rollout.orders.stamped_heap import Rank, StampedHeap


@dataclass(slots=True)
class Siblings:
    """The waiting requests of a group. ``position``: of `fresh` among all, right behind the group's first."""

    id: tuple[str]
    position: float
    lengths: Lengths
    fresh: deque[Entry] = field(default_factory=deque)
    """Requests that have not begun, in order, without the group's first, which may be a probe: they have one rank"""
    others: dict[str, Entry] = field(default_factory=dict)
    """The others, by id: each has its own rank"""


class RankedOrder(Order):
    """The lowest rank first."""

    knows_siblings: ClassVar[bool] = False
    """Whether ranks change, by `estimate`, when a sibling finishes"""
    shares_rank: ClassVar[bool] = True
    """Whether siblings that have not begun have one rank"""

    def __init__(self, inputs: OrderInputs) -> None:
        super().__init__(inputs)
        self._groups: dict[str, Siblings] = {}
        self._by_rank: StampedHeap[Entry | Siblings] = StampedHeap()
        """Requests, and instead of those in `Siblings.fresh` their group"""
        self._num_fresh = self._num_others = 0
        """Number of requests in `Siblings.fresh`, and of the others"""

    @abstractmethod
    def rank(self, request: Entry, lengths: Lengths) -> Rank:
        """Return the rank of a request: the lowest is taken first."""

    def estimate(self, lengths: Lengths) -> float:
        """Return the estimated length of a response, where some are known (`knows_siblings`)."""
        raise NotImplementedError

    def __len__(self) -> int:
        return self._num_fresh + self._num_others

    def add_group(self, group: str, lengths: Lengths) -> None:
        self._groups[group] = Siblings((group,), -1.0, lengths)

    def add(self, requests: Iterable[Entry]) -> None:
        for request in requests:
            siblings = self._groups[request.group]
            if request.generated or not (self.shares_rank and request.member):
                siblings.others[request.id] = request
                self._num_others += 1
                self._by_rank.push(self.rank(request, siblings.lengths), request)
                continue
            fresh = siblings.fresh
            self._num_fresh += 1
            if not fresh:
                fresh.append(request)
                siblings.position = request.position - request.member + 0.5
                self._by_rank.push(self.rank(request, siblings.lengths), siblings)
            elif request.position > fresh[-1].position:
                fresh.append(request)
            else:
                insort(fresh, request, key=attrgetter("position"))

    def take(self) -> Entry | None:
        return self._take_first() if self._by_rank else None

    def put_back(self, request: Entry) -> None:
        self.add([request])

    def take_all(self, *, ranked: bool) -> list[Entry]:
        return list(iter(self.take, None)) if ranked else self._take_sorted(lambda request, lengths: ())

    def observe_finished(self, group: str, tokens: int) -> None:
        siblings = self._groups[group]
        lengths = siblings.lengths
        if self.knows_siblings and lengths.num_known:
            self._errors.append(abs(self.estimate(lengths) - tokens) / max(1, tokens))
        lengths.observe(tokens)
        if self.knows_siblings and (siblings.fresh or siblings.others):
            self._rank(siblings)

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        for request in waiting:
            self._remove(request)
        del self._groups[group]

    def _rank(self, siblings: Siblings) -> None:
        """Rank the waiting requests of a group again."""
        for request in siblings.others.values():
            self._by_rank.push(self.rank(request, siblings.lengths), request)
        if siblings.fresh:
            self._by_rank.push(self.rank(siblings.fresh[0], siblings.lengths), siblings)

    def _take_sorted(self, rank: Callable[[Entry, Lengths], Rank]) -> list[Entry]:
        """Take out all requests in the order of another rank."""
        waiting = []
        for siblings in self._groups.values():
            for request in (*siblings.others.values(), *siblings.fresh):
                waiting.append((rank(request, siblings.lengths), request.position, request))
            siblings.others, siblings.fresh = {}, deque()
        self._by_rank, self._num_fresh, self._num_others = StampedHeap(), 0, 0
        return [request for _, _, request in sorted(waiting)]

    def _take_first(self) -> Entry:
        first = self._by_rank.first[1]
        if not isinstance(first, Siblings):
            self._remove(first)
            return first
        request = first.fresh.popleft()
        self._num_fresh -= 1
        if not first.fresh:
            self._by_rank.discard(first)
        return request

    def _remove(self, request: Entry) -> None:
        siblings = self._groups[request.group]
        if siblings.others.pop(request.id, None) is not None:
            self._num_others -= 1
            self._by_rank.discard(request)
            return
        siblings.fresh.remove(request)
        self._num_fresh -= 1
        if not siblings.fresh:
            self._by_rank.discard(siblings)

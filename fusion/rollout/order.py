"""Decide which waiting request is dispatched next. Pure.

    order              the next request is …                                       it knows
    fifo               the oldest                                                  nothing
    least_generated    the one with the fewest tokens so far                       nothing
    context            a probe; else one of the group with the longest estimate    finished siblings
    history            the one with the most tokens left, by estimate              last epoch, finished siblings
    oracle             the one with the most tokens left                           the length of every response
    histopipe          shortest or longest first, in turn (`histopipe.py`)         last epoch

With chunks (`rollout.chunk_tokens`) a request comes back to the buffer after each of them, so an order decides again
and again; without, only where a response begins. `context` is Seer's (arXiv 2511.14617): the first request of each
group is a probe, probes go first, shortest first; a group's estimate is the longest finished sibling, before that the
upper bound; now and then the group that has waited longest is served. `history` pools the lengths that the same row had
in the last epoch (RhymeRL, arXiv 2508.18588: ranks of lengths move by 2 to 4 %) with those of finished siblings, and
takes the most remaining tokens first, which is optimal for known lengths where work can be divided (McNaughton, 1959).
A response that has outgrown its estimate is taken for a long one, the longer the more: so runaways run early.

Cost, for n waiting requests in groups of G: `add` and `take` O(log n); `observe_finished` O(G log n), with orders that
know no lengths O(1).

Invariants (property-tested in tests/rollout/test_order.py): every request that is added is taken once, unless it is
discarded; `take` returns the waiting request of the lowest rank, the oldest of equals, except that every
`SERVE_STARVED`-th take of `context` returns one of the group that was served longest ago.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from fusion.rollout.buffer import Entry

SERVE_STARVED = 16
"""Every so many takes, `context` serves the group that has waited longest."""

MIN_ITEMS = 64
"""Number of items of a heap below which stale ones are not looked for"""

OVERDUE = 0.5
"""Estimated remaining tokens of a response that has outgrown its estimate, relative to those that it has"""


@dataclass(slots=True)
class Lengths:
    """What is known about the lengths of a group's responses, in tokens.

    Args:
        max_tokens: of a response.
        earlier: of the same row in an earlier epoch.
        exact: of each member; empty where they are not known.
        finished: of the members that have finished.
        step: in which the group is expected to be trained.
    """

    max_tokens: int
    earlier: Sequence[int] = ()
    exact: Sequence[int] = ()
    finished: list[int] = field(default_factory=list)
    step: int = 0
    longest: int = field(init=False)
    """Seer's estimate: the longest finished sibling, at first the upper bound"""
    mean: float = field(init=False)
    """The mean of the last epoch and of finished siblings, at first the upper bound"""

    def __post_init__(self) -> None:
        self.estimate()

    def observe(self, tokens: int) -> None:
        """Records the length of a finished response."""
        self.finished.append(tokens)
        self.estimate()

    def estimate(self) -> None:
        """Computes both estimates: once for a finished response, not for each of its siblings that waits."""
        known = (*self.earlier, *self.finished)
        self.longest = max(self.finished, default=self.max_tokens)
        self.mean = sum(known) / len(known) if known else self.max_tokens


Rank = tuple[float, ...]
RankOf = Callable[["Entry", Lengths], Rank]


def _fifo(request: Entry, lengths: Lengths) -> Rank:
    return ()


def _least_generated(request: Entry, lengths: Lengths) -> Rank:
    return (request.generated,)


def _context(request: Entry, lengths: Lengths) -> Rank:
    return (0, request.generated) if request.member == 0 else (1, -lengths.longest)


def _history(request: Entry, lengths: Lengths) -> Rank:
    return (-remaining(lengths.mean, request.generated),)


def _oracle(request: Entry, lengths: Lengths) -> Rank:
    return (request.generated - lengths.exact[request.member],)


def remaining(estimate: float, generated: int) -> float:
    """Estimates the tokens that a response still needs, from the estimate of its length and those that it has."""
    return max(estimate - generated, OVERDUE * generated)


ORDERS: dict[str, RankOf] = {
    "fifo": _fifo,
    "least_generated": _least_generated,
    "context": _context,
    "history": _history,
    "oracle": _oracle,
}
"""Name of an order → the rank of a request: the lowest is taken first."""

KNOWS_SIBLINGS = frozenset({"context", "history"})
"""Orders whose ranks change when a sibling finishes"""

KNOWS_LAST_EPOCH = frozenset({"history", "histopipe"})
"""Orders that estimate by the lengths of a row's last epoch"""


class WaitingRequests(Protocol):
    """The waiting requests of all groups in an order; `make_waiting` creates one."""

    def __len__(self) -> int: ...

    def add_group(self, group: str, lengths: Lengths) -> None:
        """Announces a group before its first request is added."""

    def add(self, requests: Iterable[Entry]) -> None:
        """Adds requests, which wait from now on."""

    def take(self) -> Entry | None:
        """Takes out the next request; None: none waits."""

    def put_back(self, request: Entry) -> None:
        """Undoes the last `take`, which returned this request: it counts as not served."""

    def take_all(self) -> list[Entry]:
        """Takes out all requests, in order."""

    def observe_finished(self, group: str, tokens: int, waiting: Iterable[Entry]) -> None:
        """Records the length of a finished response. ``waiting``: the requests of its group that wait."""

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        """Forgets a group, and its requests that still wait."""

    def take_errors(self) -> list[float]:
        """Returns the relative error of the estimate of each response that has finished since the last call, where
        there was one."""


def make_waiting(order: str) -> WaitingRequests:
    """Creates an empty line of requests. ``order``: a key of `ORDERS`."""
    return FifoRequests() if order == "fifo" else RankedRequests(order)


class FifoRequests:
    """The oldest first. New requests come in order, so only those that return need a heap."""

    def __init__(self) -> None:
        self._new: deque[Entry] = deque()
        """Those that have been added in order"""
        self._returned: list[tuple[int, Entry]] = []
        """The others, a heap by position"""
        self._newest = -1
        """Position of the newest request in `_new`"""
        self._discarded: set[str] = set()
        """Requests that are still here, and do not wait any more"""

    def __len__(self) -> int:
        return len(self._new) + len(self._returned) - len(self._discarded)

    def add_group(self, group: str, lengths: Lengths) -> None: ...

    def observe_finished(self, group: str, tokens: int, waiting: Iterable[Entry]) -> None: ...

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

    def take_errors(self) -> list[float]:
        return []

    def take_all(self) -> list[Entry]:
        if self._returned or self._discarded:
            return list(iter(self.take, None))
        waiting, self._new = list(self._new), deque()
        return waiting

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        self._discarded.update(request.id for request in waiting)


class RankedRequests:
    """The lowest rank first, by the order ``name``, a key of `ORDERS`."""

    def __init__(self, name: str) -> None:
        self._rank_of, self._knows_siblings = ORDERS[name], name in KNOWS_SIBLINGS
        self._lengths: dict[str, Lengths] = {}
        """Group → what is known about its lengths"""
        self._by_rank = StampedHeap()
        self._by_service = StampedHeap() if name == "context" else None
        """The same requests, by the number of takes when their group was last served; None: no group is preferred"""
        self._served: dict[str, int] = {}
        """Group → number of takes when one of its requests was last taken"""
        self._taken = self._served_before = 0
        """Number of requests ever taken; what `_served` said of the group of the last one before"""
        self._errors: list[float] = []

    def __len__(self) -> int:
        return len(self._by_rank)

    def take_errors(self) -> list[float]:
        errors, self._errors = self._errors, []
        return errors

    def add_group(self, group: str, lengths: Lengths) -> None:
        self._lengths[group] = lengths

    def add(self, requests: Iterable[Entry]) -> None:
        for request in requests:
            self._by_rank.push(self._rank_of(request, self._lengths[request.group]), request)
            if self._by_service is not None:
                self._by_service.push((self._served.get(request.group, 0),), request)

    def take(self) -> Entry | None:
        if not self._by_rank:
            return None
        self._taken += 1
        if self._by_service is None:
            return self._by_rank.pop()
        if self._taken % SERVE_STARVED:
            request = self._by_rank.pop()
            self._by_service.discard(request)
        else:
            request = self._longest_unserved(self._by_service)
            self._by_rank.discard(request)
        self._served_before = self._served.get(request.group, 0)
        self._served[request.group] = self._taken
        return request

    def put_back(self, request: Entry) -> None:
        self._taken -= 1
        if self._by_service is not None:
            self._served[request.group] = self._served_before
        self.add([request])

    def take_all(self) -> list[Entry]:
        return list(iter(self.take, None))

    def observe_finished(self, group: str, tokens: int, waiting: Iterable[Entry]) -> None:
        lengths = self._lengths[group]
        if self._knows_siblings and (lengths.earlier or lengths.finished):
            estimate = lengths.longest if self._by_service is not None else lengths.mean
            self._errors.append(abs(estimate - tokens) / max(1, tokens))
        lengths.observe(tokens)
        if self._knows_siblings:
            for request in waiting:
                self._by_rank.push(self._rank_of(request, lengths), request)

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        del self._lengths[group]
        self._served.pop(group, None)
        for request in waiting:
            self._by_rank.discard(request)
            if self._by_service is not None:
                self._by_service.discard(request)

    def _longest_unserved(self, by_service: StampedHeap) -> Entry:
        """Takes out a request of the group that was served longest ago. Its other requests are ranked again only when
        it is their turn."""
        while True:
            (ranked,), request = by_service.first
            served = self._served.get(request.group, 0)
            if ranked == served:
                return by_service.pop()
            by_service.push((served,), request)


class StampedHeap:
    """A heap of requests by rank, of equal ranks the oldest first, whose ranks may change.

    A request whose rank changes is pushed again, and its previous item stays until it comes to the top: the stamp tells
    which item is valid. Stale items are removed when they are the larger part, so the cost stays amortized O(log n).
    """

    def __init__(self) -> None:
        self._items: list[tuple[Rank, int, int, Entry]] = []
        """(rank, position, stamp, request)"""
        self._stamp: dict[str, int] = {}
        """Request → the stamp of its valid item"""
        self._stamped = 0

    def __len__(self) -> int:
        return len(self._stamp)

    def push(self, rank: Rank, request: Entry) -> None:
        """Adds a request, or changes its rank."""
        self._stamped += 1
        self._stamp[request.id] = self._stamped
        heapq.heappush(self._items, (rank, request.position, self._stamped, request))
        if len(self._items) > MIN_ITEMS and len(self._items) > 2 * len(self._stamp):
            self._items = [item for item in self._items if self._stamp.get(item[3].id) == item[2]]
            heapq.heapify(self._items)

    @property
    def first(self) -> tuple[Rank, Entry]:
        """The request of the lowest rank, and its rank."""
        while self._stamp.get(self._items[0][3].id) != self._items[0][2]:
            heapq.heappop(self._items)
        rank, _, _, request = self._items[0]
        return rank, request

    def pop(self) -> Entry:
        """Takes out the request of the lowest rank."""
        request = self.first[1]
        heapq.heappop(self._items)
        del self._stamp[request.id]
        return request

    def discard(self, request: Entry) -> None:
        """Removes a request, if it is here."""
        self._stamp.pop(request.id, None)

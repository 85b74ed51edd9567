"""Keep the waiting requests of all groups in an order of `order.py`. Pure.

Siblings that have not begun have one rank, so a group has one place in the heap for all of them.

Cost, for n waiting requests in groups of G: `add` and `take` O(log n), of siblings that have not begun O(1);
`observe_finished` O(log n), and as much for each sibling that has begun and waits, with orders that know no lengths
O(1); a change of `history` to `least_generated` or back O(n log n).

Invariants (property-tested in tests/rollout/test_order.py): every request that is added is taken once, unless it is
discarded; `take` returns the waiting request of the lowest rank, of equals the one that was added first (of a group its
first, then those that have not begun, then the others), except that every `SERVE_STARVED`-th take of `context` returns
one of the group that was served longest ago.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from fusion.rollout.order import HEDGE, KNOWS_SIBLINGS, ORDERS, Lengths, hedged, history, most_left
from fusion.rollout.stamped_heap import StampedHeap

if TYPE_CHECKING:
    from fusion.rollout.buffer import Entry
    from fusion.rollout.length_history import LengthHistory

SERVE_STARVED = 16
"""Every so many takes, `context` serves the group that has waited longest."""


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

    def take_all(self, *, ranked: bool) -> list[Entry]:
        """Takes out all requests, in order, with `history` without probes; not ``ranked``: the oldest first."""

    def observe_finished(self, group: str, tokens: int) -> None:
        """Records the length of a finished response."""

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        """Forgets a group, and its requests that still wait."""

    def take_errors(self) -> list[float]:
        """Returns the relative error of the estimate of each response that has finished since the last call, where
        there was one."""


def make_waiting(order: str, history: LengthHistory) -> WaitingRequests:
    """Creates an empty line of requests. ``order``: a key of `ORDERS`; ``history``: what `history` knows."""
    return FifoRequests() if order == "fifo" else RankedRequests(order, history)


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

    def take_errors(self) -> list[float]:
        return []

    def take_all(self, *, ranked: bool) -> list[Entry]:
        if self._returned or self._discarded:
            return list(iter(self.take, None))
        waiting, self._new = list(self._new), deque()
        return waiting

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        self._discarded.update(request.id for request in waiting)


@dataclass(slots=True)
class Siblings:
    """The waiting requests of a group. ``position``: of `fresh` among all, right behind the group's first."""

    id: tuple[str]
    position: float
    lengths: Lengths
    fresh: deque[Entry] = field(default_factory=deque)
    """Those that have not begun, in order, without the first of the group, which may be a probe: they have one rank"""
    others: dict[str, Entry] = field(default_factory=dict)
    """The others, by id: each has its own rank"""


class RankedRequests:
    """The lowest rank first, by the order ``name``, a key of `ORDERS`."""

    def __init__(self, name: str, history: LengthHistory) -> None:
        self._rank_of, self._knows_siblings = ORDERS[name], name in KNOWS_SIBLINGS
        self._history = history if name == "history" else None
        self._hedges = False
        """Whether responses run away, so that no estimate is trusted"""
        self._shares = name != "oracle"
        """Whether the siblings that have not begun have one rank"""
        self._groups: dict[str, Siblings] = {}
        self._by_rank: StampedHeap[Entry | Siblings] = StampedHeap()
        """Requests, and instead of those in `Siblings.fresh` their group"""
        self._num_fresh = self._num_others = 0
        """Number of requests in `Siblings.fresh`, and of the others"""
        self._by_service: StampedHeap[Entry] | None = StampedHeap() if name == "context" else None
        """All requests, by the number of takes when their group was last served; None: no group is preferred"""
        self._served: dict[str, int] = {}
        """Group → number of takes when one of its requests was last taken"""
        self._taken = self._served_before = 0
        """Number of requests ever taken; what `_served` said of the group of the last one before"""
        self._errors: list[float] = []

    def __len__(self) -> int:
        return self._num_fresh + self._num_others

    def take_errors(self) -> list[float]:
        errors, self._errors = self._errors, []
        return errors

    def add_group(self, group: str, lengths: Lengths) -> None:
        self._groups[group] = Siblings((group,), -1.0, lengths)
        if self._history is not None:
            hedges = self._history.runaway_share >= HEDGE[self._hedges]
            if hedges != self._hedges:
                self._hedges, self._rank_of = hedges, hedged if hedges else history
                for siblings in self._groups.values():
                    self._rank(siblings)

    def add(self, requests: Iterable[Entry]) -> None:
        for request in requests:
            siblings = self._groups[request.group]
            if request.generated or not (self._shares and request.member):
                siblings.others[request.id] = request
                self._num_others += 1
                self._by_rank.push(self._rank_of(request, siblings.lengths), request)
            else:
                fresh = siblings.fresh
                self._num_fresh += 1
                if fresh and request.position > fresh[-1].position:
                    fresh.append(request)
                elif fresh:
                    insort(fresh, request, key=_position)
                else:
                    fresh.append(request)
                    siblings.position = request.position - request.member + 0.5
                    self._by_rank.push(self._rank_of(request, siblings.lengths), siblings)
            if self._by_service is not None:
                self._by_service.push((self._served.get(request.group, 0),), request)

    def take(self) -> Entry | None:
        if not self._by_rank:
            return None
        self._taken += 1
        if self._by_service is None:
            return self._take_first()
        if self._taken % SERVE_STARVED:
            request = self._take_first()
            self._by_service.discard(request)
        else:
            request = self._longest_unserved(self._by_service)
            self._remove(request)
        self._served_before = self._served.get(request.group, 0)
        self._served[request.group] = self._taken
        return request

    def put_back(self, request: Entry) -> None:
        self._taken -= 1
        if self._by_service is not None:
            self._served[request.group] = self._served_before
        self.add([request])

    def take_all(self, *, ranked: bool) -> list[Entry]:
        if ranked and (self._history is None or self._hedges):
            return list(iter(self.take, None))
        # All are bound to engines now: what a probe would say comes too late for its siblings.
        waiting = []
        for siblings in self._groups.values():
            for request in (*siblings.others.values(), *siblings.fresh):
                lengths = siblings.lengths
                rank = (lengths.step, *most_left(request, lengths)) if ranked else ()
                waiting.append((rank, request.position, request))
            siblings.others, siblings.fresh = {}, deque()
        self._by_rank, self._num_fresh, self._num_others = StampedHeap(), 0, 0
        if self._by_service is not None:
            self._by_service = StampedHeap()
        return [request for _, _, request in sorted(waiting)]

    def observe_finished(self, group: str, tokens: int) -> None:
        siblings = self._groups[group]
        lengths = siblings.lengths
        if self._knows_siblings and lengths.num_known:
            estimate = lengths.longest if self._by_service is not None else lengths.mean
            self._errors.append(abs(estimate - tokens) / max(1, tokens))
        lengths.observe(tokens)
        if self._knows_siblings and (siblings.fresh or siblings.others):
            self._rank(siblings)

    def discard(self, group: str, waiting: Sequence[Entry]) -> None:
        for request in waiting:
            self._remove(request)
            if self._by_service is not None:
                self._by_service.discard(request)
        del self._groups[group]
        self._served.pop(group, None)

    def _rank(self, siblings: Siblings) -> None:
        """Ranks the waiting requests of a group again."""
        for request in siblings.others.values():
            self._by_rank.push(self._rank_of(request, siblings.lengths), request)
        if siblings.fresh:
            self._by_rank.push(self._rank_of(siblings.fresh[0], siblings.lengths), siblings)

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

    def _longest_unserved(self, by_service: StampedHeap[Entry]) -> Entry:
        """Takes out a request of the group that was served longest ago. Its other requests are ranked again only when
        it is their turn."""
        while True:
            (ranked,), request = by_service.first
            served = self._served.get(request.group, 0)
            if ranked == served:
                return by_service.pop()
            by_service.push((served,), request)


def _position(request: Entry) -> int:
    return request.position

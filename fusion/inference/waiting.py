"""Order the requests that wait for an engine's scheduler. Pure.

    preempted ones, the last in front ─► those of the lowest `Request.priority`, first come, first served ─► …

Invariant (property-tested): the first one is, of those that wait, the one preempted last, else the earliest of the
lowest priority. Nothing in the line is held back: the first one is admitted as soon as there is room.

Cost, for n waiting requests: `append`, `appendleft`, `popleft` O(log n)."""

import heapq
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Generic, Protocol, TypeVar


class Prioritized(Protocol):
    """The field of `Request` that the order depends on."""

    @property
    def priority(self) -> int: ...


class HasRequest(Protocol):
    """A sequence, of whatever scheduler."""

    @property
    def request(self) -> Prioritized: ...


Waiting = TypeVar("Waiting", bound=HasRequest)

PREEMPTED = -1
"""Comes before every priority."""


class WaitingLine(Generic[Waiting]):
    """Hold the waiting sequences in the order in which they are admitted."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Waiting]] = []
        """(priority, place among equals, sequence)"""
        self._front = self._back = 0
        """Place of the last one preempted, and of the last one that came"""
        self.held: list[Waiting] = []
        """Waiting sequences that are not in the line yet, as their KV is being read"""

    def append(self, seq: Waiting) -> None:
        """Add a sequence behind those of its priority."""
        self._back += 1
        heapq.heappush(self._heap, (seq.request.priority, self._back, seq))

    def appendleft(self, seq: Waiting) -> None:
        """Add a preempted sequence in front of all."""
        self._front -= 1
        heapq.heappush(self._heap, (PREEMPTED, self._front, seq))

    def release(self, chosen: Callable[[Waiting], bool]) -> list[Waiting]:
        """Append the held sequences for which ``chosen`` holds; return them in order."""
        released = sorted(filter(chosen, self.held), key=lambda seq: seq.request.priority)
        self.held = [seq for seq in self.held if not chosen(seq)]
        for seq in released:
            self.append(seq)
        return released

    @property
    def first(self) -> Waiting:
        return self._heap[0][2]

    def popleft(self) -> Waiting:
        return heapq.heappop(self._heap)[2]

    def remove(self, chosen: Callable[[Waiting], bool]) -> list[Waiting]:
        """Take out the sequences for which ``chosen`` holds; return them in order."""
        removed = [seq for seq in self if chosen(seq)]
        gone = set(map(id, removed))
        self.held = [seq for seq in self.held if id(seq) not in gone]
        self._heap = [item for item in self._heap if id(item[2]) not in gone]
        heapq.heapify(self._heap)
        return removed

    def __iter__(self) -> Iterator[Waiting]:
        return chain((seq for _, _, seq in sorted(self._heap, key=lambda one: one[:2])), self.held)

    def __len__(self) -> int:
        return len(self._heap) + len(self.held)

    def __bool__(self) -> bool:
        return bool(self._heap)

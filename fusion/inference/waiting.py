"""Order the requests that wait for an engine's scheduler. Pure.

    preempted ones, the last in front ─► those of the lowest `Request.priority`, first come, first served ─► …

Invariant (property-tested): the first one is, of those that wait, the one preempted last, else the earliest of the
lowest priority. An order holds nothing back: whoever is first is admitted as soon as there is room.

Cost, for n waiting requests: `append`, `appendleft`, `popleft` O(log n).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fusion.inference.sequence import Sequence

PREEMPTED = -1
"""Comes before every priority."""


class WaitingLine:
    """Holds the waiting sequences in the order in which they are admitted."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Sequence]] = []
        """(priority, place among equals, sequence)"""
        self._front = self._back = 0
        """Place of the last one preempted, and of the last one that came"""

    def append(self, seq: Sequence) -> None:
        """Adds a sequence behind those of its priority."""
        self._back += 1
        heapq.heappush(self._heap, (seq.request.priority, self._back, seq))

    def appendleft(self, seq: Sequence) -> None:
        """Adds a preempted sequence in front of all."""
        self._front -= 1
        heapq.heappush(self._heap, (PREEMPTED, self._front, seq))

    @property
    def first(self) -> Sequence:
        return self._heap[0][2]

    def popleft(self) -> Sequence:
        """Takes out the first one."""
        return heapq.heappop(self._heap)[2]

    def remove(self, chosen: Callable[[Sequence], bool]) -> list[Sequence]:
        """Takes out the sequences for which ``chosen`` holds; returns them in order."""
        removed = [seq for seq in self if chosen(seq)]
        gone = set(map(id, removed))
        self._heap = [one for one in self._heap if id(one[2]) not in gone]
        heapq.heapify(self._heap)
        return removed

    def __iter__(self) -> Iterator[Sequence]:
        return (seq for _, _, seq in sorted(self._heap, key=lambda one: one[:2]))

    def __len__(self) -> int:
        return len(self._heap)

"""Keep virtual time: a heap of events, each an action at a time.

    at(time, action) ─► heap ─► step: the earliest event; `now` is its time ─► action()

Events of one time are executed in the order in which they were added. The controller of a simulated run is plain code
that waits (`wait_for`, `advance_to`) while the events of the cards are executed.

Invariant (property-tested): `now` never decreases; an action is executed at its own time.

Cost, for n events that are not executed yet: `at` and `step` O(log n)."""

import heapq
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """``now``: virtual time in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Action]] = []
        self._added = 0

    def at(self, time: float, action: Action) -> None:
        """Execute ``action`` at ``time``, at the earliest now."""
        self._added += 1
        heapq.heappush(self._events, (max(time, self.now), self._added, action))

    def step(self) -> bool:
        """Execute the earliest event. Return whether there was one."""
        if not self._events:
            return False
        self.now, _, action = heapq.heappop(self._events)
        action()
        return True

    def wait_for(self, reached: Callable[[], bool]) -> None:
        """Execute events until ``reached`` returns true. It must happen."""
        while not reached():
            assert self.step(), "nothing happens any more"

    def advance_to(self, time: float) -> None:
        """Execute all events up to ``time``, which then is now, unless it is past."""
        while self._events and self._events[0][0] <= time:
            self.step()
        self.now = max(self.now, time)

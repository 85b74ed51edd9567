"""An emulated card takes as long for its steps as the card it stands for: it sleeps.

    stage begins ──┬─ step ─────────────┬─ step ──────────┬─ … ──┬─ stage ends     clock
                   │real│    sleep      │ real │   sleep  │      │
                   └─ modelled ─────────┴─ modelled ──────┴──────┘                 `due`, the modelled clock

Every step has a modelled duration; when its real work is done, the process sleeps until the step's modelled end, which
counts from the modelled end of the step before. So what a host's scheduler takes (a late wake-up, the lines between two
steps) is made up by the next sleep, up to CATCH_UP_S; what is later than that is lost and counted as overrun, and the
modelled clock is set to the real one.

Ranks that step together, with durations of their own, agree on the longest before the step and sleep until the same
modelled end: skew does not add up, and waiting for each other is no overrun.

Invariant of every stage: real seconds = modelled_s + waited_s + overrun_s, exactly.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fusion.telemetry import Metrics

CATCH_UP_S = 0.02
"""A step may end so late and the next one make it up."""

BETWEEN = "between"
"""The kind of time lost between two steps."""


class Pacer:
    """One process's modelled clock, for one thread. ``clock`` and ``sleep`` in seconds.

    ``modelled_s``, ``ideal_s``, ``overrun_s``: by kind of work; ``waited_s``: for other cards, or without work.
    """

    def __init__(
        self, clock: Callable[[], float] = time.perf_counter, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._due: float | None = None
        self._resting = False
        self.modelled_s: dict[str, float] = defaultdict(float)
        self.ideal_s: dict[str, float] = defaultdict(float)
        self.overrun_s: dict[str, float] = defaultdict(float)
        self.waited_s = 0.0

    @property
    def now(self) -> float:
        """The modelled clock."""
        return self._clock() if self._due is None else self._due

    @property
    def stepping(self) -> bool:
        """Whether the modelled clock runs: in a stage, or behind a step outside of any."""
        return self._due is not None

    @contextmanager
    def step(
        self,
        seconds: Mapping[str, float],
        ideal: Mapping[str, float] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Iterator[None]:
        """The block is a step of so many modelled seconds, by kind of work.

        Args:
            ideal: of that, what a die that never lacks work would take; default: all of it.
            group: the ranks that step together, all of which call this; None: they need not agree.
        """
        own = sum(seconds.values())
        longest = self._begin(own, group)
        assert self._due is not None
        yield
        self._due += longest
        for counts, parts in ((self.modelled_s, seconds), (self.ideal_s, seconds if ideal is None else ideal)):
            for kind, value in parts.items():
                counts[kind] += value
        self.waited_s += longest - own
        early = self._due - self._clock()
        if early > 0:
            self._sleep(early)
        self._lose(max(seconds, key=lambda kind: seconds[kind]), CATCH_UP_S)

    def until(self, then: float, kind: str) -> None:
        """What follows in the present step cannot begin before ``then`` of the modelled clock."""
        assert self._due is not None, "not in a step"
        if then > self._due:
            self.modelled_s[kind] += then - self._due
            self._due = then

    def rest(self) -> None:
        """There is nothing to do from now until the next step."""
        self._resting = True

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Inside, time that no step takes is overrun too, but for `rest` and for waiting."""
        self._due, self._resting = self._clock(), False
        try:
            yield
            self._wake()
            self._lose(BETWEEN, 0.0)
        finally:
            self._due = None

    def tell(self, metrics: Metrics, stage: str) -> None:
        """Adds what has been counted, and counts from zero again.

        pace/overrun, pace/overrun/<stage>: overrun / modelled wall (work and waiting), the mean over cards weighted by
        it; pace/stage_s_max/<stage>: that wall, of the card where it is longest; sums over cards are
        pace/modelled_s/<kind>, pace/ideal_s/<kind>, pace/overrun_s/<kind> and pace/waited_s.
        """
        lost = sum(self.overrun_s.values())
        wall = sum(self.modelled_s.values()) + self.waited_s
        if wall:
            metrics.add("pace/overrun", lost / wall, wall)
            metrics.add(f"pace/overrun/{stage}", lost / wall, wall)
            metrics.add(f"pace/stage_s_max/{stage}", wall, rule="max")
        for name, counts in (("modelled", self.modelled_s), ("ideal", self.ideal_s), ("overrun", self.overrun_s)):
            for kind, seconds in counts.items():
                metrics.add(f"pace/{name}_s/{kind}", seconds, rule="sum")
            counts.clear()
        metrics.add("pace/waited_s", self.waited_s, rule="sum")
        self.waited_s = 0.0

    def _begin(self, own: float, group: dist.ProcessGroup | None) -> float:
        """Sets the modelled clock to the step's start; returns the longest duration of the group."""
        if self._due is None:
            self._due = self._clock()
        self._wake()
        self._lose(BETWEEN, CATCH_UP_S)
        if group is None:
            return own
        agreed = torch.tensor([own, self._clock() - self._due], dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        longest, late = agreed.tolist()
        start = max(self._due, self._clock() - late)  # as late as the latest of them, which all make up together
        self.waited_s += start - self._due
        self._due = start
        return longest

    def _wake(self) -> None:
        assert self._due is not None
        if self._resting:
            now = max(self._due, self._clock())
            self.waited_s += now - self._due
            self._due, self._resting = now, False

    def _lose(self, kind: str, allowed_s: float) -> None:
        assert self._due is not None
        late = self._clock() - self._due
        if late > allowed_s:
            self.overrun_s[kind] += late
            self._due += late

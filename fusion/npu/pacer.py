"""Pace the steps of an emulated card to the duration that they have on the modelled card, by sleeping.

    stage begins ──┬─ step ─────────────┬─ step ──────────┬─ … ──┬─ stage ends     clock
                   │real│    sleep      │ real │   sleep  │      │
                   └─ modelled ─────────┴─ modelled ──────┴──────┘                 `due`, the modelled clock

Every step has a modelled duration; when its real work is done, the process sleeps until the step's modelled end, which
counts from the modelled end of the previous step. Delays of the host (a late wake-up, code between two steps) are
therefore absorbed by the next sleep, up to CATCH_UP_S; a longer delay is counted as overrun, and the modelled clock is
set to the real one.

Ranks that step together, with different durations, agree on the longest before the step and sleep until the same
modelled end: skew does not accumulate, and waiting for each other is not overrun.

Invariant of every stage: real seconds = modelled_s + waited_s + overrun_s, exactly."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist

from fusion.telemetry import Metrics

CATCH_UP_S = 0.02
"""Delay, in seconds, up to which a late step is absorbed by the next one."""

BETWEEN = "between"
"""The kind of overrun between two steps."""


class Pacer:
    """Keep the modelled clock of one process, for one thread. ``clock`` and ``sleep`` are in seconds.

    ``modelled_s``, ``ideal_s`` and ``overrun_s`` are by kind of work; ``waited_s`` was spent waiting for other cards
    or without work."""

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
        """Time of the modelled clock in seconds."""
        return self._clock() if self._due is None else self._due

    @property
    def stepping(self) -> bool:
        """Return whether the modelled clock runs: in a stage, or after a step outside of any stage."""
        return self._due is not None

    @contextmanager
    def step(
        self,
        seconds: Mapping[str, float],
        ideal: Mapping[str, float] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> Iterator[None]:
        """Pace the block as one step. ``seconds``: modelled seconds of the step by kind of work. ``ideal``: the part of
        it that a die which never waits for work would take; default: all of it. ``group``: the ranks that step
        together, all of which call this; None: no agreement is needed."""
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
        self._count_overrun(max(seconds, key=lambda kind: seconds[kind]), CATCH_UP_S)

    def until(self, then: float, kind: str) -> None:
        """Advance the modelled clock to ``then`` (if it is later) in the current step, as time of ``kind``."""
        assert self._due is not None, "not in a step"
        if then > self._due:
            self.modelled_s[kind] += then - self._due
            self._due = then

    def rest(self) -> None:
        """Count the time from now until the next step as waiting: there is no work."""
        self._resting = True

    @contextmanager
    def stage(self) -> Iterator[None]:
        """Pace the block as one stage: time outside of steps is overrun too, except for `rest` and waiting."""
        self._due, self._resting = self._clock(), False
        try:
            yield
            self._end_rest()
            self._count_overrun(BETWEEN, 0.0)
        finally:
            self._due = None

    def report(self, metrics: Metrics, stage: str) -> None:
        """Add the counts to ``metrics`` and reset them.

        pace/overrun, pace/overrun/<stage>: overrun / modelled wall time (work and waiting), the mean over cards
        weighted by it; pace/stage_s_max/<stage>: that wall time on the card where it is longest; sums over cards are
        pace/modelled_s/<kind>, pace/ideal_s/<kind>, pace/overrun_s/<kind> and pace/waited_s."""
        overrun = sum(self.overrun_s.values())
        wall = sum(self.modelled_s.values()) + self.waited_s
        if wall:
            metrics.add("pace/overrun", overrun / wall, wall)
            metrics.add(f"pace/overrun/{stage}", overrun / wall, wall)
            metrics.add(f"pace/stage_s_max/{stage}", wall, rule="max")
        for name, counts in (("modelled", self.modelled_s), ("ideal", self.ideal_s), ("overrun", self.overrun_s)):
            for kind, seconds in counts.items():
                metrics.add(f"pace/{name}_s/{kind}", seconds, rule="sum")
            counts.clear()
        metrics.add("pace/waited_s", self.waited_s, rule="sum")
        self.waited_s = 0.0

    def _begin(self, own: float, group: dist.ProcessGroup | None) -> float:
        """Set the modelled clock to the step's start; return the longest duration in the group."""
        if self._due is None:
            self._due = self._clock()
        self._end_rest()
        self._count_overrun(BETWEEN, CATCH_UP_S)
        if group is None:
            return own
        agreed = torch.tensor([own, self._clock() - self._due], dtype=torch.float64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=group)
        longest, late = agreed.tolist()
        start = max(self._due, self._clock() - late)  # the latest rank's start, so that all absorb the same delay
        self.waited_s += start - self._due
        self._due = start
        return longest

    def _end_rest(self) -> None:
        assert self._due is not None
        if self._resting:
            now = max(self._due, self._clock())
            self.waited_s += now - self._due
            self._due, self._resting = now, False

    def _count_overrun(self, kind: str, allowed_s: float) -> None:
        assert self._due is not None
        late = self._clock() - self._due
        if late > allowed_s:
            self.overrun_s[kind] += late
            self._due += late

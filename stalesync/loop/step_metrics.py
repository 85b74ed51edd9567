"""Accumulate the metrics, spans and memory of one step: one row of `metrics.jsonl`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain

from fusion.colocate import StageReport
from fusion.telemetry import MemoryLedger, Metrics, RunFolder, Span, Usage, wall_ns
from stalesync.policy.admission import Stage

TIMERS: Mapping[Stage, str] = {"switch": "switch", "generate": "gen", "stop": "gen", "score": "reward"}
"""Stage of a step → `timing_s/…` that its commands' seconds are added to; other stages are not timed here"""


class StepMetrics:
    def __init__(self, num_cards: int, folder: RunFolder):
        self.metrics = Metrics()
        self._memory, self._folder = MemoryLedger(), folder
        self._usage = Usage([f"card {rank}" for rank in range(num_cards)], wall_ns())
        self._waits: dict[str, bool] = {}
        """`timing_s/…` that waiting for samples is also added to → whether it applies now"""

    def begin_first_step(self) -> None:
        """Start the accounting of the cards' time: work before the first step is not counted in its usage."""
        self._usage.count(wall_ns())

    def take(self, reports: Sequence[StageReport]) -> None:
        for report in reports:
            self.metrics.merge(report.metrics)
            self._memory.merge(report.memory)
        self.add_spans(*[report.spans for report in reports])

    def add_spans(self, *spans: Sequence[Span]) -> None:
        """Add what cards did to the timeline and to their usage."""
        self._folder.log_spans(*spans)
        self._usage.add(chain.from_iterable(spans))

    def begin_wait(self, *, for_older: bool, in_tail: bool) -> None:
        """Begin to wait for samples. ``for_older``: the step has groups enough, but older ones must come first;
        ``in_tail``: few of its samples are still being generated."""
        self._waits = {"wait_older": for_older, "gen_tail": in_tail}

    def add_seconds(self, stage: Stage, seconds: float) -> None:
        """Add the seconds that executing a command of ``stage`` took."""
        if stage in TIMERS:
            self.metrics.add(f"timing_s/{TIMERS[stage]}", seconds)
        if stage != "generate":
            self._waits = {}
        for name, holds in self._waits.items():
            self.metrics.add(f"timing_s/{name}", seconds * holds)

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude metrics, memory and the cards' time of the block, such as an evaluation's, from the step's. No stage
        may be under way at its start. The timeline has its spans all the same."""
        metrics, memory, start_ns = self.metrics, self._memory, wall_ns()
        self.metrics, self._memory = Metrics(), MemoryLedger()
        try:
            yield
        finally:
            self.metrics, self._memory = metrics, memory
            self._usage.exclude(start_ns, wall_ns())

    def close(self, reported_until_ns: int, figures: Mapping[str, float]) -> dict[str, float]:
        """Return the step's row, with ``figures`` in it; the next step begins. ``reported_until_ns``: up to when the
        work of all cards has been reported (`wall_ns`)."""
        self.metrics.update(self._usage.count(reported_until_ns))
        self.metrics.update({**figures, **self._memory.metrics()})
        closed, self.metrics = self.metrics, Metrics()
        return closed.result()

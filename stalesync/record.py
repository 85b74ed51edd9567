"""What the stages of a step tell: figures, spans, memory. One row of `metrics.jsonl` in the making."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from fusion.colocate import StageReport
from fusion.telemetry import MemoryLedger, Metrics, RunFolder, Usage, wall_ns


class StepRecord:
    """``metrics``: of the step under way. ``cards``: how many there are."""

    def __init__(self, cards: int, folder: RunFolder):
        self.metrics = Metrics()
        self._memory, self._folder = MemoryLedger(), folder
        self._usage = Usage([f"card {rank}" for rank in range(cards)], wall_ns())

    def begin(self) -> None:
        """What cards did before belongs to no step."""
        self._usage.count(wall_ns())

    def take(self, reports: Sequence[StageReport]) -> None:
        """What cards tell of a stage."""
        for report in reports:
            self.metrics.merge(report.metrics)
            self._memory.merge(report.memory)
            self._folder.log_spans(report.spans)
            self._usage.add(report.spans)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is measured inside is nobody's step."""
        kept, self.metrics = self.metrics, Metrics()
        try:
            yield
        finally:
            self.metrics = kept

    def close(self, settled_ns: int, figures: Mapping[str, float]) -> dict[str, float]:
        """The step's row, with these figures beside; the next one begins.

        Args:
            settled_ns: up to when all cards have told what they did (`wall_ns`).
        """
        self.metrics.update(self._usage.count(settled_ns))
        self.metrics.update({**figures, **self._memory.metrics()})
        closed, self.metrics = self.metrics, Metrics()
        return closed.result()

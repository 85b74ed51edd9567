"""Score samples by a rule in virtual time, in batches as `stalesync/scoring/scoring.py`, whose scores come together.

    samples arrive ─► wait for the batch before ─► reported as generated ─► `reward.workers` processes ─► scored

Invariants (property-tested): each sample is reported as generated once and, `reward.latency_s` later or more, as scored
once; n samples take at least n × latency / workers; with twice the latency the last one is not scored earlier."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from fusion.rewards.batch_size import BatchSize
from stalesync.simulator.clock import Clock

Report = Callable[[Mapping[str, int], Sequence[str]], None]


class SimulatedRules:
    """``scoring_s``: seconds of a batch by its size; ``report``: receives generated samples, and ids of scored ones."""

    def __init__(self, scoring_s: Callable[[int], float], clock: Clock, report: Report) -> None:
        self._scoring_s, self._clock, self._report = scoring_s, clock, report
        self._waiting: deque[tuple[str, int]] = deque()
        self._batch_size, self._is_busy = BatchSize(), False

    def put(self, samples: Mapping[str, int]) -> None:
        """Receive samples that have arrived, response tokens by id."""
        self._waiting += samples.items()
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        batch = dict(self._waiting.popleft() for _ in range(min(self._batch_size.count, len(self._waiting))))
        self._is_busy = bool(batch)
        if batch:
            seconds = self._scoring_s(len(batch))
            self._report(batch, ())
            self._clock.at(self._clock.now + seconds, lambda: self._end([*batch], seconds))

    def _end(self, batch: Sequence[str], seconds: float) -> None:
        self._report({}, batch)
        self._batch_size.observe(len(batch), seconds)
        self._begin()

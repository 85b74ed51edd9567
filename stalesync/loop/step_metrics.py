"""Accumulate the metrics, spans and memory of one step, and those of its samples, with verl's names: one row of
`metrics.jsonl`."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import gt

import numpy as np

from fusion.colocate import StageReport
from fusion.rewards import reward_metrics
from fusion.telemetry import MemoryLedger, Metrics, RunFolder, Span, Usage, wall_ns
from fusion.training.algorithms.baseline import equal, equal_groups, number_groups
from stalesync.loop.sample_columns import SampleColumns
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


def add_sample_metrics(metrics: Metrics, samples: SampleColumns, *, by_group: bool) -> None:
    """Add rewards and lengths of samples that were trained, filtered or failed, and where rewards are compared
    ``by_group`` `frac_reward_zero_std` (TRL's name), the share of groups whose rewards are all equal."""
    metrics.update(reward_metrics(samples.rewards, samples.errors))
    scored = samples.without_errors
    if scored and by_group:
        dead = equal_groups(np.array(scored.rewards, dtype=np.float64), number_groups(scored.groups))
        metrics.add("frac_reward_zero_std", dead.mean(), len(dead))
    _add_terms(metrics, samples)
    if not samples:
        return
    metrics.spread("response_length", samples.sampled_tokens)
    if any(samples.observed_tokens):
        metrics.spread("observation_length", samples.observed_tokens)
    metrics.spread("prompt_length", samples.prompt_tokens)
    metrics.add("response_length/clip_ratio", sum(samples.cut) / len(samples))


def _add_terms(metrics: Metrics, samples: SampleColumns) -> None:
    """Add `critic/rewards/<name>/mean` and `…/std` (0 if all are equal) of the parts of a reward that has several,
    over the scored samples."""
    terms = [sample.outcome.terms for sample in samples.samples if sample.outcome.terms]
    for name in terms[0] if terms else ():
        values = np.array([parts[name] for parts in terms])
        metrics.add(f"critic/rewards/{name}/mean", sum(values.tolist()) / len(values), len(values))
        std = 0.0 if equal(float(values.min()), float(values.max())) else values.std()
        metrics.add(f"critic/rewards/{name}/std", std, len(values))


def add_staleness_metrics(metrics: Metrics, samples: SampleColumns, *, version: int, max_staleness: int) -> None:
    """Add the lag in versions of the oldest token of every sample trained in ``version``, and the number of samples
    with tokens of several versions. Leaves out samples whose reward failed. Raise AssertionError if a sample lags
    behind by more than ``max_staleness``."""
    scored = samples.without_errors
    lags = [version - oldest for oldest in scored.oldest]
    metrics.spread("staleness", lags)
    num_by_lag = Counter(lags)
    assert max(num_by_lag, default=0) <= max_staleness, (
        f"a sample {max(num_by_lag)} versions old was trained; the bound is {max_staleness}"
    )
    for lag in range(max_staleness + 1):
        metrics.add(f"staleness/lag_{lag}_count", num_by_lag[lag])
    metrics.add("staleness/mixed_versions_count", sum(map(gt, scored.newest, scored.oldest)))

"""The figures of a step's samples, by verl's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion.rewards import reward_metrics
from fusion.telemetry import Metrics
from stalesync.samples import ScoredSample


def tell_samples(metrics: Metrics, samples: Sequence[ScoredSample], longest: int) -> None:
    """Rewards and lengths of what was trained, filtered or failed; ``longest``: tokens at which a response is cut."""
    metrics.update(reward_metrics([sample.outcome for sample in samples]))
    if not samples:
        return
    metrics.spread("response_length", [sample.response_tokens for sample in samples])
    metrics.spread("prompt_length", [sample.prompt_tokens for sample in samples])
    cut = sum(sample.response_tokens >= longest for sample in samples)
    metrics.add("response_length/clip_ratio", cut / len(samples))


def tell_ages(metrics: Metrics, groups: Mapping[str, Sequence[ScoredSample]], version: int, bound: int) -> None:
    """How many versions the oldest token of every sample trained in ``version`` lags behind, and how many samples are
    of several versions.

    Raises:
        AssertionError: one lags behind more than ``bound``.
    """
    samples = [sample for members in groups.values() for sample in members if sample.outcome.error is None]
    lags = [version - sample.oldest for sample in samples]
    assert max(lags, default=0) <= bound, f"a sample {max(lags)} versions old was trained; the bound is {bound}"
    for lag in range(bound + 1):
        metrics.add(f"staleness/lag_{lag}_count", lags.count(lag))
    metrics.add("staleness/mixed_versions_count", sum(sample.newest > sample.oldest for sample in samples))

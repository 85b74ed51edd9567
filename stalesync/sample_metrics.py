"""Compute the metrics of a step's samples, with verl's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fusion.rewards import reward_metrics
from fusion.telemetry import Metrics
from stalesync.samples import Sample


def add_sample_metrics(metrics: Metrics, samples: Sequence[Sample], max_response_length: int) -> None:
    """Adds rewards and lengths of samples that were trained, filtered or failed. A response of
    ``max_response_length`` tokens counts as clipped."""
    metrics.update(reward_metrics([sample.outcome for sample in samples]))
    if not samples:
        return
    metrics.spread("response_length", [sample.response_tokens for sample in samples])
    metrics.spread("prompt_length", [sample.prompt_tokens for sample in samples])
    clipped = sum([sample.response_tokens >= max_response_length for sample in samples])
    metrics.add("response_length/clip_ratio", clipped / len(samples))


def add_staleness_metrics(
    metrics: Metrics, groups: Mapping[str, Sequence[Sample]], *, version: int, max_staleness: int
) -> None:
    """Adds the lag in versions of the oldest token of every sample trained in ``version``, and the number of samples
    with tokens of several versions.

    Raises:
        AssertionError: a sample lags behind by more than ``max_staleness``.
    """
    samples = [sample for members in groups.values() for sample in members if sample.outcome.error is None]
    lags = [version - sample.oldest for sample in samples]
    assert max(lags, default=0) <= max_staleness, (
        f"a sample {max(lags)} versions old was trained; the bound is {max_staleness}"
    )
    for lag in range(max_staleness + 1):
        metrics.add(f"staleness/lag_{lag}_count", lags.count(lag))
    metrics.add("staleness/mixed_versions_count", sum([sample.newest > sample.oldest for sample in samples]))

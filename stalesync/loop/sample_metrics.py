"""Compute the metrics of a step's samples, with verl's names."""

from collections import Counter
from operator import gt

import numpy as np

from fusion.rewards import reward_metrics
from fusion.telemetry import Metrics
from fusion.training.algorithms.baseline import equal, equal_groups, number_groups
from stalesync.loop.sample_columns import SampleColumns


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

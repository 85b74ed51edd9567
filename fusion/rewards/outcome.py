"""Define the input and outcome of a reward, and compute a batch's reward metrics."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ERRORS = ("raised", "timeout", "bad_type", "died", "too_long")
"""Rules: `raised`, `timeout`, `died` (the function killed its process). Rules and reward models: `bad_type` (the reward
is not a finite number). Reward models: `too_long` (the sample has more tokens than the model has positions)."""


@dataclass(frozen=True)
class RewardSample:
    """Holds one response to score. `fields` (picklable) are the other columns of the data row."""

    prompt: str
    response: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardOutcome:
    """Holds the result of one sample: a finite `reward`, or None with `error` one of `ERRORS` and `detail` its
    traceback or message; `seconds` of wall time were spent on it."""

    reward: float | None
    error: str | None = None
    detail: str = ""
    seconds: float = 0.0


def reward_metrics(outcomes: Sequence[RewardOutcome]) -> dict[str, float]:
    """Compute `critic/rewards/{mean,max,min,std}` over the scored samples (absent where there are none; std is the
    population's) and the counts `reward/failed`, `reward/failed_raised`, `…_timeout`, `…_bad_type`, `…_died`,
    `…_too_long`."""
    rewards = [o.reward for o in outcomes if o.reward is not None]
    metrics: dict[str, float] = {"reward/failed": float(len(outcomes) - len(rewards))}
    for error in ERRORS:
        metrics[f"reward/failed_{error}"] = float(sum(o.error == error for o in outcomes))
    if rewards:
        mean = sum(rewards) / len(rewards)
        metrics["critic/rewards/mean"] = mean
        metrics["critic/rewards/max"] = max(rewards)
        metrics["critic/rewards/min"] = min(rewards)
        metrics["critic/rewards/std"] = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return metrics

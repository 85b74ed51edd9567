"""What goes into a reward and what comes out of it, and the figures of a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ERRORS = ("raised", "timeout", "bad_type", "died", "too_long")
"""Of rules: the function raised, ran out of time, killed its process. Of either: the reward is no finite number. Of a
reward model: the sample has more tokens than it has positions."""


@dataclass(frozen=True)
class RewardSample:
    """One response to be scored. `fields` (picklable) are the other columns of the data row."""

    prompt: str
    response: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RewardOutcome:
    """`reward` is a finite float, or None with `error` one of `ERRORS` and `detail` its traceback or message."""

    reward: float | None
    error: str | None = None
    detail: str = ""
    seconds: float = 0.0


def reward_metrics(outcomes: Sequence[RewardOutcome]) -> dict[str, float]:
    """`critic/rewards/{mean,max,min,std}` over what was scored (absent where nothing was; std is the population's), and
    counts `reward/failed`, `reward/failed_raised`, `…_timeout`, `…_bad_type`, `…_died`, `…_too_long`."""
    rewards = [o.reward for o in outcomes if o.reward is not None]
    figures: dict[str, float] = {"reward/failed": float(len(outcomes) - len(rewards))}
    for error in ERRORS:
        figures[f"reward/failed_{error}"] = float(sum(o.error == error for o in outcomes))
    if rewards:
        mean = sum(rewards) / len(rewards)
        figures["critic/rewards/mean"] = mean
        figures["critic/rewards/max"] = max(rewards)
        figures["critic/rewards/min"] = min(rewards)
        figures["critic/rewards/std"] = math.sqrt(sum((r - mean) ** 2 for r in rewards) / len(rewards))
    return figures

"""Define the input and outcome of a reward, and compute a batch's reward metrics. Both are plain data, not changed
after it was created (a frozen dataclass would take twice as long to create, and there are some for every sample)."""

import math
import numbers
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

ERRORS = ("raised", "timeout", "memory", "bad_type", "died", "too_long", "lost")
"""Rules: `raised`, `timeout`, `memory` (it exceeded `reward.memory_mib`), `died` (the function killed its process).
Rules and reward models: `bad_type` (the reward is not a finite number of float32). Reward models: `too_long` (the
sample has more tokens than the model has positions). Both: `lost` (the queue has lost the sample, because its stored
bytes are damaged or gone)."""
MAX_REWARD = 3.4028234663852886e38
"""The largest float32: advantages and losses are computed in it."""


def usable(reward: float) -> bool:
    """Return whether a reward can be trained on: a finite number in the range of float32."""
    return abs(reward) <= MAX_REWARD  # not true of NaN


def finite(value: object) -> float | None:
    """Return a number as a float that is `usable`; None for everything else."""
    if type(value) is not float and not isinstance(value, numbers.Real):  # the latter takes ten times as long
        return None
    try:
        number = float(value)
    except OverflowError:  # a whole number beyond the range of a float
        return None
    return number if usable(number) else None


@dataclass(slots=True)
class RewardSample:
    """Hold one response to score. `fields` (picklable) are the other columns of the data row, `others` the other
    responses of its group, `prefill` the end of the prompt as the model reads it that belongs to the response."""

    prompt: str
    response: str
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)
    others: Sequence[str] = ()
    prefill: str = ""


@dataclass(slots=True)
class RewardOutcome:
    """Hold the result of one sample: a `usable` `reward`, or None with `error` one of `ERRORS` and `detail` its
    traceback or message; `seconds` of wall time were spent on it. `terms`: the parts of the reward by name, without
    their weights, where it has several (`reward.terms`)."""

    reward: float | None
    error: str | None = None
    detail: str = ""
    seconds: float = 0.0
    terms: dict[str, float] | None = None


def reward_metrics(rewards: Sequence[float | None], errors: Sequence[str | None]) -> dict[str, float]:
    """Compute, from the rewards and errors of outcomes, `critic/rewards/{mean,max,min,std}` over the scored samples
    (absent where there are none; std is the population's), the counts `reward/failed`, `reward/failed_raised`,
    `…_timeout`, `…_memory`, `…_bad_type`, `…_died`, `…_too_long`, `…_lost`, and `reward/failed_share` of all samples,
    where there are any."""
    scored = [reward for reward in rewards if reward is not None]
    metrics: dict[str, float] = {"reward/failed": float(len(rewards) - len(scored))}
    num_by_error = Counter(filter(None, errors))
    for error in ERRORS:
        metrics[f"reward/failed_{error}"] = float(num_by_error[error])
    if rewards:
        metrics["reward/failed_share"] = metrics["reward/failed"] / len(rewards)
    if scored:
        mean = sum(scored) / len(scored)
        metrics["critic/rewards/mean"] = mean
        metrics["critic/rewards/max"] = max(scored)
        metrics["critic/rewards/min"] = min(scored)
        metrics["critic/rewards/std"] = math.sqrt(sum([(r - mean) ** 2 for r in scored]) / len(scored))
    return metrics

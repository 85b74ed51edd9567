"""Name the metrics of an evaluation, as verl names those of a validation. Pure.

verl (`RayPPOTrainer._val_metrics_update`, `process_validation_metrics`) writes `<section>/<data source>/<variable>/
<statistic>@<n>`, with the section `val-core` for the reward's statistics at the largest n and `val-aux` for all others.
Here the data source is the file's name and the variables are `reward` and `response_length`. `mean@n` is verl's.
`pass@n` is this project's: verl has `best@n/mean`, a bootstrap of the same quantity for rewards of 0 and 1.
"""

from __future__ import annotations

from typing import Literal

Goal = Literal["max", "min"]


def reward_mean(file: str, samples: int) -> str:
    """Return the name of the mean reward over ``samples`` answers to each prompt."""
    return f"val-core/{file}/reward/mean@{samples}"


def pass_at(file: str, k: int, samples: int) -> str:
    """Return the name of pass@``k``, estimated from ``samples`` answers to each prompt."""
    return f"{'val-core' if k == samples else 'val-aux'}/{file}/reward/pass@{k}"


def length_mean(file: str, samples: int) -> str:
    """Return the name of the mean number of tokens of an answer."""
    return f"val-aux/{file}/response_length/mean@{samples}"


def term_mean(file: str, statistic: str) -> str:
    """Return the name of the mean of a term of the reward, ``statistic``: `reward/<term>/mean@<samples>`."""
    return f"val-aux/{file}/{statistic}"


def failed(file: str) -> str:
    """Return the name of the number of answers that could not be scored."""
    return f"val-aux/{file}/reward/failed"


def dropped(file: str) -> str:
    """Return the name of the number of rows of a file that are not evaluated."""
    return f"val-aux/{file}/rows/dropped"


def bound(metric: str, end: Literal["low", "high"]) -> str:
    """Return the name of an end of a metric's confidence interval."""
    _, rest = metric.split("/", 1)
    return f"val-aux/{rest}/{end}"


def logged_k(samples: int) -> list[int]:
    """Return the k of which pass@k is a metric: the powers of two below ``samples``, and ``samples``, as in verl."""
    return [1 << power for power in range((samples - 1).bit_length())] + [samples]


def goals(file: str, samples: int) -> dict[str, Goal]:
    """Map the metrics of a file by which a checkpoint can be the best to whether more or less is better."""
    better: dict[str, Goal] = {reward_mean(file, samples): "max"}
    better |= {pass_at(file, k, samples): "max" for k in logged_k(samples)}
    return better | {length_mean(file, samples): "min"}

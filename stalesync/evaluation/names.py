"""Name the metrics of an evaluation, as verl names those of a validation. Pure.

verl (`RayPPOTrainer._val_metrics_update`, `process_validation_metrics`) writes `<section>/<data source>/<variable>/
<statistic>@<n>`, with the section `val-core` for the reward's statistics at the largest n and `val-aux` for all others.
Here the data source is the file's name and the variables are `reward` and `response_length`. `mean@n` is verl's.
`pass@n` is this project's: verl has `best@n/mean`, a bootstrap of the same quantity for rewards of 0 and 1."""

from typing import Literal

Goal = Literal["max", "min"]


def logged_statistics(samples: int) -> list[str]:
    """Return the statistics of a file that are metrics, of ``samples`` answers to each prompt: of pass@k those of the
    powers of two below ``samples``, and of ``samples``, as in verl."""
    logged_k = [1 << power for power in range((samples - 1).bit_length())] + [samples]
    return [f"reward/mean@{samples}", *(f"reward/pass@{k}" for k in logged_k), f"response_length/mean@{samples}"]


def metric_of(file: str, statistic: str, samples: int) -> str:
    """Return the name of the metric of a statistic, of ``samples`` answers to each prompt."""
    is_core = statistic in (f"reward/mean@{samples}", f"reward/pass@{samples}")
    return f"{'val-core' if is_core else 'val-aux'}/{file}/{statistic}"


def goals(file: str, samples: int) -> dict[str, Goal]:
    """Map the metrics of a file by which a checkpoint can be the best to whether more or less is better."""
    return {
        metric_of(file, statistic, samples): "max" if statistic.startswith("reward/") else "min"
        for statistic in logged_statistics(samples)
    }

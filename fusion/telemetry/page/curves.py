"""Turn rows of metrics.jsonl into curves over one axis of steps, in bounded size. Pure.

Invariants:
1. Up to ``max_points`` rows, every value of a curve is the row's, to `DIGITS` significant digits.
2. Above that, a point is the mean of ``every`` consecutive rows, and there are at most ``max_points``.
3. A value that a row lacks, or that is not finite, is None: a gap in the curve."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from fusion.telemetry.validation import is_finite

MAX_POINTS = 1000
"""Maximum number of points of a curve: more than a screen has room for."""
DIGITS = 6
"""Significant digits of a value."""
TIMER = ("timing_s/step", "perf/time_per_step")
"""Metrics of a step's duration; the first one that exists is used."""


def curves(rows: Sequence[Mapping[str, Any]], max_points: int = MAX_POINTS) -> dict[str, Any]:
    """Return `step` and `wall_s` (seconds of all steps up to this one), the axes; `every`, the number of rows of a
    point; and `metrics`: values by name, as many as there are steps."""
    every = max(1, -(-len(rows) // max_points))
    chunks = [rows[start : start + every] for start in range(0, len(rows), every)]
    names = sorted(
        {name for row in rows for name, value in row.items() if name != "step" and number(value) is not None}
    )
    return {
        "every": every,
        "step": [number(chunk[-1].get("step")) for chunk in chunks],
        "wall_s": [short(total) for total in accumulate(sum(map(step_seconds, chunk)) for chunk in chunks)],
        "metrics": {name: [_mean([row.get(name) for row in chunk]) for chunk in chunks] for name in names},
    }


def number(value: Any) -> float | None:
    """Return a finite number as it is, and anything else as None."""
    return value if is_finite(value) else None


def short(value: float) -> float:
    """Round to `DIGITS` significant digits, a whole number to itself without a fraction."""
    rounded = float(f"{value:.{DIGITS}g}")
    return int(value) if float(value).is_integer() and abs(value) < 2**53 else rounded


def step_seconds(row: Mapping[str, Any]) -> float:
    """Return the duration of a step; 0 if it was not recorded."""
    return next((seconds for name in TIMER if (seconds := number(row.get(name)))), 0.0)


def _mean(values: Sequence[Any]) -> float | None:
    numbers = [value for value in map(number, values) if value is not None]
    return short(sum(numbers) / len(numbers)) if numbers else None

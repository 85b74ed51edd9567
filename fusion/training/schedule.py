"""Compute the learning rate as a pure function of the step.

Invariants: never above `lr` and never below 0; rises linearly during the warm-up and reaches `lr` on its last step;
then `constant` stays at `lr`, and `cosine` decreases to 0 at `total_steps`.
"""

from __future__ import annotations

import math


def learning_rate(
    step: int, lr: float, schedule: str = "constant", warmup_steps: int = 0, total_steps: int | None = None
) -> float:
    """Return the rate of optimizer step ``step`` (from 0). ``total_steps``: the end of `cosine`, which requires it.

    Raises:
        ValueError: an unknown schedule, or `cosine` without the number of steps.
    """
    if step < warmup_steps:
        return lr * (step + 1) / warmup_steps
    if schedule == "constant":
        return lr
    if schedule != "cosine":
        raise ValueError(f"training.schedule={schedule!r}: expected constant or cosine")
    if total_steps is None:
        raise ValueError("training.schedule='cosine' needs the number of optimizer steps of the run")
    span = max(1, total_steps - warmup_steps)
    progress = min(1.0, (step - warmup_steps) / span)
    return lr * 0.5 * (1 + math.cos(math.pi * progress))

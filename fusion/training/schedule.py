"""Compute the learning rate as a pure function of the step.

Invariants: never above `lr` and never below 0; rises linearly during the warm-up and reaches `lr` on its last step;
then `constant` stays at `lr`, and `cosine` decreases to 0 at `total_steps`.

A run that resumes under the same settings continues its schedule to the bit. Where the rate, the warm-up or the number
of steps has changed, `cosine` decays from the rate of the last step to 0 at the new end, without a jump; from `lr` if
that has changed."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Schedule:
    """The learning rate of every optimizer step. ``schedule``: `constant` or `cosine`, which requires ``total_steps``.
    ``start``, ``start_rate``: from which step and rate `cosine` decays, since a resume; None: from ``lr``, after the
    warm-up. ``end``: where it reaches 0 since then; None: at ``total_steps``."""

    lr: float
    schedule: str = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    start: int | None = None
    start_rate: float | None = None
    end: int | None = None

    def rate(self, step: int) -> float:
        """Return the rate of optimizer step ``step`` (from 0).
        Raise ValueError: an unknown schedule, or `cosine` without the number of steps."""
        start, end = self.warmup_steps if self.start is None else self.start, self.end or self.total_steps
        peak = self.lr if self.start_rate is None else self.start_rate
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.schedule == "constant":
            return self.lr
        if self.schedule != "cosine":
            raise ValueError(f"training.schedule={self.schedule!r}: expected constant or cosine")
        if end is None:
            raise ValueError("training.schedule='cosine' needs the number of optimizer steps of the run")
        span = max(1, end - start)
        progress = min(1.0, (step - start) / span)
        return peak * 0.5 * (1 + math.cos(math.pi * progress))

    def resumed(self, saved: "Schedule", steps: int, steps_left: int | None = None) -> "Schedule":
        """Return the schedule of a run with these settings that resumes after ``steps`` steps of ``saved``.
        ``steps_left``: optimizer steps until its end; None: up to ``total_steps``."""
        if replace(saved, start=None, start_rate=None, end=None) == self:
            return saved
        if self.schedule != "cosine" or steps <= self.warmup_steps:
            return self
        end = None if steps_left is None else steps + steps_left
        if self.lr != saved.lr:
            return replace(self, start=steps, start_rate=self.lr, end=end)
        return replace(self, start=steps - 1, start_rate=saved.rate(steps - 1), end=end)

    def describe(self) -> str:
        """Return from where the rate decays since a resume; "" if there was none, or none that changed it."""
        if self.start is None:
            return ""
        return (
            f"training.schedule=cosine: the learning rate decays from {self.start_rate:.3g} at optimizer step "
            f"{self.start} to 0 at step {self.end or self.total_steps}; training.lr states another rate"
        )

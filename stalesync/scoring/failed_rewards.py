"""Decide whether too many rewards fail for a run to continue. Pure.

Invariants (tests/stalesync/scoring/test_failed_rewards.py):
1. The share of failed rewards is that of the last `WINDOW` samples. It is judged after each sample from the
   `MIN_SAMPLES`th on, and at the end of the run for any number: a few failures in a small step never end a run.
2. A run in which every reward fails is ended at the `MIN_SAMPLES`th sample; one whose share is never above the bound is
   not ended.
3. Verdicts do not depend on how the samples are divided into calls."""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from fusion.rewards.outcome import RewardOutcome

WINDOW = 256
MIN_SAMPLES = 64


@dataclass(frozen=True)
class TooManyFailed:
    """The verdict that a run must end. ``num_by_error``: failed among the last ``num_samples``; ``first``: the first
    failure since the start."""

    max_share: float
    num_samples: int
    num_by_error: dict[str, int]
    first: RewardOutcome

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {error}" for error, count in self.num_by_error.items())
        return (
            f"reward.max_failed_share={self.max_share:g}: {sum(self.num_by_error.values())} of the last "
            f"{self.num_samples} samples could not be scored ({kinds}). The first failure ({self.first.error}):\n"
            f"{self.first.detail}"
        )


class FailedRewards:
    """Track the outcomes of a run's samples, those of evaluations included."""

    def __init__(self, max_share: float):
        self.max_share = max_share
        self._errors: deque[str | None] = deque(maxlen=WINDOW)
        self._num_by_error: Counter[str] = Counter()
        self._first: RewardOutcome | None = None

    def observe(self, outcomes: Sequence[RewardOutcome]) -> TooManyFailed | None:
        """Record outcomes; return the verdict if the run must end."""
        errors = [outcome.error for outcome in outcomes]
        if self._first is None and not any(errors):
            self._errors.extend(errors)
            return None
        verdict = None
        for outcome in outcomes:
            self._add(outcome)
            if verdict is None and len(self._errors) >= MIN_SAMPLES:
                verdict = self.judge()
        return verdict

    def judge(self) -> TooManyFailed | None:
        """Return the verdict on the samples so far, however few."""
        if self._first is None or self._num_by_error.total() <= self.max_share * len(self._errors):
            return None
        return TooManyFailed(self.max_share, len(self._errors), dict(+self._num_by_error), self._first)

    def _add(self, outcome: RewardOutcome) -> None:
        oldest = self._errors[0] if len(self._errors) == WINDOW else None
        if oldest is not None:
            self._num_by_error[oldest] -= 1
        self._errors.append(outcome.error)
        if outcome.error is not None:
            self._num_by_error[outcome.error] += 1
            self._first = self._first or outcome

"""Bound the draft of each sequence by a window that grows while its drafts are right. Pure.

    window   2 ─ all of a draft was right ─► + 2, at most 32 ─ a token was wrong ─► 2

Additive increase, as HistoSpec of RhymeRL (arXiv 2508.18588). It measures no time, so that what is drafted depends only
on what was sampled, but it never refuses to draft where that does not pay, as `budget` does.

Invariants (property-tested): a window is 2 to 32; what `choose` takes are the first tokens in the order of `budget`, at
most `max_tokens`.
"""

from __future__ import annotations

import numpy as np

from fusion.inference.verification import StepCost
from fusion.rollout.drafts.budget import Acceptance, in_order

FIRST, STEP, MAX_WINDOW = 2, 2, 32


class WindowBudget:
    """Implement what `TextDrafter` asks of a `DraftBudget`."""

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._windows: dict[str, int] = {}
        """Of requests whose drafts were verified"""

    def max_depth(self, request: str) -> int:
        """Return how many tokens behind a sequence may be drafted."""
        return self._windows.get(request, FIRST)

    def observe_draft(self, request: str, drafted: int, kept: int) -> None:
        """Record that ``kept`` tokens of a draft that was ``drafted`` tokens deep were right."""
        window = self.max_depth(request)
        self._windows[request] = min(window + STEP, MAX_WINDOW) if kept == drafted else FIRST

    def end(self, request: str) -> None:
        """Forget a request."""
        self._windows.pop(request, None)

    def observe_step(self, step: StepCost) -> None:
        """Ignore costs."""

    def skips(self, num_sequences: int) -> bool:
        return False

    def choose(
        self,
        owners: np.ndarray,
        probabilities: np.ndarray,
        num_sequences: int,
        *,
        max_tokens: int = 1 << 30,
        urgent: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return which drafted tokens are verified, bool [n], as `DraftBudget.choose`."""
        chosen = np.zeros(len(owners), bool)
        chosen[in_order(probabilities, urgent)[:max_tokens]] = True
        return chosen

"""Bound the seconds that a run loses by drafting. Pure.

    each step: its seconds, and those that drafting has added to it, less those that its accepted tokens have saved
      └─► may another step look for drafts? Only while the sum of what was lost is a small share of the run

A step that looks for drafts in vain adds what the look-up took; one that verifies them adds what it took longer than a
step without, less the time in which as many tokens would have been decoded one by one. So the longer attempts take
without gain, the rarer they get; and where drafts pay, their steps offset each other and nothing is held back.

Invariants (property-tested, whatever each step costs): if no step drafts while `allows` is False, the run has lost at
most `MAX_LOSS` of its seconds, the seconds of `CREDIT_STEPS` of its longest steps, and those of one attempt; and if
attempts lose nothing, `allows` is always True. What was saved offsets later losses only up to `MAX_LOSS` of the run.
"""

from __future__ import annotations

MAX_LOSS = 0.02
"""Share of the run's seconds that may be lost; with the first attempts and what no decision avoids, under 0.05"""

CREDIT_STEPS = 4
"""Mean steps whose seconds may be lost besides, so that a run can begin to measure"""


class DraftLosses:
    """Sum what drafting has cost a run. ``seconds``: of all its steps; ``lost``: of these by drafting, negative: saved
    by it."""

    def __init__(self) -> None:
        self.seconds, self.lost = 0.0, 0.0
        self._num_steps = 0

    @property
    def allows(self) -> bool:
        """Whether the next step may look for drafts."""
        credit = CREDIT_STEPS / self._num_steps if self._num_steps else 0.0
        return self.lost <= (MAX_LOSS + credit) * self.seconds

    def observe(self, seconds: float, lost: float) -> None:
        """Record a step: its seconds, and by how many drafting has made it longer (negative: shorter)."""
        self.seconds += seconds
        self._num_steps += 1
        self.lost = max(self.lost + lost, -MAX_LOSS * self.seconds)

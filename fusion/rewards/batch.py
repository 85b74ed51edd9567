"""Track the samples of one call of a pool. Pure.

Invariants (tests/rewards/test_reward_batches.py): an index is taken once, unless it is put back into ``waiting``; one
of ``alone`` is taken by itself."""

from collections import deque
from collections.abc import Sequence

from fusion.rewards.outcome import RewardOutcome, RewardSample


class RewardBatch:
    """The indices that wait, the outcomes, the number without one. ``alone``: indices that a reward that scores a batch
    gets one by one."""

    def __init__(self, samples: Sequence[RewardSample]) -> None:
        self.samples = samples
        self.waiting = deque(range(len(samples)))
        self.outcomes: list[RewardOutcome | None] = [None] * len(samples)
        self.num_open = len(samples)
        self.alone: set[int] = set()

    def take(self, limit: int, share: int) -> list[int]:
        """Remove and return the next indices that wait: ``share``, at most ``limit``; one of ``alone`` by itself."""
        count = min(limit, share, len(self.waiting))
        if count and self.waiting[0] in self.alone:
            count = 1
        indices: list[int] = []
        while len(indices) < count and not (indices and self.waiting[0] in self.alone):
            indices.append(self.waiting.popleft())
        return indices

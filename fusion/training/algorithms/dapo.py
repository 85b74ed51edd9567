"""DAPO: GRPO for long reasoning (arXiv 2503.14476, section 3).

Clip-higher is `clip_high` > `clip_low` (0.28 and 0.2 in the paper); groups without a learning signal are resampled
(`filter_rule`); the loss is averaged over tokens; responses near the limit lose up to 1 of their reward. Its removal of
the KL is `kl_coef=0`.
"""

from __future__ import annotations

from collections.abc import Sequence

from fusion.training.algorithms.grpo import GRPO
from fusion.training.algorithms.interface import Reward, failed

DYNAMIC_SAMPLING = "dynamic_sampling"


class DAPO(GRPO):
    name = "dapo"
    overlong_share = 4096 / 20480
    """Section 4.1: a buffer of 4096 tokens, 20480 at most."""

    def filter_rule(self, rewards: Sequence[Reward]) -> str | None:
        """Dynamic sampling (section 3.2): a group whose rewards are all equal has no advantages. Those that failed do
        not count; a group without any other is not for this rule."""
        known = [reward for reward in rewards if not failed(reward)]
        return DYNAMIC_SAMPLING if known and min(known) == max(known) else None  # type: ignore[type-var]

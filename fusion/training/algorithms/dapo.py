"""DAPO: GRPO for long reasoning (arXiv 2503.14476, section 3).

Clip-higher is `clip_high` > `clip_low` (0.28 and 0.2 in the paper); groups without a learning signal are resampled
(`filter_rule`); the loss is averaged over tokens; responses near the length limit are penalised by up to 1. The paper's
removal of the KL term is `kl_coef=0`."""

from collections.abc import Sequence

from fusion.training.algorithms.baseline import equal
from fusion.training.algorithms.grpo import GRPO
from fusion.training.algorithms.interface import Reward, failed

DYNAMIC_SAMPLING = "dynamic_sampling"


class DAPO(GRPO):
    name = "dapo"
    filters = True
    overlong_share = 4096 / 20480
    """Section 4.1: a buffer of 4096 tokens for responses of at most 20480."""

    def filter_rule(self, rewards: Sequence[Reward]) -> str | None:
        """Exclude groups whose rewards are all equal (`baseline.equal`), as their advantages are 0 (dynamic sampling,
        section 3.2). Failed rewards do not count; a group whose rewards all failed is not excluded by this rule."""
        scored = [reward for reward in rewards if reward is not None and not failed(reward)]
        return DYNAMIC_SAMPLING if scored and equal(min(scored), max(scored)) else None

"""REINFORCE++: no group baseline; advantages are normalised over the global batch (arXiv 2501.03262).

The paper adds the KL to the reward token by token. Here an advantage is one number per sample, so `kl_in=reward`
subtracts the KL's sum over the tokens, and mean and standard deviation are over samples.
"""

from __future__ import annotations

import torch

from fusion.training.algorithms.interface import EPSILON, Algorithm


class ReinforcePlusPlus(Algorithm):
    name = "reinforce_plus_plus"

    def estimate(self, rewards_B: torch.Tensor, groups: list[list[int]], advantages_B: torch.Tensor) -> None:
        """Subtract the mean of the step's samples from each reward and divide by their standard deviation (with n - 1).
        Rewards that are all equal give zeros."""
        scored = [index for members in groups for index in members]
        values = rewards_B[scored]
        if scored and values.min() < values.max():
            advantages_B[scored] = (values - values.mean()) / (values.std() + EPSILON)

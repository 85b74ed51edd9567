"""REINFORCE++: no baseline of a group; advantages are normalised over the global batch (arXiv 2501.03262).

The paper puts the KL into the reward token by token; here, as advantages are one number a sample, `kl_in=reward`
subtracts its sum, and mean and standard deviation are over samples.
"""

from __future__ import annotations

import torch

from fusion.training.algorithms.interface import EPSILON, Algorithm


class ReinforcePlusPlus(Algorithm):
    name = "reinforce_plus_plus"

    def estimate(self, rewards_B: torch.Tensor, groups: list[list[int]], advantages_B: torch.Tensor) -> None:
        """A reward minus the mean of the step's samples, divided by their standard deviation (of a sample: n - 1).
        Rewards that are all equal give zeros."""
        scored = [index for members in groups for index in members]
        values = rewards_B[scored]
        if scored and values.min() < values.max():
            advantages_B[scored] = (values - values.mean()) / (values.std() + EPSILON)

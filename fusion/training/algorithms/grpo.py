"""GRPO: the baseline of a response is the mean of its group, the responses to the same prompt (DeepSeekMath, arXiv
2402.03300, section 4.1).

The loss is averaged over tokens; the paper's average is `loss_aggregation=sequence_mean`. The paper's KL to the
reference is `kl_in=loss`.
"""

from __future__ import annotations

import torch

from fusion.training.algorithms.interface import EPSILON, Algorithm


class GRPO(Algorithm):
    name = "grpo"

    def estimate(self, rewards_B: torch.Tensor, groups: list[list[int]], advantages_B: torch.Tensor) -> None:
        """Subtract the mean of the group from each reward and divide by the group's standard deviation (with n - 1)
        unless the config disables it. A group whose rewards are all equal gives zeros."""
        for members in groups:
            values = rewards_B[members]
            if values.min() == values.max():
                continue
            centred = values - values.mean()
            normalize = self.config.normalize_advantages
            advantages_B[members] = centred / (values.std() + EPSILON) if normalize else centred

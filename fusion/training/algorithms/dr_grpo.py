"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783, section 3.1-3.2).

The loss is divided by a constant instead of the response's length, which penalised long wrong answers less. Advantages
are not divided by the standard deviation of the group's rewards, which gave more weight to questions that are too easy
or too hard.
"""

from __future__ import annotations

import torch

from fusion.training.algorithms.interface import Algorithm


class DrGRPO(Algorithm):
    name = "dr_grpo"
    aggregation = "constant"

    def estimate(self, rewards_B: torch.Tensor, groups: list[list[int]], advantages_B: torch.Tensor) -> None:
        """Subtract the mean of the group from each reward."""
        for members in groups:
            advantages_B[members] = rewards_B[members] - rewards_B[members].mean()

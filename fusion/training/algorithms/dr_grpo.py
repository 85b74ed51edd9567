"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783, section 3.1-3.2).

A response's length does not divide its loss (long wrong answers were punished less), a constant does; the spread of a
group's rewards does not divide its advantages (questions too easy or too hard weighed more).
"""

from __future__ import annotations

import torch

from fusion.training.algorithms.interface import Algorithm


class DrGRPO(Algorithm):
    name = "dr_grpo"
    aggregation = "constant"

    def estimate(self, rewards_B: torch.Tensor, groups: list[list[int]], advantages_B: torch.Tensor) -> None:
        """A reward minus the mean of its group."""
        for members in groups:
            advantages_B[members] = rewards_B[members] - rewards_B[members].mean()

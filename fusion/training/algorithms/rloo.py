"""RLOO: REINFORCE with the mean of the prompt's other responses as baseline (arXiv 2402.14740; Kool et al.,
"Buy 4 REINFORCE samples, get a baseline for free!", 2019).

A response is one action, so the losses of its tokens are summed; all sums are divided by the same constant. The paper
trains on-policy; here the ratio is clipped as in PPO, which has no effect on-policy.
"""

from __future__ import annotations

import torch

from fusion.training.algorithms.interface import Algorithm


class RLOO(Algorithm):
    name = "rloo"
    aggregation = "constant"

    def estimate(self, rewards_B: torch.Tensor, groups: list[list[int]], advantages_B: torch.Tensor) -> None:
        """Subtract the mean of the other rewards of the group, which equals n / (n - 1) times the difference from the
        mean of all n. A reward without others gives zero."""
        for members in groups:
            num_others = len(members) - 1
            if num_others:
                values = rewards_B[members]
                advantages_B[members] = (values - values.mean()) * len(members) / num_others

"""RLOO: REINFORCE whose baseline is the mean of a prompt's other responses (arXiv 2402.14740; Kool et al.,
"Buy 4 REINFORCE samples, get a baseline for free!", 2019).

A response is one action, so its tokens' losses add up: all sums are divided by one constant. The paper updates on
policy; here the ratio is clipped as in PPO, which on policy changes nothing.
"""

from __future__ import annotations

import torch

from fusion.training.algorithms.interface import Algorithm


class RLOO(Algorithm):
    name = "rloo"
    aggregation = "constant"

    def estimate(self, rewards_B: torch.Tensor, groups: list[list[int]], advantages_B: torch.Tensor) -> None:
        """A reward minus the mean of the others in its group, which is n / (n - 1) times what it is above the mean of
        all n. One that has no others gives zero."""
        for members in groups:
            others = len(members) - 1
            if others:
                values = rewards_B[members]
                advantages_B[members] = (values - values.mean()) * len(members) / others

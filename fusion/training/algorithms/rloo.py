"""RLOO: REINFORCE with the mean of the prompt's other responses as baseline (arXiv 2402.14740; Kool et al.,
"Buy 4 REINFORCE samples, get a baseline for free!", 2019).

A response is one action, so the losses of its tokens are summed; all sums are divided by the same constant. The paper
trains on-policy; here the ratio is clipped as in PPO, which has no effect on-policy."""

import numpy as np

from fusion.training.algorithms.baseline import FloatArray, IntArray, subtract_mean
from fusion.training.algorithms.interface import Algorithm


class RLOO(Algorithm):
    name = "rloo"
    aggregation = "constant"

    def estimate(self, rewards_n: FloatArray, groups_n: IntArray) -> FloatArray:
        """Subtract the mean of the other rewards of the group, which equals n / (n - 1) times the difference from the
        mean of all n. A reward without others gives zero."""
        counts = np.bincount(groups_n)
        return subtract_mean(rewards_n, groups_n) * (counts / np.maximum(counts - 1, 1))[groups_n]

"""REINFORCE++: no group baseline; advantages are normalised over the global batch (arXiv 2501.03262).

The paper adds the KL to the reward token by token. Here an advantage is one number per sample, so `kl_in=reward`
subtracts the KL's sum over the tokens, and mean and standard deviation are over samples."""

import numpy as np

from fusion.training.algorithms.baseline import FloatArray, IntArray, standard_deviation, subtract_mean
from fusion.training.algorithms.interface import EPSILON, Algorithm


class ReinforcePlusPlus(Algorithm):
    name = "reinforce_plus_plus"
    by_group = False

    def estimate(self, rewards_n: FloatArray, groups_n: IntArray) -> FloatArray:
        """Subtract the mean of the step's samples from each reward and divide by their standard deviation (with n - 1).
        Rewards that are all equal give zeros."""
        together_n = np.zeros_like(groups_n)
        centred_n = subtract_mean(rewards_n, together_n)
        return centred_n / (standard_deviation(centred_n, together_n) + EPSILON)

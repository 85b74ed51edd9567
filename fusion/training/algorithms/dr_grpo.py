"""Dr. GRPO: GRPO without its two biases (arXiv 2503.20783, section 3.1-3.2).

The loss is divided by a constant instead of the response's length, which penalised long wrong answers less. Advantages
are not divided by the standard deviation of the group's rewards, which gave more weight to questions that are too easy
or too hard."""

from fusion.training.algorithms.baseline import FloatArray, IntArray, subtract_mean
from fusion.training.algorithms.interface import Algorithm


class DrGRPO(Algorithm):
    name = "dr_grpo"
    aggregation = "constant"

    def estimate(self, rewards_n: FloatArray, groups_n: IntArray) -> FloatArray:
        """Subtract the mean of the group from each reward."""
        return subtract_mean(rewards_n, groups_n)

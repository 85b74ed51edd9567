"""GRPO: the baseline of a response is the mean of its group, the responses to the same prompt (DeepSeekMath, arXiv
2402.03300, section 4.1).

The loss is averaged over tokens; the paper's average is `loss_aggregation=sequence_mean`. The paper's KL to the
reference is `kl_in=loss`."""

from fusion.training.algorithms.baseline import FloatArray, IntArray, standard_deviation, subtract_mean
from fusion.training.algorithms.interface import EPSILON, Algorithm


class GRPO(Algorithm):
    name = "grpo"

    def estimate(self, rewards_n: FloatArray, groups_n: IntArray) -> FloatArray:
        """Subtract the mean of the group from each reward and divide by the group's standard deviation (with n - 1)
        unless the config disables it. A group whose rewards are all equal gives zeros."""
        centred_n = subtract_mean(rewards_n, groups_n)
        if not self.config.normalize_advantages:
            return centred_n
        return centred_n / (standard_deviation(centred_n, groups_n) + EPSILON)

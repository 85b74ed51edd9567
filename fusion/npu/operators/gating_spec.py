"""Describe how a router chooses experts and weighs them. Without torch."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Gating:
    """Choose ``top_k`` experts for a token and weigh them by their scores.

    ``normalise``: divide the weights of the chosen experts by their sum; then ``scale`` them. ``correction``: a bias
    per expert is added to the scores by which experts are chosen, not to those they are weighed by (DeepSeek-V3, arXiv
    2412.19437, section 2.1.2). ``groups``: experts are chosen only from the ``top_groups`` groups of consecutive
    experts with the largest ``group_scores``: the sum of a group's two best scores, or its best (DeepSeek-V2, arXiv
    2405.04434, section 2.2.2)."""

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalise: bool = False
    correction: bool = False
    groups: int = 1
    top_groups: int = 1
    scale: float = 1.0
    group_scores: Literal["sum_of_two", "best"] = "sum_of_two"

    @property
    def plain(self) -> bool:
        """Whether the experts are those of the largest softmax scores, and nothing else."""
        return self.scores == "softmax" and not self.correction and self.groups == 1 and self.scale == 1.0

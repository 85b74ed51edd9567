"""GSPO: the ratio of whole sequences is clipped, not that of tokens (arXiv 2507.18071, section 4).

A sequence's ratio is the geometric mean of its tokens' ratios (section 4.1). Every token has the sequence's ratio with
its own gradient (GSPO-token, section 4.3): with one advantage per sequence and averaged over its tokens, this gives the
gradient of GSPO. Clip bounds are of the order of 1e-4."""

import torch

from fusion.training.algorithms.grpo import GRPO
from fusion.training.loss import LossInput, log_ratio, means_of_sequences


class GSPO(GRPO):
    name = "gspo"
    aggregation = "sequence_mean"

    def log_ratio(self, tokens: LossInput, anchor_n: torch.Tensor) -> torch.Tensor:
        by_token = log_ratio(tokens.logprobs, anchor_n)
        return means_of_sequences(by_token.detach(), tokens.lengths) + by_token - by_token.detach()

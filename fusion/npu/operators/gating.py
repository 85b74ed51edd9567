"""Choose the experts of tokens and weigh them, as a `Gating` specifies. Functions of tensors, in float32.

logits_nE ─ score ─► scores_nE ─┬─ choose (correction, groups) ─► expert_nk ─┐
                                └────────────────── weigh ◄──────────────────┘ ─► weight_nk
"""

import torch
from torch import Tensor

from fusion.npu.operators.gating_spec import Gating
from fusion.npu.operators.rows import sigmoid


def score(logits_nE: Tensor, gating: Gating, row_multiple: int = 1) -> Tensor:
    """Return the experts' scores, float32 [n, E]. ``row_multiple``: as of `rows.sigmoid`."""
    if gating.scores == "softmax":
        return logits_nE.softmax(-1, dtype=torch.float32)
    return sigmoid(logits_nE.to(torch.float32), row_multiple)


def choose(scores_nE: Tensor, gating: Gating, correction_E: Tensor | None) -> Tensor:
    """Return the experts of each token, int64 [n, k], by scores to which the correction is added. No gradient."""
    scores_nE = scores_nE.detach()
    if correction_E is not None:
        scores_nE = scores_nE + correction_E.detach().to(torch.float32)
    if gating.groups > 1:
        by_group = scores_nE.unflatten(-1, (gating.groups, -1))
        best = 2 if gating.group_scores == "sum_of_two" else 1
        group_nG = by_group.topk(best, dim=-1).values.sum(-1)
        chosen = group_nG.topk(gating.top_groups, dim=-1).indices
        excluded_nG = torch.ones_like(group_nG, dtype=torch.bool).scatter_(1, chosen, False)
        scores_nE = by_group.masked_fill(excluded_nG.unsqueeze(-1), -torch.inf).flatten(1)
    return scores_nE.topk(gating.top_k, dim=-1).indices


def choose_with_scores(scores_nE: Tensor, gating: Gating, correction_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the scores of the chosen experts, float32 [n, k], and these, int64 [n, k]. Scores carry gradients."""
    if gating.plain:
        score_nk, expert_nk = scores_nE.topk(gating.top_k, dim=-1)
        return score_nk, expert_nk
    expert_nk = choose(scores_nE, gating, correction_E)
    return scores_nE.gather(-1, expert_nk), expert_nk


def weigh(weight_nk: Tensor, gating: Gating) -> Tensor:
    """Return the weights of the chosen experts from their scores."""
    if gating.normalise:
        total_n1 = weight_nk.sum(-1, keepdim=True)
        # sigmoids may all be 0; transformers adds the same number
        weight_nk = weight_nk / (total_n1 if gating.scores == "softmax" else total_n1 + 1e-20)
    return weight_nk if gating.scale == 1.0 else weight_nk * gating.scale


def probabilities(scores_nE: Tensor, gating: Gating) -> Tensor:
    """Return scores that add up to 1 for each token, for the load-balancing loss (DeepSeek-V3, arXiv 2412.19437,
    equation 19)."""
    return scores_nE if gating.scores == "softmax" else scores_nE / (scores_nE.sum(-1, keepdim=True) + 1e-20)

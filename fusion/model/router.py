"""Choose the experts of tokens and weigh them, as a `Router` specifies. Functions of tensors, in float32.

logits_nE ─ score ─► scores_nE ─┬─ choose (correction, groups) ─► expert_nk ─┐
                                └────────────────── weigh ◄──────────────────┘ ─► weight_nk
"""

from __future__ import annotations

import torch

from fusion.model.spec import Router
from fusion.npu.ops import sigmoid


def score(logits_nE: torch.Tensor, router: Router, row_multiple: int = 1) -> torch.Tensor:
    """Return the experts' scores, float32 [n, E]. ``row_multiple``: as of `fusion.npu.ops.sigmoid`."""
    if router.scores == "softmax":
        return logits_nE.softmax(-1, dtype=torch.float32)
    return sigmoid(logits_nE.to(torch.float32), row_multiple)


def choose(scores_nE: torch.Tensor, router: Router, correction_E: torch.Tensor | None) -> torch.Tensor:
    """Return the experts of each token, int64 [n, k], by scores to which the correction is added. No gradient."""
    scores_nE = scores_nE.detach()
    if correction_E is not None:
        scores_nE = scores_nE + correction_E.detach().to(torch.float32)
    if router.groups > 1:
        by_group = scores_nE.unflatten(-1, (router.groups, -1))
        best = 2 if router.group_scores == "sum_of_two" else 1
        group_nG = by_group.topk(best, dim=-1).values.sum(-1)
        chosen = group_nG.topk(router.top_groups, dim=-1).indices
        excluded_nG = torch.ones_like(group_nG, dtype=torch.bool).scatter_(1, chosen, False)
        scores_nE = by_group.masked_fill(excluded_nG.unsqueeze(-1), -torch.inf).flatten(1)
    return scores_nE.topk(router.top_k, dim=-1).indices


def weigh(weight_nk: torch.Tensor, router: Router) -> torch.Tensor:
    """Return the weights of the chosen experts from their scores."""
    if router.normalise:
        total_n1 = weight_nk.sum(-1, keepdim=True)
        # sigmoids may all be 0; transformers adds the same number
        weight_nk = weight_nk / (total_n1 if router.scores == "softmax" else total_n1 + 1e-20)
    return weight_nk if router.scale == 1.0 else weight_nk * router.scale


def probabilities(scores_nE: torch.Tensor, router: Router) -> torch.Tensor:
    """Return scores that add up to 1 for each token, for the load-balancing loss (DeepSeek-V3, arXiv 2412.19437,
    equation 19)."""
    return scores_nE if router.scores == "softmax" else scores_nE / (scores_nE.sum(-1, keepdim=True) + 1e-20)

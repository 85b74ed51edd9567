"""Sample tokens from logits: temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution.

One uniform number per token (see `noise`) is compared with cumulative probabilities in the order of the vocabulary.
Rows are independent, so a row's token is the same in any batch.

Logprobs are those of softmax(logits / temperature) over the *whole* vocabulary, in float32 (float64 for a float64
model), as a trainer computes them for the same token; for temperature 0 those of temperature 1.
"""

from __future__ import annotations

import numpy as np
import torch

from fusion.inference.request import SamplingParams


def sample(
    logits_BV: torch.Tensor, params: list[SamplingParams], uniforms_B: np.ndarray
) -> tuple[list[int], list[float]]:
    """Samples one token per row.

    Args:
        logits_BV: any float dtype.
        params: of each row.
        uniforms_B: float64 in [0, 1).

    Returns:
        token ids and their logprobs, B of each.
    """
    logits = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.to(torch.float32)
    first = params[0]
    uniform = params.count(first) == len(params)
    scaled = _scale(logits, [first] if uniform else params)
    logprobs = scaled.log_softmax(-1)
    greedy = [p.temperature == 0 for p in ([first] if uniform else params)]
    if all(greedy):
        tokens = logits.argmax(-1)
    else:
        probs = logprobs.exp()
        if any(_filters(p) for p in ([first] if uniform else params)):
            probs = probs * _kept(probs, params)
        tokens = _invert(probs, torch.from_numpy(uniforms_B).to(logits))
        if any(greedy):
            tokens = torch.where(torch.tensor(greedy, device=tokens.device), logits.argmax(-1), tokens)
    return tokens.tolist(), logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1).tolist()


def _scale(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    temperatures = [p.temperature or 1.0 for p in params]
    if all(t == 1.0 for t in temperatures):
        return logits
    if len(temperatures) == 1:
        return logits / temperatures[0]
    return logits / torch.tensor(temperatures, dtype=logits.dtype, device=logits.device).unsqueeze(1)


def _filters(params: SamplingParams) -> bool:
    return params.top_k > 0 or params.top_p < 1 or params.min_p > 0


def _kept(probs_BV: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """Returns the tokens that the filters keep: bool [B, V]. The most likely token is always kept; of equally likely
    tokens the one with the lower id."""

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=probs_BV.dtype, device=probs_BV.device).unsqueeze(1)

    vocabulary = probs_BV.shape[1]
    sorted_probs, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=probs_BV.device)
    kept = rank < column([p.top_k or vocabulary for p in params])
    before = torch.where(kept, sorted_probs, 0).cumsum(-1)
    total = before[:, -1:]
    top_p = column([p.top_p for p in params])
    # top_p = 1 keeps all: rounding may let the sum reach its end before the last token
    kept &= (before - sorted_probs < top_p * total) | (top_p >= 1)
    kept &= sorted_probs >= column([p.min_p for p in params]) * sorted_probs[:, :1]
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, order, kept)


def _invert(probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Returns the first token whose cumulative probability exceeds u times the total."""
    cumulative = probs_BV.cumsum(-1)
    total = cumulative[:, -1:]
    # u · total may round up to the total, which no cumulative probability exceeds
    target = torch.minimum(uniforms_B.unsqueeze(1) * total, torch.nextafter(total, torch.zeros_like(total)))
    # a row of NaN yields the last token with logprob NaN, which the engine detects
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probs_BV.shape[1] - 1)

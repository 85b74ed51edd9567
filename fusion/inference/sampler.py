"""Sample tokens from logits: temperature, top-k, top-p, min-p, then the inverse of the cumulative distribution.

One uniform number per token (see `noise`) is compared with cumulative probabilities in the order of the vocabulary.
Rows are independent, so a row's token is the same in any batch.

Logprobs are those of the distribution that was sampled from: softmax(logits / temperature) over the ids that the
filters keep, without filters over the whole vocabulary, in float32 (float64 for a float64 model). The kept ids are
returned with every token, so that a trainer renormalises over the same ones. A filtered distribution has at most
`MAX_KEPT_IDS` ids, the most likely of those that the filters keep, so that what is recorded is always exactly what was
sampled from. For temperature 0 logprobs are those of temperature 1 over the whole vocabulary.

Invariants: a sampled token is among the kept ids; these have a probability above 0; without filters the results are to
the bit those of a sampler that has none."""

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch

from fusion.inference.noise import uniforms
from fusion.inference.request import SamplingParams
from fusion.inference.sequence import Sequence
from fusion.inference.verification import Verification
from fusion.model.head import MAX_KEPT_IDS
from fusion.npu import to_card

NOISE_AHEAD = 16
"""Number of positions for which a sequence's noise is drawn at a time."""


class Sampled(NamedTuple):
    """B tokens and their logprobs. ``kept``: the ids that the filters kept, int32 as bytes, the most likely first;
    empty where the whole vocabulary was sampled from. None: it was for all tokens."""

    tokens: list[int]
    logprobs: list[float]
    kept: list[bytes] | None = None


def noise_of(sampled: list[Sequence], verified: list[Verification], seed: int) -> np.ndarray:
    """Return a number for each sequence's next position, then one for the position behind each row of drafts: float64.
    Those of sequences are drawn for several positions at once, as the generator's ten rounds take about the same time
    for few numbers as for many. ``seed``: of the run."""
    empty = [seq for seq in sampled if not seq.noise]
    if empty:
        keys = np.fromiter((seq.noise_key for seq in empty), np.uint64, len(empty)).repeat(NOISE_AHEAD)
        next_ = np.fromiter((len(seq.tokens) for seq in empty), np.int64, len(empty))
        ahead = uniforms(seed, keys, (next_[:, None] + np.arange(NOISE_AHEAD)[::-1]).ravel())
        for seq, numbers in zip(empty, ahead.reshape(len(empty), NOISE_AHEAD).tolist(), strict=True):
            seq.noise = numbers
    noise = np.array([seq.noise.pop() for seq in sampled])
    if not verified:
        return noise
    keys = np.array([draft.seq.noise_key for draft in verified], np.uint64).repeat([len(draft) for draft in verified])
    positions = np.concatenate([len(draft.seq.tokens) + np.array(draft.depths) for draft in verified])
    return np.concatenate([noise, uniforms(seed, keys, positions)])


def sample(logits_BV: torch.Tensor, params: list[SamplingParams], uniforms_B: np.ndarray) -> Sampled:
    """Sample one token per row. ``logits_BV``: any float dtype. ``params``: of each row. ``uniforms_B``: float64, at
    least 0 and below 1."""
    logits = logits_BV if logits_BV.dtype == torch.float64 else logits_BV.to(torch.float32)
    first = params[0]
    uniform = params.count(first) == len(params)
    scaled = _scale(logits, [first] if uniform else params)
    logprobs = scaled.log_softmax(-1)
    kinds = [first] if uniform else params
    greedy, filtered = [p.temperature == 0 for p in kinds], [_filters(p, logits.shape[1]) for p in kinds]
    if any(filtered):
        return _sample_filtered(logprobs, logits.argmax(-1), params, uniforms_B)
    if all(greedy):
        tokens = logits.argmax(-1)
    else:
        tokens = _invert(logprobs.exp(), _to_card(uniforms_B, logits))
        if any(greedy):
            tokens = torch.where(_to_card(greedy, tokens, torch.bool), logits.argmax(-1), tokens)
    return _to_host(tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1))


def _to_card(values: Any, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Copy numbers to where a tensor is, in its dtype or another one."""
    return to_card(torch.as_tensor(values, dtype=dtype or like.dtype), like.device)


def _to_host(tokens_B: torch.Tensor, logprobs_B: torch.Tensor, kept_BK: torch.Tensor | None = None) -> Sampled:
    """Copy what was sampled to the host, all at once, with ids as floats: exact, as no vocabulary has 2**24.
    ``kept_BK``: the kept ids, and -1 for others."""
    columns = [tokens_B.to(logprobs_B.dtype), logprobs_B]
    if kept_BK is None:
        tokens, logprobs = torch.stack(columns).tolist()
        return Sampled([int(token) for token in tokens], logprobs)
    host_BC = torch.cat([torch.stack(columns, dim=1), kept_BK.to(logprobs_B.dtype)], dim=1).cpu().numpy()
    ids = host_BC[:, 2:].astype(np.int32)
    kept = [row[row >= 0].tobytes() for row in ids]
    return Sampled(host_BC[:, 0].astype(int).tolist(), host_BC[:, 1].tolist(), kept)


def split_kept(ids: np.ndarray, counts: list[int]) -> list[bytes]:
    """Return flat ``ids`` (int32) as the bytes of each token's ``counts``."""
    data, ends = ids.tobytes(), [4 * end for end in accumulate(counts, initial=0)]
    return [data[start:end] for start, end in zip(ends, ends[1:], strict=False)]


def _sample_filtered(
    logprobs_BV: torch.Tensor, greedy_B: torch.Tensor, params: list[SamplingParams], uniforms_B: np.ndarray
) -> Sampled:
    """Sample where at least one row is filtered. ``greedy_B``: the most likely tokens."""

    vocabulary = logprobs_BV.shape[1]
    filtered_B = _to_card([_filters(p, vocabulary) for p in params], logprobs_BV, torch.bool)
    is_greedy_B = _to_card([p.temperature == 0 for p in params], logprobs_BV, torch.bool)
    probs = logprobs_BV.exp()
    order, kept = _kept(probs, params)
    kept_BV = torch.zeros_like(kept).scatter_(1, order, kept)
    tokens = _invert(probs * kept_BV, _to_card(uniforms_B, logprobs_BV)).unsqueeze(1)
    # where a card's cumulative sum is rounded to fall, an id of probability 0 may be found
    tokens = torch.where(kept_BV.gather(1, tokens), tokens, order[:, :1])
    tokens = torch.where(is_greedy_B.unsqueeze(1), greedy_B.unsqueeze(1), tokens)
    order, kept = order[:, :MAX_KEPT_IDS], kept[:, :MAX_KEPT_IDS] & filtered_B.unsqueeze(1)
    log_mass = logprobs_BV.gather(1, order).masked_fill(~kept, -torch.inf).logsumexp(1).where(filtered_B, 0.0)
    logprobs = logprobs_BV.gather(1, tokens).squeeze(1) - log_mass
    max_kept = max(p.top_k or vocabulary for p in params if _filters(p, vocabulary))
    return _to_host(tokens.squeeze(1), logprobs, order.where(kept, -1)[:, :max_kept])


def _scale(logits: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    temperatures = [p.temperature or 1.0 for p in params]
    if all(t == 1.0 for t in temperatures):
        return logits
    if len(temperatures) == 1:
        return logits / temperatures[0]
    return logits / _to_card(temperatures, logits).unsqueeze(1)


def _filters(params: SamplingParams, vocabulary: int) -> bool:
    """Return whether filters may exclude ids: all of a vocabulary are no filter."""
    return params.truncates and (params.top_k < vocabulary or params.top_p < 1 or params.min_p > 0)


def _kept(probs_BV: torch.Tensor, params: list[SamplingParams]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids from the most to the least likely, [B, V], and whether each is kept, bool [B, V]. The most likely
    token is always kept; of equally likely tokens the one with the lower id."""

    def column(values: list[float]) -> torch.Tensor:
        return _to_card(values, probs_BV).unsqueeze(1)

    vocabulary = probs_BV.shape[1]
    sorted_probs, order = probs_BV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(vocabulary, device=probs_BV.device)
    kept = rank < column([p.top_k or vocabulary for p in params])
    before = _cumulative(torch.where(kept, sorted_probs, 0))
    total = before[:, -1:]
    top_p = column([p.top_p for p in params])
    # top_p = 1 keeps all: rounding may let the sum reach its end before the last token
    kept &= (before - sorted_probs < top_p * total) | (top_p >= 1)
    kept &= sorted_probs >= column([p.min_p for p in params]) * sorted_probs[:, :1]
    kept &= sorted_probs > 0
    kept &= rank < column([MAX_KEPT_IDS if _filters(p, vocabulary) else vocabulary for p in params])
    kept[:, 0] = True
    return order, kept


def _invert(probs_BV: torch.Tensor, uniforms_B: torch.Tensor) -> torch.Tensor:
    """Return the first token whose cumulative probability exceeds u times the total."""
    cumulative = _cumulative(probs_BV)
    total = cumulative[:, -1:]
    # u · total may round up to the total, which no cumulative probability exceeds
    target = torch.minimum(uniforms_B.unsqueeze(1) * total, next_below(total))
    # a row of NaN yields the last token with logprob NaN, which the engine detects
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp_(max=probs_BV.shape[1] - 1)


def _cumulative(values_BV: torch.Tensor) -> torch.Tensor:
    """Return the cumulative sums of each row. A single row is summed as one of two: CUDA sums it alone in an order that
    differs between runs (CUB's scan), and from that of a row among others."""
    return values_BV.expand(2, -1).cumsum(-1)[:1] if len(values_BV) == 1 else values_BV.cumsum(-1)


def next_below(values: torch.Tensor) -> torch.Tensor:
    """Return the next smaller number of each float32 or float64 value ≥ 0, and 0 of 0: `torch.nextafter`, for which
    NPUs have no kernel. The bits of such numbers are in their order."""
    bits = values.view({4: torch.int32, 8: torch.int64}[values.element_size()])
    return (bits - (bits > 0).to(bits.dtype)).view(values.dtype)

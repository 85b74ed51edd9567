"""Measure the gap between trainer and engine on the trained tokens, in total and by staleness, before the first update
of a step; and how far the policy moves within the step.

    tokens of a micro-batch ─ gap_sums ─► sums ─ add up over micro-batches and ranks ─ gap_metrics ─► metrics

The gap of a token is |log p_trainer - log p_engine| under the weights at the step's start: of a step's first minibatch,
and of the later ones where their log-probabilities under those weights were computed (`proximal_logprobs`). The
importance ratio of a token is p_trainer / p_engine, of a sequence the product of its tokens'. Of n ratios w, the
effective sample size (Σw)² / Σw² is reported as a fraction of n: it falls towards 1/n as few samples outweigh all
others, long before the mean reward does (Kong, "A note on importance sampling using standardized weights", 1992).

There is a row of sums for each version lag, then one for lags of at least `LAGS`, and one for tokens of unknown
version. Columns: weight; weighted sums of gaps, of probability differences, of ratios and of their squares; and a
histogram of gaps.

Invariants: sums of any division of the tokens into whole sequences add up to the sums of all; a p99 is at least the
true one (of the weighted tokens) and at most `RESOLUTION` times it, within [MIN_GAP, MAX_GAP]."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from fusion.npu import to_card
from fusion.training.loss import LossInput, log_ratio
from fusion.training.segments import Segments

LAGS = 8
"""Number of lags with separate rows: 0 … 7."""

MIN_GAP, MAX_GAP, BINS = 1e-6, 10.0, 64
RESOLUTION = (MAX_GAP / MIN_GAP) ** (1 / BINS)
ROWS, COLUMNS = LAGS + 2, 5 + BINS + 2
EDGES = MIN_GAP * RESOLUTION ** torch.arange(BINS + 1, dtype=torch.float64)
"""Upper edges of all bins except the last, which counts gaps above `MAX_GAP`."""

TOKENS, SEQUENCES, DRIFT = SUMS = "gaps of tokens", "ratios of sequences", "drift within the step"

INNER_STEP = "training/inner_step_logprobs_diff_mean"


def gap_sums(tokens: LossInput, weight_n: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """Sum the gaps, ratios and drift of a micro-batch whose tokens have behaviour_logprobs: float32, flat, by name."""
    sums: dict[str, torch.Tensor] = {}
    weight = torch.ones_like(tokens.logprobs) if weight_n is None else weight_n
    now, start = tokens.logprobs.detach(), _start_logprobs(tokens)
    behaviour = tokens.needed("behaviour_logprobs", "the gap between trainer and engine")
    if start is not None:
        sums[TOKENS] = _sums_by_lag(tokens, start, behaviour, weight)
        sums[SEQUENCES] = _sums_of_sequences(log_ratio(start, behaviour), tokens.lengths)
    if tokens.updated:
        moved = (now - (behaviour if start is None else start)).abs()
        sums[DRIFT] = torch.stack([weight.sum(), (weight * moved).sum()])
    return sums


def _start_logprobs(tokens: LossInput) -> torch.Tensor | None:
    """Return the log-probabilities under the weights at the start of the step; None if they were not computed."""
    if tokens.proximal_logprobs is not None:
        return tokens.proximal_logprobs
    return None if tokens.updated else tokens.logprobs.detach()


def _sums_by_lag(
    tokens: LossInput, logprobs: torch.Tensor, behaviour: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    gap = (logprobs - behaviour).abs()
    ratio = log_ratio(logprobs, behaviour).exp()
    row = torch.full_like(gap, ROWS - 1, dtype=torch.int64)
    if tokens.versions is not None and tokens.version is not None:
        row = (tokens.version - tokens.versions.to(torch.int64)).clamp(0, LAGS)
    means = torch.stack([torch.ones_like(gap), gap, (logprobs.exp() - behaviour.exp()).abs(), ratio, ratio * ratio], 1)
    bins = F.one_hot(torch.bucketize(gap, to_card(EDGES.to(gap.dtype), gap.device)), BINS + 2)
    weight_nR = F.one_hot(row, ROWS) * weight.unsqueeze(1)
    return (weight_nR.t() @ torch.cat([means, bins.to(means.dtype)], 1)).flatten()


def _sums_of_sequences(log_r: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return the number of sequences with trained tokens, the sum of their ratios, and that of the squares."""
    log_w = Segments([length for length in lengths if length], log_r.device).sums(log_r)
    ratio = log_ratio(log_w, torch.zeros_like(log_w)).exp()
    return torch.stack([ratio.new_tensor(float(len(ratio))), ratio.sum(), (ratio * ratio).sum()])


def gap_metrics(sums: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """Return the metrics of summed `gap_sums`. What has no tokens is left out: a lag, or all gaps of a minibatch whose
    log-probabilities at the step's start were not computed."""
    metrics: dict[str, float] = {}
    if TOKENS in sums:
        rows = sums[TOKENS].to(torch.float64).view(ROWS, COLUMNS)
        metrics |= _metrics_of_gaps(rows)
        count, ratios, squares = sums[SEQUENCES].to(torch.float64).tolist()
        if count:
            metrics["rollout_corr/rollout_is_seq_eff_sample_size"] = ratios**2 / (count * squares)
    if DRIFT in sums:
        weight, moved = sums[DRIFT].to(torch.float64).tolist()
        metrics |= {INNER_STEP: moved / weight} if weight else {}
    return metrics


def _metrics_of_gaps(rows: torch.Tensor) -> dict[str, float]:
    total = rows.sum(0)
    if not total[0]:
        return {}
    metrics = _metrics_of("training", total)
    metrics["rollout_corr/rollout_is_eff_sample_size"] = _effective_share(total)
    for lag, row in enumerate(rows[: LAGS + 1]):
        if row[0] > 0:
            name = f"staleness/{lag}" if lag < LAGS else f"staleness/{lag}+"
            metrics |= _metrics_of(name, row) | {f"{name}/token_fraction": float(row[0] / total[0])}
            metrics[f"{name}/rollout_is_eff_sample_size"] = _effective_share(row)
    return metrics


def _effective_share(row: torch.Tensor) -> float:
    return float(row[3] ** 2 / (row[0] * row[4]))


def _metrics_of(name: str, row: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}/rollout_probs_diff_mean": float(row[2] / row[0]),
        f"{name}/rollout_logprobs_diff_mean": float(row[1] / row[0]),
        f"{name}/rollout_logprobs_diff_p99": _quantile(row[5:], 0.99),
    }


def _quantile(counts: torch.Tensor, share: float) -> float:
    """Return the upper edge of the bin below which ``share`` of the weight lies."""
    below = counts.cumsum(0)
    index = int(torch.searchsorted(below, share * below[-1] * (1 - 1e-6)))
    return float(EDGES[min(index, BINS)])

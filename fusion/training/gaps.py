"""Measure the gap between trainer and engine on the trained tokens, in total and by staleness.

    tokens of a micro-batch ─ gap_sums ─► [rows, columns] ─ add up over micro-batches and ranks ─ gap_metrics ─► metrics

The gap of a token is |log p_trainer - log p_engine|. There is a row for each version lag, then one for lags of at least
`LAGS`, and one for tokens of unknown version. Columns: weight, weighted sum of gaps, of probability differences, and a
histogram of gaps.

Invariants: sums of any division of the tokens add up to the sums of all; a p99 is at least the true one (of the
weighted tokens) and at most `RESOLUTION` times it, within [MIN_GAP, MAX_GAP].
"""

from __future__ import annotations

import torch

from fusion.training.loss import LossInput

LAGS = 8
"""Number of lags with separate rows: 0 … 7."""

MIN_GAP, MAX_GAP, BINS = 1e-6, 10.0, 64
RESOLUTION = (MAX_GAP / MIN_GAP) ** (1 / BINS)
ROWS, COLUMNS = LAGS + 2, 3 + BINS + 2
EDGES = MIN_GAP * RESOLUTION ** torch.arange(BINS + 1, dtype=torch.float64)
"""Upper edges of all bins except the last, which counts gaps above `MAX_GAP`."""


def gap_sums(tokens: LossInput, weight_n: torch.Tensor | None) -> torch.Tensor:
    """Sum the gaps of tokens with behaviour_logprobs: float32 [ROWS * COLUMNS]."""
    assert tokens.behaviour_logprobs is not None
    logprobs, behaviour = tokens.logprobs.detach(), tokens.behaviour_logprobs
    gap = (logprobs - behaviour).abs()
    weight = torch.ones_like(gap) if weight_n is None else weight_n
    row = torch.full_like(gap, ROWS - 1, dtype=torch.int64)
    if tokens.versions is not None and tokens.version is not None:
        row = (tokens.version - tokens.versions.to(torch.int64)).clamp(0, LAGS)
    bin = torch.bucketize(gap, EDGES.to(gap))
    sums = gap.new_zeros(ROWS * COLUMNS)
    for column, values in (
        (torch.zeros_like(bin), weight),
        (torch.ones_like(bin), weight * gap),
        (torch.full_like(bin, 2), weight * (logprobs.exp() - behaviour.exp()).abs()),
        (3 + bin, weight),
    ):
        sums = sums.index_add(0, row * COLUMNS + column, values)
    return sums


def gap_metrics(sums: torch.Tensor) -> dict[str, float]:
    """Returns the metrics of summed `gap_sums`; a lag without tokens is left out."""
    rows = sums.to(torch.float64).view(ROWS, COLUMNS)
    total = float(rows[:, 0].sum())
    if not total:
        return {}
    metrics = _metrics_of("training", rows.sum(0))
    for lag, row in enumerate(rows[: LAGS + 1]):
        if row[0] > 0:
            name = f"staleness/{lag}" if lag < LAGS else f"staleness/{lag}+"
            metrics |= _metrics_of(name, row) | {f"{name}/token_fraction": float(row[0]) / total}
    return metrics


def _metrics_of(name: str, row: torch.Tensor) -> dict[str, float]:
    return {
        f"{name}/rollout_probs_diff_mean": float(row[2] / row[0]),
        f"{name}/rollout_logprobs_diff_mean": float(row[1] / row[0]),
        f"{name}/rollout_logprobs_diff_p99": _quantile(row[3:], 0.99),
    }


def _quantile(counts: torch.Tensor, share: float) -> float:
    """Returns the upper edge of the bin below which ``share`` of the weight lies."""
    below = counts.cumsum(0)
    index = int(torch.searchsorted(below, share * below[-1] * (1 - 1e-6)))
    return float(EDGES[min(index, BINS)])

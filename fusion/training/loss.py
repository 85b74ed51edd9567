"""Define the input and output of an algorithm's loss, and the functions that losses are built from.

A loss maps trained tokens to one value per token. The trainer takes the weighted mean over the tokens of the global
batch, so that an algorithm does not depend on micro-batches or ranks. A micro-batch holds whole sequences, so sums and
means over a sequence are exact."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from fusion.model.collectives import WithAdjoint
from fusion.npu import to_card
from fusion.training.segments import Segments, owners

MAX_LOG_RATIO = 20.0
"""Bound on the logarithms of probability ratios before `exp`: beyond it float32 carries no information."""


COLUMNS = ("advantages", "behaviour_logprobs", "ref_logprobs", "proximal_logprobs", "versions")
"""Columns that a loss reads of the trained tokens of `Sequences`, under the same names"""


@dataclass(frozen=True)
class LossInput:
    """The n trained tokens of a micro-batch, sequence by sequence. Columns are float32 [n] except for ``versions``.
    ``logprobs``, ``entropy``: of the policy being trained; they carry gradients.
    ``lengths``: number of trained tokens of each sequence, n in total; sequence-level ratios are computed over them.
    ``advantages``, ``behaviour_logprobs``, ``ref_logprobs``: None if the batch has no such column.
    ``proximal_logprobs``: of the policy at the start of this training step. None: not computed; if the weights are not
        ``updated``, ``logprobs`` are those.
    ``versions``: int32 [n], the policy version that sampled each token; None: unknown.
    ``version``: the policy version being trained.
    ``updated``: the weights have been updated since the start of this training step."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    lengths: list[int]
    advantages: torch.Tensor | None = None
    behaviour_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    proximal_logprobs: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    version: int | None = None
    updated: bool = False

    def needed(self, name: str, by: str) -> torch.Tensor:
        """Return the column ``name``. Raise ValueError: the batch has no such column; ``by`` names what needs it."""
        column = getattr(self, name)
        if column is None:
            raise ValueError(f"{by} needs the column {name}, which the batch lacks")
        return column


@dataclass(frozen=True)
class LossOutput:
    """Loss of each token [n], with gradient, and values of each token [n] by metric name, which are averaged with the
    tokens' weights."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


Loss = Callable[[LossInput], LossOutput]


class Clipped(NamedTuple):
    """The clipped loss of each token [n], with gradient, and whether it was clipped (detached)."""

    loss: torch.Tensor
    clipped: torch.Tensor


def log_ratio(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the probability ratio, bounded by `MAX_LOG_RATIO`."""
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_loss(log_r: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> Clipped:
    """Compute -min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(``log_r``).

    PPO's surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476, section 3.1)."""
    ratio = log_r.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return Clipped(torch.maximum(plain, clipped), (clipped > plain).detach())


def k3_divergence(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate KL(policy ‖ reference) from samples of the policy: r - 1 - log r with r = p_ref / p.

    Unbiased, never negative (J. Schulman, "Approximating KL divergence", 2020, estimator k3)."""
    difference = log_ratio(ref_logprobs, logprobs)
    return difference.exp() - 1 - difference


def sums_of_sequences(values_n: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return for every token the sum over its sequence: [n] → [n], with gradient."""
    segments = Segments(lengths, values_n.device)

    def spread(values_n: torch.Tensor) -> torch.Tensor:
        return segments.sums(values_n).index_select(0, segments.owner_n)

    return WithAdjoint.apply(values_n, spread, spread)


def means_of_sequences(values_n: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Return for every token the mean over its sequence: [n] → [n], with gradient."""
    sizes_n = torch.tensor(lengths, dtype=values_n.dtype)[owners(lengths)]
    return sums_of_sequences(values_n, lengths) / to_card(sizes_n, values_n.device)

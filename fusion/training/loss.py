"""What an algorithm's loss is made of: trained tokens in, a loss for each of them out.

The trainer takes the weighted mean over the tokens of the global batch, so that no algorithm knows of micro-batches or
ranks, and none can scale a gradient by them. A sequence is never cut, so what is taken over its tokens is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

MAX_LOG_RATIO = 20.0
"""Logarithms of probability ratios are cut here before `exp`: beyond it float32 carries no information."""


@dataclass(frozen=True)
class LossInput:
    """The n trained tokens of a micro-batch, sequence after sequence. Columns are float32 [n] but for ``versions``.

    Attributes:
        logprobs, entropy: of the policy being trained; they carry gradients.
        lengths: trained tokens of each sequence; they add up to n. (What a sequence-level ratio is taken over.)
        advantages, behaviour_logprobs, ref_logprobs: None where the batch brought none.
        proximal_logprobs: of the policy as it was when this training step began. None: that is the policy now.
        versions: int32 [n], the policy version that sampled each token; None: not known.
        version: the policy version that is being trained.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    lengths: list[int]
    advantages: torch.Tensor | None = None
    behaviour_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None
    proximal_logprobs: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    version: int | None = None

    def needed(self, name: str, by: str) -> torch.Tensor:
        """The column ``name``.

        Raises:
            ValueError: the batch has no such column; ``by`` names what needs it.
        """
        column = getattr(self, name)
        if column is None:
            raise ValueError(f"{by} needs the column {name}, which the batch lacks")
        return column


@dataclass(frozen=True)
class LossOutput:
    """Loss of each token [n], with gradient, and figures of each token [n] to be averaged with the tokens' weights, by
    metric name."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


Loss = Callable[[LossInput], LossOutput]


class Clipped(NamedTuple):
    """Of each token [n]: loss with gradient; whether the clip bites (detached)."""

    loss: torch.Tensor
    bites: torch.Tensor


def log_ratio(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clipped_loss(log_r: torch.Tensor, advantages: torch.Tensor, low: float, high: float) -> Clipped:
    """-min(r A, clip(r, 1 - low, 1 + high) A) with r = exp(``log_r``).

    PPO's surrogate (arXiv 1707.06347, eq. 7) with separate bounds (DAPO, arXiv 2503.14476, section 3.1).
    """
    ratio = log_r.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return Clipped(torch.maximum(plain, clipped), (clipped > plain).detach())


def k3_divergence(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy ‖ reference) from samples of the policy: r - 1 - log r with r = p_ref / p.

    Unbiased, never negative (J. Schulman, "Approximating KL divergence", 2020, estimator k3).
    """
    difference = log_ratio(ref_logprobs, logprobs)
    return difference.exp() - 1 - difference


def sums_of_sequences(values_n: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Each sequence's sum over its tokens, said at every token of it: [n] → [n], with gradient."""
    owner = owners(lengths, values_n.device)
    return values_n.new_zeros(len(lengths)).index_add(0, owner, values_n)[owner]


def means_of_sequences(values_n: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    """Each sequence's mean over its tokens, said at every token of it: [n] → [n], with gradient."""
    sizes = torch.tensor(lengths, dtype=values_n.dtype, device=values_n.device)
    return sums_of_sequences(values_n, lengths) / sizes[owners(lengths, values_n.device)]


def owners(lengths: list[int], device: torch.device) -> torch.Tensor:
    """int64 [n]: the sequence that each token belongs to."""
    sizes = torch.tensor(lengths, dtype=torch.int64)
    return torch.arange(len(lengths)).repeat_interleave(sizes).to(device)

"""The one interface between the trainer and an algorithm: trained tokens in, a loss for each of them out.

The trainer takes the weighted mean over the tokens of the global batch, so that no algorithm knows of micro-batches or
ranks, and none can scale a gradient by them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MAX_LOG_RATIO = 20.0
"""Logarithms of probability ratios are cut here before `exp`: beyond it float32 carries no information."""


@dataclass(frozen=True)
class LossInput:
    """The n trained tokens of a micro-batch, sequence after sequence. Columns are float32 [n].

    Attributes:
        logprobs, entropy: of the policy being trained; they carry gradients.
        lengths: trained tokens of each sequence; they add up to n. (What a sequence-level ratio is taken over.)
        advantages, behaviour_logprobs, ref_logprobs: None where the batch brought none.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    lengths: list[int]
    advantages: torch.Tensor | None = None
    behaviour_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None


@dataclass(frozen=True)
class LossOutput:
    """Loss of each token [n], with gradient, and figures of each token [n] to be averaged as the loss is, by metric
    name."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


Loss = Callable[[LossInput], LossOutput]


def log_ratio(logprobs: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (logprobs - other).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def k3_divergence(logprobs: torch.Tensor, ref_logprobs: torch.Tensor) -> torch.Tensor:
    """Estimate of KL(policy ‖ reference) from samples of the policy: r - 1 - log r with r = p_ref / p.

    Unbiased, never negative (J. Schulman, "Approximating KL divergence", 2020, estimator k3).
    """
    difference = log_ratio(ref_logprobs, logprobs)
    return difference.exp() - 1 - difference

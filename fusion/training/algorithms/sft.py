"""Supervised fine-tuning: cross-entropy on the trained tokens. What warms a base model up before GRPO."""

from __future__ import annotations

from fusion.training.algorithms.loss import Loss, LossInput, LossOutput
from fusion.training.config import AlgorithmConfig


def cross_entropy(tokens: LossInput) -> LossOutput:
    loss = -tokens.logprobs
    return LossOutput(loss, {"actor/sft_loss": loss.detach()})


def make_loss(config: AlgorithmConfig) -> Loss:
    return cross_entropy

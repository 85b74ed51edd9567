"""Supervised fine-tuning: cross-entropy on the trained tokens. What warms a base model up before reinforcement."""

from __future__ import annotations

from fusion.training.loss import LossInput, LossOutput


def cross_entropy(tokens: LossInput) -> LossOutput:
    loss = -tokens.logprobs
    return LossOutput(loss, {"actor/sft_loss": loss.detach()})

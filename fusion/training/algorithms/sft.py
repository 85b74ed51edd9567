"""Supervised fine-tuning: cross-entropy on the trained tokens. Used to warm up a base model before RL."""

from fusion.training.loss import LossInput, LossOutput


def cross_entropy(tokens: LossInput) -> LossOutput:
    loss = -tokens.logprobs
    return LossOutput(loss, {"actor/sft_loss": loss.detach()})

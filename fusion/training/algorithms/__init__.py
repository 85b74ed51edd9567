"""Algorithms, one file each: what becomes of rewards (`ADVANTAGES`) and of trained tokens (`LOSSES`), both pure.

    rewards_B, groups_B ─ make_advantages(config) ─► advantages_B, trained_B        on the controller
    LossInput (n tokens) ─ make_loss(config) ─► LossOutput (loss of each token)     in the trainer

A new algorithm is a new file and a line in each table that it has its own part in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from fusion.training.algorithms import grpo, sft
from fusion.training.algorithms.loss import Loss, LossInput, LossOutput
from fusion.training.config import AlgorithmConfig

Advantages = Callable[[Sequence[float | None], Sequence[Hashable]], tuple[torch.Tensor, torch.Tensor]]
"""(rewards of B samples, None where it failed; group of each) → (advantages float32 [B], trained bool [B])."""

ADVANTAGES: dict[str, Callable[[AlgorithmConfig], Advantages]] = {"grpo": grpo.make_advantages}
LOSSES: dict[str, Callable[[AlgorithmConfig], Loss]] = {"grpo": grpo.make_loss, "sft": sft.make_loss}


def make_advantages(config: AlgorithmConfig) -> Advantages:
    return ADVANTAGES[config.name](config)


def make_loss(config: AlgorithmConfig) -> Loss:
    return LOSSES[config.name](config)


__all__ = ["ADVANTAGES", "LOSSES", "Advantages", "Loss", "LossInput", "LossOutput", "make_advantages", "make_loss"]

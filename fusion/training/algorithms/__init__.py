"""Algorithms, one file each over one interface (`interface.Algorithm`): what becomes of rewards, and of trained tokens.

    rewards of a group ─ filter_rule ─► None, or why it is not trained       ┐
    rewards_B, groups_B, lengths_B ─ advantages ─► advantages_B, trained_B   ┘ on the controller
    Sequences ─ weigh ─► with weights of tokens (aggregation)                ┐
    LossInput (n tokens) ─ loss ─► LossOutput (loss of each token)           ┘ in the trainer

A new algorithm is a new file and a line in `ALGORITHMS`.
"""

from __future__ import annotations

from fusion.training.algorithms.dapo import DAPO
from fusion.training.algorithms.dr_grpo import DrGRPO
from fusion.training.algorithms.grpo import GRPO
from fusion.training.algorithms.gspo import GSPO
from fusion.training.algorithms.interface import Algorithm
from fusion.training.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from fusion.training.algorithms.rloo import RLOO
from fusion.training.algorithms.sft import cross_entropy
from fusion.training.config import AlgorithmConfig
from fusion.training.loss import Loss, LossInput, LossOutput

ALGORITHMS: dict[str, type[Algorithm]] = {
    made.name: made for made in (GRPO, DrGRPO, DAPO, GSPO, RLOO, ReinforcePlusPlus)
}


def make_algorithm(config: AlgorithmConfig, max_response_length: int) -> Algorithm:
    """The algorithm of a run whose responses have at most so many tokens."""
    return ALGORITHMS[config.name](config, max_response_length)


__all__ = ["ALGORITHMS", "Algorithm", "Loss", "LossInput", "LossOutput", "cross_entropy", "make_algorithm"]

"""Register the algorithms by `algorithm.name`."""

from __future__ import annotations

from fusion.training.algorithms.dapo import DAPO
from fusion.training.algorithms.dr_grpo import DrGRPO
from fusion.training.algorithms.grpo import GRPO
from fusion.training.algorithms.gspo import GSPO
from fusion.training.algorithms.interface import Algorithm
from fusion.training.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from fusion.training.algorithms.rloo import RLOO
from fusion.training.config import AlgorithmConfig

ALGORITHMS: dict[str, type[Algorithm]] = {
    algorithm.name: algorithm for algorithm in (GRPO, DrGRPO, DAPO, GSPO, RLOO, ReinforcePlusPlus)
}


def make_algorithm(config: AlgorithmConfig, max_response_length: int) -> Algorithm:
    """Build the algorithm named by `algorithm.name` for responses bounded by ``max_response_length`` tokens."""
    return ALGORITHMS[config.name](config, max_response_length)

"""What a worker is made of: plain data that travels to every card."""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from fusion.ep_switch.config import FusionConfig
from fusion.inference.config import RolloutConfig
from fusion.model import Parallel
from fusion.model.options import ModelOptions
from fusion.npu import DeviceConfig
from fusion.training.config import AlgorithmConfig, TrainingConfig


@dataclass(frozen=True)
class WorkerSpec:
    """The same on every card; a worker's rank comes beside it. ``steps``: optimizer steps of the run."""

    seed: int
    steps: int
    model: ModelOptions
    train: Parallel
    infer: Parallel
    fusion: FusionConfig
    rollout: RolloutConfig
    training: TrainingConfig
    algorithm: AlgorithmConfig
    device: DeviceConfig
    across_nodes: bool = False

    @property
    def world(self) -> int:
        return self.train.world

    @property
    def engine_size(self) -> int:
        """Cards of one engine: the smallest set of neighbours that closes both its TP and its EP groups."""
        return lcm(self.infer.tp, self.infer.ep)

    @property
    def engines(self) -> list[tuple[int, ...]]:
        """The ranks of every engine."""
        size = self.engine_size
        return [tuple(range(first, first + size)) for first in range(0, self.world, size)]

    @property
    def needs_reference(self) -> bool:
        return self.algorithm.kl_coef > 0

    @property
    def infer_of_one_engine(self) -> Parallel:
        return Parallel(self.engine_size, self.infer.tp, self.infer.ep)

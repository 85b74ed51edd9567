"""What an estimate is made of: a shape, dies, two layouts, and the config groups that size memory and transfers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.shape import Shape
from fusion.costmodel.traffic import Side
from fusion.ep_switch.config import FusionConfig
from fusion.inference.config import RolloutConfig
from fusion.model import Parallel
from fusion.training.config import TrainingConfig


@dataclass(frozen=True)
class Workload:
    """One step of the loop: samples, tokens of a prompt and of a response (mean and longest). Default: the published
    run of DeepSeek-R1 on 128 Atlas A3 cards (cann-recipes-train)."""

    samples: int = 512 * 16
    prompt: float = 78.0
    response: float = 1577.0
    longest: int = 3072

    @property
    def tokens(self) -> float:
        return self.samples * (self.prompt + self.response)


@dataclass(frozen=True)
class Setup:
    """Layouts of training and generation. They share their dies unless ``infer_first`` is past the last that trains."""

    shape: Shape
    hardware: Hardware
    train: Parallel
    infer: Parallel
    infer_first: int = 0
    training: TrainingConfig = field(default_factory=lambda: TrainingConfig(recompute=True))
    fusion: FusionConfig = field(default_factory=FusionConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    workload: Workload = field(default_factory=Workload)

    @property
    def dies(self) -> int:
        return max(self.train.world, self.infer_first + self.infer.world)

    @property
    def shared(self) -> bool:
        """Whether any die does both."""
        return self.infer_first < self.train.world

    @property
    def sides(self) -> tuple[Side, Side]:
        """Training and generation."""
        return Side(self.train), Side(self.infer, self.infer_first)

    def with_layouts(self, train: Parallel, infer: Parallel, infer_first: int = 0) -> Setup:
        return replace(self, train=train, infer=infer, infer_first=infer_first)

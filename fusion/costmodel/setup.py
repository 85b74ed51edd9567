"""Define the setup of a plan: a model, dies, two layouts, and the settings that bound memory and transfers."""

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.segments import Side
from fusion.costmodel.shape import Shape
from fusion.model import Parallel
from fusion.model.prefixes import links_within, rows_saved


@dataclass(frozen=True)
class Workload:
    """One step of the loop: samples, tokens of a prompt and of a response (mean and longest), samples of a prompt."""

    samples: int
    prompt: float
    response: float
    longest: int
    group: int = 1

    @property
    def longest_sample(self) -> int:
        """Tokens of the longest sample, prompt and response."""
        return int(self.prompt) + self.longest

    @property
    def tokens(self) -> float:
        return self.samples * (self.prompt + self.response)


PUBLISHED_WORKLOAD = Workload(samples=512 * 16, prompt=78.0, response=1577.0, longest=3072, group=16)
"""Workload of the published run of DeepSeek-R1 on 128 Atlas A3 cards (cann-recipes-train)."""


@dataclass(frozen=True)
class TrainingLimits:
    """The fields of the config group `training` that a plan depends on, under the same names. ``token_budget``: tokens
    of a micro-batch on one replica. Recomputation is on by default here: large models need it."""

    token_budget: int = 16384
    recompute: bool = True
    share_prefixes: str = "auto"


@dataclass(frozen=True)
class EngineLimits:
    """The fields of the config group `rollout.engine` that a plan depends on, with the same names and defaults."""

    max_seqs: int = 256
    max_batch_tokens: int = 4096
    kv_fraction: float = 0.9


@dataclass(frozen=True)
class SwitchLimits:
    """The fields of the config group `fusion` that a plan depends on, with the same names and defaults."""

    offload: str = "switch"
    bucket_bytes: int = 256 << 20
    double_buffer: bool = False


def limits_of(kind: type, group: object) -> Any:
    """Return those fields of a config group that a plan depends on; ``kind``: the class of limits."""
    return kind(**{item.name: getattr(group, item.name) for item in fields(kind)})


@dataclass(frozen=True)
class Setup:
    """Layouts of training and generation. They share dies unless ``infer_first`` is past the last die that trains."""

    shape: Shape
    hardware: Hardware
    train: Parallel
    infer: Parallel
    infer_first: int = 0
    training: TrainingLimits = field(default_factory=TrainingLimits)
    fusion: SwitchLimits = field(default_factory=SwitchLimits)
    rollout: EngineLimits = field(default_factory=EngineLimits)
    workload: Workload = PUBLISHED_WORKLOAD
    copies_latents: bool = False
    """Whether the engine stores the up-projections of latent attention twice, as vllm-ascend does"""
    shares_kv: bool = True
    """Whether the engine has decode context parallelism, to be chosen where samples need it"""

    @property
    def dies(self) -> int:
        return max(self.train.world, self.infer_first + self.infer.world)

    @property
    def shared(self) -> bool:
        """Return whether any die both trains and generates."""
        return self.infer_first < self.train.world

    @property
    def sides(self) -> tuple[Side, Side]:
        """The dies and layouts of training and of generation."""
        return Side(self.train.of_weights), Side(self.infer.of_weights, self.infer_first)

    @property
    def micro_batch_tokens(self) -> int:
        """Return the tokens that the largest micro-batch may have: a replica may have fewer in a step, also as siblings
        share their prompt. Samples with shorter prompts or responses take no more."""
        work, longest = self.workload, self.workload.longest_sample
        groups, samples = (-(-count // self.train.replicas) for count in (work.samples // work.group, work.samples))
        of_group = work.group * longest - self._saved(longest)
        return min(self.training.token_budget, samples * longest, groups * of_group)

    @property
    def trained_rows(self) -> float:
        """Rows that training computes in a step: tokens, less the prompts that siblings of mean length share."""
        work = self.workload
        return work.tokens - work.samples / work.group * self._saved(round(work.prompt + work.response))

    def _saved(self, length: int) -> int:
        """Return how many rows a prompt's samples of this length save by sharing it within micro-batches."""
        work, training = self.workload, self.training
        return _saved_rows(work.group, length, int(work.prompt), training.share_prefixes, training.token_budget)

    def with_layouts(self, train: Parallel, infer: Parallel, infer_first: int = 0) -> "Setup":
        return replace(self, train=train, infer=infer, infer_first=infer_first)


@lru_cache
def _saved_rows(group: int, length: int, prompt: int, share: str, budget: int) -> int:
    """Return how many rows a group of samples of equal length saves; the same for all layouts of a search."""
    lengths, common = [length] * group, [0, *[prompt] * (group - 1)]
    return sum(map(rows_saved, lengths, links_within(lengths, common, share, budget)))

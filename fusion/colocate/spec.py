"""Specify a worker: plain data that is sent to every card of a run."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from fusion.colocate.config import FusionConfig
from fusion.colocate.deployment import Deployment
from fusion.ep_switch.topology import Topology
from fusion.inference.config import RolloutConfig
from fusion.model import ModelConfig, Parallel
from fusion.model.options import PolicyModelConfig
from fusion.npu.config import DeviceConfig
from fusion.rollout.detokenize import DetokenizerSpec
from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.training.config import AlgorithmConfig, TrainingConfig

if TYPE_CHECKING:  # a worker that is not paced does not load the cost model
    from fusion.costmodel.pace import Pace


@dataclass(frozen=True)
class RewardModelSpec:
    """The reward model and its layout over the cards that host it. ``retokenize``: its vocabulary is not the policy's,
    so samples are decoded to text and tokenised again."""

    path: str
    layout: Parallel
    retokenize: bool = False


@dataclass(frozen=True)
class WorkerSpec:
    """The same on every card; a worker's rank is given separately. ``steps``: optimizer steps of the run; ``train``,
    ``infer``: layouts over the cards that train, and that generate; ``reference``: layout over the reference's separate
    cards; None: there is no reference, or it computes in the training layout; ``topology``: bandwidth of the links;
    None: all links are equal; ``pace``: the card whose time emulated cards take; None: they run as fast as they can;
    ``ahead``: cards that only generate keep generating while others train and while they receive new weights;
    ``detokenizer``: how responses are decoded to text; None: they are not; ``kv_pool``: the KV pool of each machine;
    None: engines do not share KV; ``masked_ids``: the policy's (`ModelConfig.masked_ids`); ``turns``: samples are
    conversations of several turns, so they have the columns that name what was sampled."""

    seed: int
    steps: int
    model: PolicyModelConfig
    deployment: Deployment
    train: Parallel
    infer: Parallel
    fusion: FusionConfig
    rollout: RolloutConfig
    training: TrainingConfig
    algorithm: AlgorithmConfig
    device: DeviceConfig
    reference: Parallel | None = None
    reward_model: RewardModelSpec | None = None
    topology: Topology | None = None
    pace: "Pace | None" = None
    ahead: bool = False
    detokenizer: DetokenizerSpec | None = None
    kv_pool: KVPoolSpec | None = None
    masked_ids: tuple[tuple[int, int], ...] = ()
    turns: bool = False

    def policy(self) -> ModelConfig:
        """Read the policy's specification from its folder, with the end tokens of the run, which its exports name, and
        the adapters; without these it is the reference's, too."""
        model = ModelConfig.from_hf(self.model.path)
        ends = self.detokenizer.end_token_ids if self.detokenizer else ()
        model = replace(model, masked_ids=self.masked_ids, eos_token_ids=ends or model.eos_token_ids)
        return replace(model, adapters=self.training.lora.adapters)

    @property
    def world(self) -> int:
        return self.deployment.world

    @property
    def engines(self) -> list[tuple[int, ...]]:
        """The ranks of every engine."""
        return self.deployment.engines(self.infer.of_one_engine.world)

    @property
    def infer_of_one_engine(self) -> Parallel:
        return self.infer.of_one_engine

    @property
    def drafting_ranks(self) -> list[int]:
        """The first rank of each attention rank of all engines: each has a schedule and drafts of its own."""
        shape = self.infer_of_one_engine
        return [ranks[place] for ranks in self.engines for place in range(0, shape.stage_world, shape.tp)]

    @property
    def masters_on_host(self) -> bool:
        """Whether float32 masters of the weights exist and are on the host while cards that train generate."""
        return self.fusion.offload != "none" and self.model.dtype != "float32"

    @property
    def temperature(self) -> float:
        """Temperature of the distribution whose log-probabilities are trained: the one that was sampled from."""
        return self.rollout.sampling.temperature or 1.0

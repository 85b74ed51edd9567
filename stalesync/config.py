"""The composed config: every room's dataclass under its group, and the checks that span rooms.

A run's config comes from `recipes/conf` (Hydra) over these dataclasses, is checked once, and never changes. The
documentation of a key is the text below its field, in the room that owns it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distqueue.config import QueueConfig
from fusion.colocate.deployment import Deployment, deploy
from fusion.colocate.spec import engine_size
from fusion.ep_switch.config import FusionConfig
from fusion.inference.config import RolloutConfig
from fusion.model import ModelConfig, Parallel, check_folder
from fusion.model.options import LayoutOptions, ModelOptions, ParallelOptions
from fusion.npu.config import DeviceConfig
from fusion.rewards.config import RewardConfig
from fusion.training.config import AlgorithmConfig, TrainingConfig
from stalesync.prompts.config import DataConfig

if TYPE_CHECKING:
    from fusion.costmodel.pace import Pace
    from fusion.ep_switch.topology import Topology


@dataclass
class ClusterConfig:
    npus: int = 1
    """Cards of the run, those that only generate or score included; one worker each."""
    address: str | None = None
    """Ray cluster to join ("auto" on a head node); null starts Ray on this machine."""
    hardware: str | None = None
    """What the cards are, a file of `fusion/costmodel/hardware` (ascend_910b, ascend_910c, h100, h800): which links are
    fast; null: all alike."""
    stage_timeout_s: float = 1800.0
    """A stage that takes longer than this ends the run with a message naming the ranks that are still at it."""

    def validate(self) -> None:
        if self.npus < 1:
            raise ValueError(f"cluster.npus={self.npus}: expected at least 1")
        _ = self.topology  # raises where the hardware is unknown
        if self.stage_timeout_s <= 0:
            raise ValueError(f"cluster.stage_timeout_s={self.stage_timeout_s}: expected seconds > 0")

    @property
    def topology(self) -> Topology | None:
        """Which links between the cards are fast; None: all alike."""
        if self.hardware is None:
            return None
        from fusion.costmodel.hardware import hardware_named  # only where asked for: it loads the cost model

        return hardware_named(self.hardware).topology


@dataclass
class StaleSyncConfig:
    max_staleness: int = 0
    """Policy versions a trained sample's oldest token may lag behind; 0 is the synchronous loop."""
    train_tokens: int | None = None
    """A step begins as soon as finished groups hold so many tokens, prompts and responses; `data.prompts_per_step` is
    then the most groups it takes, and older groups may make it larger. null: it takes all `data.prompts_per_step`."""

    def validate(self) -> None:
        if self.max_staleness < 0:
            raise ValueError(f"stalesync.max_staleness={self.max_staleness}: expected at least 0")
        if self.train_tokens is None:
            return
        if self.train_tokens < 1:
            raise ValueError(f"stalesync.train_tokens={self.train_tokens}: expected at least 1, or null")
        if not self.max_staleness:
            raise ValueError(
                f"stalesync.train_tokens={self.train_tokens}: expected null at stalesync.max_staleness=0, where a step "
                "trains its whole batch of data.prompts_per_step groups"
            )


@dataclass
class RunOptions:
    name: str = "run"
    """Folder of the run below `dir`; a taken name gets a number unless `resume` is set."""
    dir: str = "runs"
    """Where runs are kept."""
    steps: int = 100
    """Training steps (policy versions)."""
    seed: int = 0
    """Seeds the order of prompts and every sampled token."""
    eval_prompts: int = 64
    """Held-out prompts answered before the first and after the last step (`val/rewards/mean`); 0: none."""
    save_every: int = 0
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = 2
    """Checkpoints that are kept, the last ones; 0: all."""
    resume: bool = False
    """Go on from the newest checkpoint of the run of this name."""

    def validate(self) -> None:
        for key, least in (("steps", 1), ("eval_prompts", 0), ("save_every", 0), ("keep", 0)):
            if getattr(self, key) < least:
                raise ValueError(f"run.{key}={getattr(self, key)}: expected at least {least}")


@dataclass
class Config:
    """Everything a run depends on."""

    run: RunOptions = field(default_factory=RunOptions)
    model: ModelOptions = field(default_factory=ModelOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    stalesync: StaleSyncConfig = field(default_factory=StaleSyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    @property
    def deployment(self) -> Deployment:
        needs = {"reference": self.algorithm.kl_coef > 0, "reward_model": self.reward.kind == "model"}
        return deploy(self.fusion, self.cluster.npus, **needs)

    @property
    def train_layout(self) -> Parallel:
        return self._layout("parallel.train", self.deployment.train, self.parallel.train)

    @property
    def infer_layout(self) -> Parallel:
        return self._layout("parallel.infer", self.deployment.generate, self.parallel.infer)

    @property
    def pace(self) -> Pace | None:
        """What emulated cards take the time of; None where they are not paced."""
        if self.device.pace is None:
            return None
        from fusion.costmodel.pace import Pace

        return Pace.load(self.device, self.cluster.hardware)

    def score_layout(self, model: ModelConfig, cards: tuple[int, ...]) -> Parallel:
        """Of reference or reward model, of this shape, over the cards that host it."""
        shape = self.parallel.score
        if shape.pp != 1:
            raise ValueError(f"parallel.score.pp={shape.pp}: expected 1; reference and reward model have no stages")
        if not model.num_experts:
            shape = dataclasses.replace(shape, ep=1, etp=1)
        layout = self._layout("parallel.score", cards, shape)
        layout.check(model, "parallel.score")
        return layout

    def resolved(self) -> Config:
        """The same with the nulls filled in that depend on other rooms: what a run follows and leaves in its folder."""
        correction = self.algorithm.correction or ("decoupled" if self.stalesync.max_staleness else "none")
        return dataclasses.replace(self, algorithm=dataclasses.replace(self.algorithm, correction=correction))

    @property
    def longest_sample(self) -> int:
        """Tokens."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    def validate(self) -> ModelConfig:
        """Checks every key and the arithmetic between them; returns the shape of the model they were checked against.

        Raises:
            ValueError: names the key to change, or both numbers that do not fit.
        """
        resolved = self.resolved()
        for room in dataclasses.fields(resolved):
            check = getattr(getattr(resolved, room.name), "validate", None)
            if check is not None:
                check()
        if not self.model.path:
            raise ValueError("model.path is not set: expected a Hugging Face checkpoint folder")
        model = ModelConfig.from_hf(self.model.path)
        check_folder(self.model.path, model)
        self.train_layout.check(model, "parallel.train")
        self.infer_layout.check(model, "parallel.infer")
        self.deployment.engines(engine_size(self.infer_layout))
        if self.fusion.score_cards and self.deployment.reference:
            self.score_layout(model, self.deployment.reference)
        if self.reward.model:
            self._check_reward_model(self.reward.model)
        self._check_batches(model)
        alone = {*self.deployment.generate} - {*self.deployment.train}
        if self.fusion.double_buffer and not (alone and self.stalesync.max_staleness):
            raise ValueError(
                "fusion.double_buffer=true: expected fusion.deployment=separate or hybrid, not "
                f"{self.fusion.deployment}, and stalesync.max_staleness > 0, not {self.stalesync.max_staleness}: else "
                "no engine goes on while weights arrive"
            )
        if self.algorithm.replay != "none" and not model.num_experts:
            raise ValueError(f"algorithm.replay={self.algorithm.replay}: the model is dense; set it to none")
        if pace := self.pace:
            pace.check(self.train_layout, "parallel.train")
            pace.check(self.infer_layout, "parallel.infer")
        return model

    def _check_reward_model(self, path: str) -> None:
        try:
            model = ModelConfig.from_hf(path)
            check_folder(path, model)
        except ValueError as error:
            raise ValueError(str(error).replace("model.path", "reward.model", 1)) from None
        if model.num_labels != 1:
            found = f"a head of {model.num_labels} labels" if model.num_labels else "no such head"
            raise ValueError(
                f"reward.model: {path} has {found}; expected a Qwen3ForSequenceClassification folder with num_labels=1"
            )
        self.score_layout(model, self.deployment.reward_model)

    def _layout(self, key: str, cards: tuple[int, ...], shape: LayoutOptions) -> Parallel:
        world, npus = len(cards), self.cluster.npus
        try:
            return Parallel(world, shape.tp, shape.ep, shape.pp, shape.etp)
        except ValueError as error:
            some = f"; {world} of them in fusion.deployment={self.fusion.deployment}" if world < npus else ""
            raise ValueError(f"{key}: {error} (cluster.npus={npus}{some})") from None

    def _check_batches(self, model: ModelConfig) -> None:
        prompts, minibatches, group = self.data.prompts_per_step, self.algorithm.minibatches, self.algorithm.group_size
        if prompts % minibatches:
            raise ValueError(f"algorithm.minibatches={minibatches} does not divide data.prompts_per_step={prompts}")
        samples, replicas = prompts // minibatches * group, self.train_layout.dp
        if samples < replicas:
            raise ValueError(
                f"a minibatch has {samples} samples (data.prompts_per_step={prompts} / algorithm.minibatches="
                f"{minibatches} x algorithm.group_size={group}), fewer than the {replicas} data-parallel replicas of "
                f"parallel.train on cluster.npus={self.cluster.npus}"
            )
        buffer, response = self.algorithm.overlong_buffer, self.rollout.max_response_length
        if buffer is not None and buffer > response:
            raise ValueError(f"algorithm.overlong_buffer={buffer} exceeds rollout.max_response_length={response}")
        longest = self.longest_sample
        if longest > model.max_positions:
            raise ValueError(
                f"data.max_prompt_length={self.data.max_prompt_length} + rollout.max_response_length="
                f"{self.rollout.max_response_length} exceeds the model's max_position_embeddings={model.max_positions}"
            )
        if longest > self.training.token_budget:
            raise ValueError(
                f"training.token_budget={self.training.token_budget} is less than the longest sample, "
                f"data.max_prompt_length + rollout.max_response_length = {longest} tokens"
            )

"""The composed config: every room's dataclass under its group, and the checks that span rooms.

A run's config comes from `recipes/conf` (Hydra) over these dataclasses, is checked once, and never changes. The
documentation of a key is the text below its field, in the room that owns it.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_type_hints

from fusion.ep_switch.config import FusionConfig
from fusion.inference.config import RolloutConfig
from fusion.model import ModelConfig, Parallel, check_folder
from fusion.model.options import ModelOptions, ParallelOptions
from fusion.npu.config import DeviceConfig
from fusion.rewards.config import RewardConfig
from fusion.training.config import AlgorithmConfig, TrainingConfig
from stalesync.prompts.config import DataConfig


@dataclass
class ClusterConfig:
    npus: int = 1
    """Cards of the run; one worker each."""
    address: str | None = None
    """Ray cluster to join ("auto" on a head node); null starts Ray on this machine."""
    stage_timeout_s: float = 1800.0
    """A stage that takes longer than this ends the run with a message naming the ranks that are still at it."""

    def validate(self) -> None:
        if self.npus < 1:
            raise ValueError(f"cluster.npus={self.npus}: expected at least 1")
        if self.stage_timeout_s <= 0:
            raise ValueError(f"cluster.stage_timeout_s={self.stage_timeout_s}: expected seconds > 0")


@dataclass
class StaleSyncConfig:
    max_staleness: int = 0
    """Policy versions a trained sample's oldest token may lag behind; 0 is the synchronous loop."""

    def validate(self) -> None:
        if self.max_staleness != 0:
            raise ValueError(f"stalesync.max_staleness={self.max_staleness}: only 0 (synchronous) is supported")


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
    resume: bool = False
    """Go on from the newest checkpoint of the run of this name."""

    def validate(self) -> None:
        for key, least in (("steps", 1), ("eval_prompts", 0), ("save_every", 0)):
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
    stalesync: StaleSyncConfig = field(default_factory=StaleSyncConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)

    @property
    def train_layout(self) -> Parallel:
        return _layout("parallel.train", self.cluster.npus, self.parallel.train.tp, self.parallel.train.ep)

    @property
    def infer_layout(self) -> Parallel:
        return _layout("parallel.infer", self.cluster.npus, self.parallel.infer.tp, self.parallel.infer.ep)

    def validate(self) -> ModelConfig:
        """Checks every key and the arithmetic between them; returns the shape of the model they were checked against.

        Raises:
            ValueError: names the key to change, or both numbers that do not fit.
        """
        for room in dataclasses.fields(self):
            check = getattr(getattr(self, room.name), "validate", None)
            if check is not None:
                check()
        if not self.model.path:
            raise ValueError("model.path is not set: expected a Hugging Face checkpoint folder")
        model = ModelConfig.from_hf(self.model.path)
        check_folder(self.model.path, model)
        self.train_layout.check(model, "parallel.train")
        self.infer_layout.check(model, "parallel.infer")
        if self.parallel.train.tp > model.num_kv_heads:
            raise ValueError(
                f"parallel.train.tp={self.parallel.train.tp} exceeds the model's "
                f"num_key_value_heads={model.num_kv_heads}"
            )
        self._check_batches(model)
        return model

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
        longest = self.data.max_prompt_length + self.rollout.max_response_length
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


def _layout(key: str, world: int, tp: int, ep: int) -> Parallel:
    try:
        return Parallel(world, tp, ep)
    except ValueError as error:
        raise ValueError(f"{key}: {error} (cluster.npus={world})") from None


def register() -> None:
    """Makes the dataclasses the schema of `recipes/conf/config.yaml`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="schema", node=Config)


def known_keys(node: type = Config, prefix: str = "") -> list[str]:
    """Every key with its full path."""
    keys: list[str] = []
    hints = get_type_hints(node)
    for item in dataclasses.fields(node):
        path = prefix + item.name
        child: Any = hints[item.name]
        keys += known_keys(child, path + ".") if dataclasses.is_dataclass(child) else [path]  # type: ignore[arg-type]
    return keys


def check_overrides(arguments: Iterable[str], groups: Iterable[str] = ()) -> None:
    """Refuses Hydra overrides of keys that do not exist, with the nearest right name, before anything is composed.

    Args:
        groups: names that choose a config file instead of a value (`algorithm=grpo`).

    Raises:
        ValueError: the first unknown key.
    """
    keys, choices = known_keys(), set(groups)
    for argument in arguments:
        if argument.startswith("-") or "=" not in argument:
            continue
        key = argument.split("=", 1)[0].lstrip("+~").split("@")[0]
        if key in choices or key in keys or key.startswith("hydra"):
            continue
        near = difflib.get_close_matches(key, [*keys, *choices], n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown key {key!r}{hint}")

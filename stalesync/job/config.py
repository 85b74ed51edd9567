"""Compose the config of a run: one dataclass per group, each in the package that owns it, and its checks.

Hydra composes a run's config from `recipes/conf` over these dataclasses; it is validated once and never changes;
`cross_checks.py` has the checks across groups. The documentation of a key is the text below its field."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from distqueue.config import QueueConfig
from fusion.colocate.config import OWN_CARDS, FusionConfig
from fusion.colocate.deployment import Deployment, deploy
from fusion.environments.config import EnvironmentConfig
from fusion.inference.backends.support import check_vllm
from fusion.inference.config import RolloutConfig
from fusion.model import ModelConfig, Parallel, check_folder
from fusion.model.options import LayoutConfig, ParallelConfig, PolicyModelConfig
from fusion.npu.config import DeviceConfig
from fusion.resources import SHAPES
from fusion.rewards.config import RewardConfig
from fusion.rollout.orders import find_order
from fusion.telemetry.keys import MAX_TIMEOUT_S, POSITIVE, key
from fusion.telemetry.loggers import check_loggers
from fusion.telemetry.validation import RUN_NAME, Checks, Group, is_run_name
from fusion.training.backends.support import check_megatron
from fusion.training.config import AlgorithmConfig, TrainingConfig
from stalesync.evaluation.config import EvalConfig
from stalesync.job import automatic, cross_checks
from stalesync.job.keys import check_supported, check_used
from stalesync.policy.save_interval import SaveInterval
from stalesync.prompts.config import DataConfig

if TYPE_CHECKING:
    from fusion.costmodel.pace import Pace
    from fusion.ep_switch.topology import Topology


@dataclass
class ClusterConfig(Group, path="cluster"):
    """The cards of a run and how Ray reaches them."""

    npus: int = key(1, at_least=1, at_most=100_000, read_by="plan simulate")
    """Number of cards of the run, including those that only generate or score; one worker per card."""
    address: str | None = key(None, timeless=True)
    """Ray cluster to join ("auto" on a head node); null: start Ray on this machine."""
    hardware: str | None = key(None, read_by="plan simulate")
    """Type of the cards, a file of `fusion/costmodel/hardware` (ascend_910b, ascend_910c, h100, h800); it defines the
    speed of the links; null: all links are equal."""
    stage_timeout_s: float = key(1800.0, above=0, at_most=MAX_TIMEOUT_S, timeless=True)
    """Timeout of a stage in seconds: a longer stage ends the run with an error that names the ranks still running
    it."""

    def check(self, check: Checks) -> None:
        _ = self.topology  # raises if the hardware is unknown

    @property
    def topology(self) -> "Topology | None":
        """Bandwidths of the cards' links; None: all are equal. Raise ValueError if `cluster.hardware` is unknown."""
        if self.hardware is None:
            return None
        from fusion.costmodel.hardware import hardware_named  # imported only if needed, as it loads the cost model

        return hardware_named(self.hardware).topology


@dataclass
class StaleSyncConfig(Group, path="stalesync"):
    """How far generation may run ahead of training."""

    max_staleness: int = key(0, at_least=0, at_most=100_000, read_by="simulate")
    """Staleness bound: maximum number of policy versions that the oldest token of a trained sample may lag behind; 0:
    the synchronous loop."""
    train_tokens: int | None = key(
        None,
        at_least=1,
        only={"max_staleness": POSITIVE},
        why="where a step trains its whole batch of data.prompts_per_step groups",
        read_by="simulate",
    )
    """A step starts as soon as finished groups hold this many tokens, prompts and responses; `data.prompts_per_step` is
    then its maximum number of groups, and groups that reach the bound are always included. null: a step always trains
    `data.prompts_per_step` groups."""
    lend: bool = key(
        True, only={"fusion.deployment": OWN_CARDS, "max_staleness": POSITIVE}, refused=False, read_by="simulate"
    )
    """Cards that train begin a step's training while its last responses are still generated: where other cards only
    generate, with `max_staleness` > 0 and the conditions in docs/stalesync.md. In `hybrid` the requests of their
    engines go to these cards."""


@dataclass
class RunConfig(Group, path="run"):
    """What a run is called, how long it trains, and what it saves."""

    name: str = "run"
    """Folder of the run in `dir`; a name that is taken gets a number unless `resume` is set."""
    dir: str = "runs"
    """Folder of all runs."""
    steps: int = key(100, at_least=1, read_by="simulate")
    """Number of training steps (policy versions)."""
    seed: int = key(0, number=True, read_by="simulate")
    """Seeds the order of prompts and every sampled token; any whole number."""
    eval_prompts: int = key(64, at_least=0, at_most=1_000_000)
    """Number of held-out prompts of `data.source`, which every evaluation answers: as `held_out` besides `eval.files`;
    0: none."""
    save_every: str = "30min"
    """Interval between checkpoints: a number of steps (10) or a time (90s, 30min, 2h), counted at the end of a step; 0:
    only after the last step. The last step is always saved."""
    keep: int = key(2, at_least=0)
    """Number of checkpoints to keep, the newest ones, besides the best one (`eval.best`); 0: all."""
    max_engine_restarts: int = key(3, at_least=0, only={"fusion.deployment": OWN_CARDS}, refused=False)
    """Number of times that an engine whose process has died is replaced (cards that only generate, in the deployments
    `separate` and `hybrid`); the next death ends the run. 0: every death does."""
    loggers: list[str] = field(default_factory=lambda: ["tensorboard"])
    """Loggers of the metrics, beside metrics.jsonl: `tensorboard`, `wandb`, `mlflow`, `swanlab`, `trackio` (`pip
    install` the library), or your own class as `module:Class` (docs/telemetry.md). []: none."""
    sample_characters: int | None = key(1 << 16, at_least=64)
    """Maximum number of characters of a text in `samples.jsonl`: of a longer one start and end are kept, and the row
    has the field `abridged`. null: texts are whole."""
    profile_steps: list[int] = field(default_factory=list)
    """Steps of which every card writes a trace of torch's profiler (on Ascend torch_npu's) into `profile/` of the run's
    folder, such as [3,4]: from 1 to `steps`. []: none."""
    resume: str = key("false", one_of=("false", "true", "auto"))
    """`true`: resume from the newest checkpoint of the run with this name, which must have one. `auto`: resume, or
    start the run if it has no checkpoint: for jobs that a scheduler starts again. `false`: start a new run."""
    resume_changed: list[str] = field(default_factory=list)
    """Keys whose change a resume would refuse, such as [model.path] whose folder has other content: it resumes
    nevertheless. Groups in progress that depend on such a key end as `failed:resume_changed` (docs/stalesync.md)."""

    def __post_init__(self) -> None:
        self.resume = str(self.resume).lower()  # YAML's true and false arrive as booleans or as "True" and "False"

    def check(self, check: Checks) -> None:
        check.that("name", is_run_name(self.name), RUN_NAME)
        try:
            SaveInterval.parse(self.save_every)
        except ValueError as error:
            check.that("save_every", False, str(error))
        named = isinstance(self.loggers, list) and all(isinstance(name, str) for name in self.loggers)
        check.that("loggers", named, "a list of names")
        check_loggers(self.loggers)
        check.that(
            "profile_steps",
            isinstance(self.profile_steps, list)
            and all(type(step) is int and 1 <= step <= self.steps for step in self.profile_steps),
            f"a list of whole numbers from 1 to run.steps={self.steps}",
        )
        named = isinstance(self.resume_changed, list) and all(isinstance(name, str) for name in self.resume_changed)
        check.that("resume_changed", named, "a list of keys")
        may_resume = self.resume != "false" or not self.resume_changed
        check.that("resume_changed", may_resume, "[] without run.resume=true or auto")


@dataclass
class Config:
    """Everything a run depends on, by group."""

    run: RunConfig = key(factory=RunConfig, timeless=True)
    model: PolicyModelConfig = field(default_factory=PolicyModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    fusion: FusionConfig = field(default_factory=FusionConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    data: DataConfig = key(factory=DataConfig, timeless=True)
    reward: RewardConfig = key(factory=RewardConfig, timeless=True)
    environment: EnvironmentConfig = key(factory=EnvironmentConfig, timeless=True)
    eval: EvalConfig = key(factory=EvalConfig, timeless=True)
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
    def pace(self) -> "Pace | None":
        """The modelled cards whose step times emulated cards reproduce; None where they are not paced."""
        if self.device.pace is None:
            return None
        from fusion.costmodel.pace import Pace

        pace = Pace.load(self.device, self.cluster.hardware, SHAPES)
        shape = dataclasses.replace(pace.shape, adapters=self.training.lora.adapters)
        return dataclasses.replace(pace, shape=shape)

    def score_layout(self, model: ModelConfig, cards: tuple[int, ...]) -> Parallel:
        """Return the layout of the reference or reward ``model`` over the cards that host it; raise ValueError, by key,
        if it does not fit the model or the cards."""
        shape = self.parallel.score
        if shape.pp != 1:
            raise ValueError(
                f"parallel.score.pp={shape.pp}: expected 1, as reference and reward model have no pipeline stages"
            )
        if not model.num_experts:
            shape = dataclasses.replace(shape, ep=1, etp=1)
        layout = self._layout("parallel.score", cards, shape)
        layout.check(model, "parallel.score")
        return layout

    def resolved(self, kept: Mapping[str, Any] = MappingProxyType({})) -> "Config":
        """Return a copy in which what depends on other groups is resolved, as a run uses and saves it. ``kept``: what
        `automatic.resolve` is to keep of a run that is resumed."""
        from fusion.rollout.drafts.suffix_index import is_buildable  # which loads numpy

        correction = self.algorithm.correction or ("decoupled" if self.stalesync.max_staleness else "none")
        config = dataclasses.replace(
            self,
            algorithm=dataclasses.replace(self.algorithm, correction=correction),
            training=dataclasses.replace(self.training, lr=self.training.peak_lr),
        )
        return automatic.resolve(config, can_build=is_buildable(), kept=kept)

    @property
    def longest_sample(self) -> int:
        """Maximum number of tokens of a sample, prompt and response in total."""
        return self.data.max_prompt_length + self.rollout.max_response_length

    def validate(self, *, trains: bool = True) -> ModelConfig:
        """Validate every key and the constraints between keys; return the shape of the model. ``trains``: whether the
        job trains; else it only evaluates. Raise ValueError with the key to change, or both numbers that conflict."""
        resolved = self.resolved()
        for group in dataclasses.fields(resolved):
            getattr(resolved, group.name).validate()
        check_used(resolved)
        if trains:
            cross_checks.check_learns(self)
        if not self.model.path:
            raise ValueError("model.path='': expected a Hugging Face checkpoint folder")
        self.data.check_source()
        model = ModelConfig.from_hf(self.model.path)
        if model.num_labels:
            raise ValueError(
                f"model.path: {self.model.path} has a head of {model.num_labels} scores; expected a causal "
                "language model. A reward model is named by reward.model"
            )
        check_folder(self.model.path, model)
        self.train_layout.check(model, "parallel.train")
        self.infer_layout.check(model, "parallel.infer")
        check_supported(self, "training.backend")
        if self.training.backend == "megatron":
            check_megatron(model, self.train_layout)
        check_supported(self, "rollout.backend")
        if self.rollout.backend == "vllm":
            check_vllm(model.without_predictors, self.infer_layout.of_one_engine, self.device)
        self.deployment.engines(self.infer_layout.of_one_engine.world)
        if self.fusion.score_cards and self.deployment.reference:
            self.score_layout(model, self.deployment.reference)
        if self.reward.model:
            self._check_reward_model(self.reward.model)
        cross_checks.check_environment(self)
        cross_checks.check_minibatches(self)
        cross_checks.check_batches(resolved, model)
        self.eval.check_best(self.run.eval_prompts > 0)
        self.eval.check_answers(resolved.rollout, self.data.max_prompt_length, max_positions=model.max_positions)
        find_order(self.rollout.schedule.order)
        if self.rollout.drafts.is_on:
            from fusion.rollout.drafts.suffix_index import check_buildable  # which loads numpy

            check_buildable(self.rollout.drafts.source)
        cross_checks.check_generation(resolved)
        cross_checks.check_experts(self, model)
        cross_checks.check_adapters(self, model)
        if pace := self.pace:
            pace.check(self.train_layout, "parallel.train")
            pace.check(self.infer_layout, "parallel.infer")
        return model

    @property
    def converses(self) -> bool:
        """Whether the model speaks in several turns, with an environment between them."""
        return self.environment.name != "single"

    def scoring_s(self, num_samples: int) -> float:
        """Return the seconds of the run in which a rule scores samples in one batch (`reward.latency_s`)."""
        return -(-num_samples // self.reward.workers) * self.reward.latency_s / self.device.pace_speed

    @property
    def pools_suspended(self) -> bool:
        """Whether requests of engines whose cards train are continued meanwhile by the others."""
        shared, generate = {*self.deployment.shared}, {*self.deployment.generate}
        return bool(shared) and not generate <= shared and self.stalesync.max_staleness > 0

    def _check_reward_model(self, path: str) -> None:
        model = ModelConfig.from_hf(path, key="reward.model")
        check_folder(path, model, key="reward.model")
        if model.num_labels != 1:
            head = f"a head of {model.num_labels} labels" if model.num_labels else "no such head"
            raise ValueError(
                f"reward.model: {path} has {head}; expected a Qwen3ForSequenceClassification folder with num_labels=1"
            )
        self.score_layout(model, self.deployment.reward_model)

    def _layout(self, key: str, cards: tuple[int, ...], shape: LayoutConfig) -> Parallel:
        world, npus = len(cards), self.cluster.npus
        try:
            return Parallel(world, **dataclasses.asdict(shape))
        except ValueError as error:
            subset = f"; {world} of them in fusion.deployment={self.fusion.deployment}" if world < npus else ""
            raise ValueError(f"{key}: {error} (cluster.npus={npus}{subset})") from None

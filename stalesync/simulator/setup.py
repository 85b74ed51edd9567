"""Resolve a run's config into what its simulation needs: the same deployment, decisions and costs as the run's.

Config ─┬─► WorkerSpec ─► AdmissionSpec, InferenceShare      as `stalesync/loop/training_run.py`
        └─► Pace ─► EngineSpec, TrainerCost, SwitchCost      as `fusion/colocate/paced.py`
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fusion.colocate.share import InferenceShare
from fusion.colocate.spec import WorkerSpec
from fusion.costmodel.hardware import Hardware
from fusion.costmodel.pace import EngineCost, SwitchCost, TrainerCost
from fusion.costmodel.setup import SwitchLimits, limits_of
from fusion.rollout.length_history import MAX_ROWS
from stalesync.job.config import Config
from stalesync.job.decision_settings import admission_spec, worker_settings
from stalesync.policy.admission_spec import AdmissionSpec
from stalesync.simulator.drafts import DraftSpec
from stalesync.simulator.environment import EnvironmentSpec
from stalesync.simulator.sequence import EngineSpec
from stalesync.simulator.slow_dies import SlowDies


@dataclass(frozen=True)
class Overheads:
    """Seconds of the host's work in a run, not of the cards, on a machine that computes in about half of the time of
    the tests' reference (`tests/machine.py`). The controller is one process and the queue's actor is another: what they
    take grows with samples and cards, and nothing divides it."""

    controller_s_per_sample: float = 60e-6 / 8
    """CPU of the whole controller for one sample. docs/figures.md, "How costs grow": 40 to 60 us for a group of 8 at 64
    to 16,384 groups a step, synchronous; the largest counts."""
    call_s: float = 150e-6
    """CPU of the controller for one call of a card and its answer. Measured: a no-op call of a Ray actor, 512 at a
    time, Ray 2.60, on that machine: 153 us (8 at a time: 239 us). A stage of every card is one call for each."""
    queue_s_per_sample: float = 1 / 583e3 + 2 / 1.7e6 + 2 / 2.0e6
    """Time of the queue's actor for one sample. docs/figures.md, "How costs grow", at 100k to 1M samples in the queue:
    583k puts per second, 1.7M gets and 2.0M acks, which two tasks need."""
    arrival_s: float = 13.8e-3 / 2
    """Latency from a put to the controller. docs/figures.md, "The sample queue": put, get and ack of a small sample
    take 13.8 ms, of which the controller waits for about half."""


@dataclass(frozen=True)
class SimulationSetup:
    """``reference``, ``reward``: cost of the forward pass of the reference and of a reward model, None: there is none;
    ``environment``: None: requests are no conversations."""

    config: Config
    worker: WorkerSpec
    admission: AdmissionSpec
    share: InferenceShare
    engine: EngineSpec
    trainer: TrainerCost
    switch: SwitchCost
    reference: TrainerCost | None
    reward: TrainerCost | None
    environment: EnvironmentSpec | None = None
    slow_dies: SlowDies = SlowDies()
    overheads: Overheads = Overheads()

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        kv_tokens: int | None = None,
        environment: EnvironmentSpec | None = None,
        hardware: Hardware | None = None,
        slow_dies: SlowDies | None = None,
        drafts: DraftSpec | None = None,
    ) -> "SimulationSetup":
        """Resolve a config whose device has a pace. ``kv_tokens``: capacity of an attention rank's KV cache, in tokens
        of the run; None: no bound but that of the config; ``hardware``: the cards; None: those of the config;
        ``slow_dies``: None: there are none; ``drafts``: None: of the config, with the published acceptance. Raise
        ValueError if the layouts do not fit the cards or the modelled model, by key."""
        pace = config.pace
        assert pace is not None, "the device has no pace"
        pace = pace if hardware is None else replace(pace, hardware=hardware)
        train, infer = config.train_layout, config.infer_layout
        pace.check(train, "parallel.train")
        pace.check(infer, "parallel.infer")
        worker = replace(worker_settings(config, pace.shape.config), pace=pace, turns=environment is not None)
        rollout, pool, first = config.rollout, config.rollout.kv_pool, worker.deployment.generate[0]
        switches = limits_of(SwitchLimits, config.fusion)
        switch = SwitchCost.of(pace, train=train, infer=infer, infer_first=first, fusion=switches)
        cost = EngineCost(pace, worker.infer_of_one_engine, full_batch=rollout.engine.max_seqs)
        bounds = [tokens for tokens in (kv_tokens, rollout.engine.max_kv_tokens) if tokens is not None]
        engine = EngineSpec(
            cost=cost,
            num_ranks=worker.infer_of_one_engine.dp,
            limits=replace(rollout.engine, max_kv_tokens=min(bounds, default=None)),
            max_tokens=rollout.max_response_length,
            chunk_tokens=rollout.max_chunk_tokens or None,
            keeps_kv=pool.keeps_kv,
            pools_kv=pool.pools_kv,
            pools_suspended=pool.pools_kv and config.pools_suspended,
            adopt_s=switch.adopt_s,
            drafts=drafts or DraftSpec.of(rollout.drafts),
        )
        trainer = TrainerCost(pace, train, config.training.recompute, config.training.shares_prefixes)
        scoring = {*config.deployment.reward_model}
        reward = TrainerCost(pace, config.score_layout(pace.shape.config, tuple(scoring))) if scoring else None
        reference = replace(trainer, layout=worker.reference) if worker.reference else trainer
        admission = admission_spec(
            config,
            worker,
            scores_overlapped=not scoring & {*config.deployment.actor},
            filters=False,
            by_group=True,
            num_rows=config.data.rows or MAX_ROWS,
        )
        return cls(
            config=config,
            worker=worker,
            admission=admission if environment is None else environment.with_observations(admission),
            share=InferenceShare.of(rollout, len(worker.engines)),
            engine=engine,
            trainer=trainer,
            switch=switch,
            reference=reference if config.algorithm.kl_coef > 0 else None,
            reward=reward,
            environment=environment,
            slow_dies=slow_dies or SlowDies(),
        )

    def engine_of(self, dies: Sequence[int]) -> EngineSpec:
        """Return the spec of an engine on these dies, as slow as the slowest."""
        factor = self.slow_dies.factor(self.config.run.seed, dies)
        if factor == 1:
            return self.engine
        pace = self.engine.cost.pace
        slow = replace(self.engine.cost, pace=replace(pace, time_scale=pace.time_scale / factor))
        return replace(self.engine, cost=slow)

"""Launches a run: checks the config, starts Ray and the workers, runs the loop, reports, and always cleans up."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from distqueue.config import QueueOptions
from fusion.colocate import RewardModelSpec, WorkerSpec
from fusion.colocate.frozen.retokenize import same_tokenizer
from fusion.model import ModelConfig
from fusion.rewards import RewardPool
from fusion.rollout.detokenize import detokenizer_spec
from fusion.telemetry import LiveView, RunFolder, RunReport
from stalesync import savepoint
from stalesync.config import Config
from stalesync.prompts import PromptSource

log = logging.getLogger(__name__)


def launch(config: Config) -> Path:
    """Runs a job to its end; returns its folder.

    Raises:
        ValueError: the config is wrong; no worker was started.
        RunFailed: Ray did not start, a worker or the queue failed, or a checkpoint could not be written. Every process
            of the run has ended and its folder is readable.
        KeyboardInterrupt: Ctrl-C or SIGTERM; likewise.
    """
    model = config.validate()
    config = config.resolved()
    tokenizer = load_tokenizer(config.model.path, model)
    source = PromptSource(config.data, tokenizer, config.run.seed, held_out=config.run.eval_prompts)
    spec = worker_spec(config, model, tokenizer)
    with ExitStack() as stack:
        folder = stack.enter_context(
            RunFolder(config.run.dir, config.run.name, "resume" if config.run.resume else "suffix")
        )
        folder.write_config(asdict(config))
        print(folder.choice)
        report: dict[str, Any] = {"outcome": "failed"}
        stack.callback(lambda: RunReport.from_folder(folder.path, **report).show())
        stack.enter_context(_terminable())
        rule = stack.enter_context(RewardPool(config.reward)) if config.reward.kind != "model" else None
        try:
            _run(config=config, spec=spec, source=source, rule=rule, folder=folder, report=report)
            report["outcome"] = "finished"
        except KeyboardInterrupt:
            report["outcome"] = "stopped"
            raise
    return folder.path


def _run(
    *,
    config: Config,
    spec: WorkerSpec,
    source: PromptSource,
    rule: RewardPool | None,
    folder: RunFolder,
    report: dict[str, Any],
) -> None:
    from distqueue import DistQueue, QueueClosed
    from stalesync.cards import Cards
    from stalesync.failures import QueueFailed
    from stalesync.reward_sources import ModelReward, RuleReward
    from stalesync.scoring import Scorer
    from stalesync.training_run import TASKS, TrainingRun

    with ExitStack() as stack:
        view = stack.enter_context(LiveView(config.run.steps, title=folder.name))
        view.phase("start Ray and the workers")
        stack.enter_context(_ray(config.cluster.address))
        name = folder.name if config.cluster.address is None else f"{folder.name}-{os.getpid()}"
        checkpoint = savepoint.newest(folder.path) if folder.resumed else None
        options = queue_options(config, folder)
        queue = DistQueue.create(TASKS, options, name=name, checkpoint=savepoint.queue_of(checkpoint))
        stack.callback(queue.close)
        cards = stack.enter_context(Cards(spec, queue, config.cluster.stage_timeout_s))
        descriptions = cards.prepare()
        view.note(f"{spec.world} x {descriptions[0]}; trains in {spec.train}, generates in {spec.infer}")
        view.note(f"fusion.deployment={spec.deployment.name}: {spec.deployment.describe()}")
        reward_source = RuleReward(rule) if rule is not None else ModelReward(cards, spec)
        scorer = stack.enter_context(Scorer(reward_source, queue))
        run = TrainingRun(
            config=config,
            spec=spec,
            cards=cards,
            queue=queue,
            source=source,
            scorer=scorer,
            folder=folder,
            view=view,
        )
        if checkpoint is None:
            folder.rewind(0)
        else:
            run.restore(checkpoint)
            view.note(f"resuming from {checkpoint}, step {run.step}")
        try:
            report["answers"] = run.run()
        except QueueClosed as error:
            raise QueueFailed(error) from error
        report["notes"] = run.notes()
        report["next_steps"] = next_steps(config, folder)


def worker_spec(config: Config, model: ModelConfig, tokenizer: Any) -> WorkerSpec:
    """Returns the part of the config that every card needs.

    Raises:
        ValueError: the reward model has fewer tokens than the policy's tokenizer, whose ids it would have to read.
    """
    deployment, fusion = config.deployment, config.fusion
    reference = deployment.reference if fusion.score_cards else ()
    return WorkerSpec(
        seed=config.run.seed,
        steps=config.run.steps * config.algorithm.minibatches,
        model=config.model,
        deployment=deployment,
        train=config.train_layout,
        infer=config.infer_layout,
        fusion=fusion,
        rollout=config.rollout,
        training=config.training,
        algorithm=config.algorithm,
        device=config.device,
        reference=config.score_layout(model, reference) if reference else None,
        reward_model=_reward_model(config, tokenizer) if config.reward.model else None,
        topology=config.cluster.topology,
        across_nodes=config.cluster.address is not None,
        pace=config.pace,
        ahead=config.stalesync.max_staleness > 0,
        detokenizer=detokenizer_spec(config.model.path, tokenizer),
    )


def _reward_model(config: Config, tokenizer: Any) -> RewardModelSpec:
    path = config.reward.model
    assert path is not None
    model = ModelConfig.from_hf(path)
    retokenize = not same_tokenizer(config.model.path, path)
    if not retokenize and model.vocab_size < len(tokenizer):
        raise ValueError(
            f"reward.model: {path} has vocab_size={model.vocab_size} and no tokenizer; the policy's tokenizer has "
            f"{len(tokenizer)} tokens"
        )
    return RewardModelSpec(path, config.score_layout(model, config.deployment.reward_model), retokenize)


def queue_options(config: Config, folder: RunFolder) -> QueueOptions:
    """Returns the options of the run's queue. A resumed run restores the queue of its checkpoint: samples that a
    journal recorded later are removed and generated again."""
    options = QueueOptions(
        **asdict(config.queue),
        lease_s=config.cluster.stage_timeout_s,
    )
    if options.durability == "journal":
        options.journal = str((folder.path / "queue").resolve())
        shutil.rmtree(options.journal, ignore_errors=True)
    return options


def load_tokenizer(folder: str, model: ModelConfig) -> Any:
    """Loads the tokenizer of a model folder.

    Raises:
        ValueError: the folder has no tokenizer, or one with more tokens than the model's vocabulary.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"model.path: {folder} has no tokenizer that transformers can load: {error}") from None
    if len(tokenizer) > model.vocab_size:
        raise ValueError(
            f"model.path: the tokenizer of {folder} has {len(tokenizer)} tokens, the model "
            f"vocab_size={model.vocab_size}"
        )
    return tokenizer


def next_steps(config: Config, folder: RunFolder) -> list[str]:
    return [
        f"continue: run.name={folder.name} run.resume=true run.steps={2 * config.run.steps}",
        f"watch the curves: tensorboard --logdir {folder.path / 'tensorboard'}",
        "long answers with every step written out: bash recipes/long_answers.sh",
        "your own questions and answers: bash recipes/math_jsonl.sh FILE.jsonl MODEL_FOLDER",
        "your own reward: reward.path=FILE.py:FUNCTION",
    ]


@contextmanager
def _ray(address: str | None) -> Iterator[None]:
    """Joins a cluster, or starts Ray on this machine; at the block's end leaves the cluster, or stops Ray."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's default, 15, leaves the cards' host threads a thirtieth of a core beside any other process that wants it.
    os.environ.setdefault("RAY_worker_niceness", "0")
    import ray

    from stalesync.failures import RayNotStarted

    started = not ray.is_initialized()
    if started:
        quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
        if address is None:
            quiet |= {"include_dashboard": False, "num_cpus": max(2, os.cpu_count() or 1)}
        try:
            ray.init(address=address or "local", **quiet)  # None would join a cluster that already runs on this machine
        except Exception as error:  # Ray raises many types, some of them plain `Exception`
            ray.shutdown()
            raise RayNotStarted(address, error) from error
    try:
        yield
    finally:
        if started:
            ray.shutdown()


@contextmanager
def _terminable() -> Iterator[None]:
    """Handles SIGTERM like Ctrl-C inside the block, so that a scheduler's kill leaves a readable run and no process."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

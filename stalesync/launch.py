"""Launch a run: check the config, start Ray and the workers, run the loop, report, and always clean up."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from distqueue.config import QueueOptions
from fusion.colocate import Worker, WorkerSpec
from fusion.npu.config import claim, table_of
from fusion.npu.device import check_cards
from fusion.resources import RECIPES, as_called
from fusion.rewards import RewardPool, Term
from fusion.rewards.terms import pools_of
from fusion.telemetry import LiveView, RunFolder, report_run
from fusion.telemetry.loggers import find_loggers
from fusion.telemetry.run_contents import complete_checkpoints
from stalesync.evaluation.files import EvalFile
from stalesync.job import automatic, savepoint
from stalesync.job.config import Config
from stalesync.job.resume import (
    OPERATORS,
    Reopened,
    check_changes,
    check_resume,
    check_weights,
    inputs_of,
    keep_operators,
    kept_automatic,
    new_folder,
    reopen,
)
from stalesync.job.resume_rules import ResumeChanges
from stalesync.job.tokenizer_folder import describe_masked
from stalesync.job.workload import describe, estimate, knows_cards
from stalesync.prepare import prepare, start_environments, start_rewards
from stalesync.process.failures import naming_queue
from stalesync.process.garbage import share_arenas
from stalesync.process.process_log import keeping_warnings, logging_to
from stalesync.process.ray_cluster import check_token, ray_cluster
from stalesync.process.ray_folder import root_of
from stalesync.process.ray_guard import Report
from stalesync.process.run_log import Progress, RunLog
from stalesync.process.stopping import acknowledging, blocking_signals, holding, ignore_stops, stoppable
from stalesync.prompts import PromptSource
from stalesync.prompts.environments import Environments

if TYPE_CHECKING:
    from distqueue import DistQueue
    from stalesync.cards.cards import Cards
    from stalesync.scoring.scoring import Scorer

log = logging.getLogger(__name__)
IMPORTED_LATE = """ray distqueue.client stalesync.cards.cards stalesync.evaluation.evaluation
stalesync.process.host_check stalesync.scoring.sources stalesync.scoring.scoring
stalesync.cards.servers stalesync.loop.build""".split()
"""What a run needs. Imported before it has a folder, when a signal can still end the process at once: an exception that
a signal raises in an import may be lost, or leave half of a module"""


def launch(config: Config, *, evaluates: str = "", step: int = 0) -> Path:
    """Run a job to its end; return its folder. ``evaluates``: what is evaluated, in words: the weights after ``step``,
    and no step is run; "": the job trains. Raise ValueError if the config is wrong, another run has the folder, or the
    run cannot resume: no worker was started; RunFailed if Ray did not start, a worker or the queue failed, too many
    rewards failed, or a checkpoint could not be written; KeyboardInterrupt for Ctrl-C, `Stopped` for SIGTERM and
    SIGHUP. Then every process of the run has ended and its folder is readable. Any other exception after the folder has
    been created is a failure of the run, too; `run.log` and `error.json` in the folder describe it (`run_log.py`), and
    a note of the exception says where."""
    trains = not evaluates
    model = config.validate(trains=trains)
    check_resume(config.run)
    stated, config = config, config.resolved(kept_automatic(config.run))
    early: list[logging.LogRecord] = []
    with keeping_warnings(early):
        _, source, opened, spec = prepare(config, model)
        if trains and knows_cards(config):
            estimate(config, model)
    check_token(config.cluster.address)
    if config.cluster.address is None:
        root_of(os.environ)
        check_cards(config.device.kind)
    for name in IMPORTED_LATE:
        import_module(name)
    loggers = find_loggers(config.run.loggers)
    share_arenas()
    with stoppable(), ExitStack() as stack, acknowledging():
        report: dict[str, Any] = {"outcome": "failed", "evaluated": evaluates}
        inputs = inputs_of(config, spec.masked_ids) if trains else {}
        earlier = reopen(config.run)
        if earlier is not None:
            stack.enter_context(earlier.folder)
            earlier = check_changes(earlier, config, source=source, inputs=inputs)
            config = keep_operators(earlier, config)
        with keeping_warnings(early):
            rule, terms, files, _ = start_rewards(stack, config, source, opened)
            environments, _ = start_environments(stack, config, source, spec)
        with holding():  # a run that has a folder reports how it ended
            folder = stack.enter_context(new_folder(config.run)) if earlier is None else earlier.folder
            folder.write_config(asdict(config))
            folder.sample_characters = config.run.sample_characters
            stack.callback(lambda: report_run(folder.path, **report))
            progress, logs = Progress(), RunLog(folder.path)
            report["notes"] = stack.enter_context(logging_to(logs.controller, early))
            stack.enter_context(logs.recording(progress, report, world=spec.world, settle=ignore_stops))
        if line := automatic.describe(stated, config):
            print(line)
        if trains and config.rollout.sampling.forced_median is not None:
            print(describe(config))
        if trains and config.training.lora.rank:
            print(config.training.describe_lora())
        if trains and model.num_experts:
            print(config.training.describe_balancing(model.router_aux_coef))
        folder.open_loggers(loggers, asdict(config))
        Launch(
            config=config,
            spec=spec,
            source=source,
            rule=rule,
            folder=folder,
            logs=logs,
            progress=progress,
            report=report,
            earlier=earlier or Reopened(folder),
            inputs=inputs,
            files=files,
            terms=terms,
            environments=environments,
            trains=trains,
            step=step,
        ).run()
    return folder.path


@dataclass(kw_only=True)
class Launch:
    """A job whose config and data are checked, and whose rewards have started: what is left is Ray and the cards.
    ``rule``, ``terms``: of the reward (`start_rewards`); ``progress``, ``report``: how far it has come, and how it
    ended; ``earlier``: the run that it resumes; ``inputs``: what its checkpoints depend on; ``trains``: else it
    evaluates the weights that it begins with, which are those after ``step``."""

    config: Config
    spec: WorkerSpec
    source: PromptSource
    rule: RewardPool | None
    folder: RunFolder
    logs: RunLog
    progress: Progress
    report: dict[str, Any]
    earlier: Reopened
    inputs: Mapping[str, Any] = field(default_factory=dict)
    files: Sequence[EvalFile] = ()
    terms: Sequence[Term] = ()
    environments: Environments | None = None
    trains: bool = True
    step: int = 0

    def run(self) -> None:
        """Start Ray and the cards, run the loop, and end all of them again."""
        from stalesync.evaluation import Evaluation
        from stalesync.loop.build import build_run

        folder, progress = self.folder, self.progress
        with ExitStack() as stack, acknowledging():
            view = self._open_view(stack)
            check_ray, queue = self._start_ray(stack, view)
            self._resolve_operators(view)
            config, earlier = self.config, self.earlier
            cards, checksums = self._start_cards(stack, view, check_ray, queue)
            run = build_run(
                config=config,
                spec=self.spec,
                cards=cards,
                queue=queue,
                source=self.source,
                scorer=self._start_scorer(stack, cards, queue),
                environments=self.environments,
                folder=folder,
                view=view,
                evaluation=Evaluation(
                    config.eval,
                    self.files,
                    held_out=config.run.eval_prompts > 0,
                    max_failed_share=config.reward.max_failed_share,
                ),
                inputs={**self.inputs, "checksums": checksums},
            )
            progress.current_step = lambda: min(run.step + 1, config.run.steps)
            if earlier.checkpoint is not None:
                progress.stage = "resume"
                run.checkpoints.restore(earlier)
            for line in folder.notes:
                view.note(line)
            progress.stage = "train"
            # Also here, because nothing below can be relied on to end when Ray has failed.
            stack.enter_context(self.logs.recording(progress, self.report, world=self.spec.world))
            with naming_queue(check_ray):
                try:
                    run.run() if self.trains else run.run_evaluation(self.step)
                except KeyboardInterrupt:
                    self.report["next_steps"] = [how_to_resume(folder)] if self.trains else []
                    raise
                finally:
                    self.report["notes"] += folder.notes
            self.report["notes"] += [*earlier.notes, *run.notes()]
            self.report["next_steps"] = next_steps(config, folder) if self.trains else []

    def _open_view(self, stack: ExitStack) -> LiveView:
        checkpoint = self.earlier.checkpoint
        steps_done = 0 if checkpoint is None else savepoint.read(checkpoint)["step"]
        with blocking_signals():  # in the view's thread: the main thread is to receive them
            steps = self.config.run.steps
            view = stack.enter_context(LiveView(steps, title=self.folder.name, steps_done=steps_done))
        for line in self.earlier.notes:
            view.note(line)
        return view

    def _start_ray(self, stack: ExitStack, view: LiveView) -> tuple[Callable[[], None], DistQueue]:
        """Start Ray and the queue; return a health check of Ray's processes, and the queue."""
        from distqueue import DistQueue
        from distqueue.payload.sweep import memory
        from stalesync.loop.update import TASKS
        from stalesync.process.host_check import check_hosts

        config, folder = self.config, self.folder
        view.phase("start Ray and the workers")
        self.progress.stage = "start Ray"
        report_end = Report(str(folder.path), self.spec.world)
        roots: list[Path | str] = [memory(), *filter(None, (config.queue.spill, config.rollout.kv_pool.spill))]

        def show_report(outcome: str) -> None:
            view.__exit__(None, None, None)
            report_run(folder.path, outcome=outcome)
            sys.stdout.flush()

        address = config.cluster.address
        check_ray = stack.enter_context(ray_cluster(address, self.logs.ray, roots, report_end, show_report))
        self.progress.stage = "compare the hosts"
        models = {"model.path": config.model.path, "reward.model": config.reward.model}
        check_hosts(folder.path, models, config.cluster.stage_timeout_s)
        stack.enter_context(naming_queue(check_ray))
        queue = DistQueue.create(
            TASKS,
            queue_options(config, folder),
            name=folder.name if address is None else f"{folder.name}-{os.getpid()}",
            checkpoint=savepoint.queue_of(None if self.earlier.ended else self.earlier.checkpoint),
        )
        stack.callback(queue.close)
        return check_ray, queue

    def _resolve_operators(self, view: LiveView) -> None:
        """Save the cards' table of operators, whose kind only Ray knows; report another than the checkpoint's."""
        import ray

        kind, _ = claim(self.config.device.kind, ray.cluster_resources())
        before, operators = self.config.device.operators, table_of(kind, self.spec.device.operators)
        if self.trains:
            self.inputs = {**self.inputs, "settings": {**self.inputs["settings"], OPERATORS: operators}}
        if operators == before:
            return
        if before != "auto":
            line = ResumeChanges({OPERATORS: (before, operators)}, {}, 0).describe()
            self.earlier = replace(self.earlier, notes=(*self.earlier.notes, line))
            view.note(line)
        self.config = replace(self.config, device=replace(self.config.device, operators=operators))
        self.folder.write_config(asdict(self.config), keep=before != "auto")

    def _start_cards(
        self, stack: ExitStack, view: LiveView, check_ray: Callable[[], None], queue: DistQueue
    ) -> tuple[Cards, Any]:
        """Start the workers, which load the model; return them, and the checksums of its weights."""
        from stalesync.cards.cards import Cards
        from stalesync.cards.servers import kv_servers, text_server

        self.progress.stage = "start the workers"
        config, spec = self.config, self.spec
        cards = stack.enter_context(
            Cards(
                spec,
                queue,
                config.cluster.stage_timeout_s,
                self.logs.of_rank,
                health_checks=[check_ray],
                text_server=stack.enter_context(text_server(spec)),
                max_engine_restarts=config.run.max_engine_restarts,
                kv_peers=stack.enter_context(kv_servers(spec)),
            )
        )
        self.progress.hosts = [str(host) for host in cards.hosts]
        descriptions = cards.prepare()
        checksums = check_weights(self.earlier, config.run, cards.on().call(Worker.checksums), view.note)
        view.note(f"{spec.world} x {descriptions[0]}; trains in {spec.train}, generates in {spec.infer}")
        for file in self.files:
            if file.rows is not None:
                view.note(f"evaluates {file.name}: {file.rows.describe()}")
        view.note(f"fusion.deployment={spec.deployment.name}: {spec.deployment.describe()}")
        for line in describe_masked(spec.masked_ids, spec.policy().vocab_size):
            view.note(line)
        return cards, checksums

    def _start_scorer(self, stack: ExitStack, cards: Cards, queue: DistQueue) -> Scorer:
        from stalesync.scoring.scoring import Scorer
        from stalesync.scoring.sources import EnvironmentReward, ModelReward, RewardSource, RuleReward, WeightedReward

        config, rule, terms = self.config, self.rule, self.terms
        source: RewardSource
        if config.reward.kind == "environment":
            assert self.environments is not None
            source = EnvironmentReward(self.environments.reward_of)
        else:
            source = RuleReward(rule, config.scoring_s) if rule is not None else ModelReward(cards, self.spec)
        if terms:
            source = WeightedReward(source, config.reward.title, terms)
        needs_groups = any(pool.needs_group for pool in pools_of(rule, terms))
        group_size = config.algorithm.group_size if needs_groups else None
        return stack.enter_context(
            Scorer(
                source,
                queue,
                config.reward.max_failed_share,
                group_size,
                turns=self.spec.turns,
                conversation=None if self.environments is None else self.environments.of,
            )
        )


def queue_options(config: Config, folder: RunFolder) -> QueueOptions:
    """Return the options of the run's queue. A resumed run restores the queue of its checkpoint: samples that a
    journal recorded later are removed and generated again."""
    options = QueueOptions(**asdict(config.queue), lease_s=config.cluster.stage_timeout_s)
    if options.durability == "journal":
        options.journal = str((folder.path / "queue").resolve())
        shutil.rmtree(options.journal, ignore_errors=True)
    return options


def how_to_resume(folder: RunFolder) -> str:
    """Return how a run that was stopped continues."""
    saved = complete_checkpoints(folder.path)
    if not saved:
        return "no checkpoint was saved: the same command begins again"
    return f"continue from step {max(saved)}: the same command with {quote(f'run.name={folder.name}')} run.resume=true"


def next_steps(config: Config, folder: RunFolder) -> list[str]:
    recipes = [
        "long answers with every step written out: bash recipes/long_answers.sh",
        "your own questions and answers: bash recipes/math_jsonl.sh FILE.jsonl MODEL_FOLDER",
    ]
    rate = ""
    if config.training.schedule == "cosine":
        stated = config.training.peak_lr / 2
        rate = f" training.lr={stated:g} (its rate has decayed to 0; it decays again from the one stated)"
    return [
        f"continue: {quote(f'run.name={folder.name}')} run.resume=true run.steps={2 * config.run.steps}{rate}",
        as_called(f"compare with another run: python scripts/report.py {quote(str(folder.path))} OTHER_RUN"),
        *(recipes if (RECIPES / "long_answers.sh").is_file() else ()),  # a wheel has none
        "your own reward: reward.path=FILE.py:FUNCTION",
    ]

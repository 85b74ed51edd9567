"""Build a training run from its config, its cards and its queue."""

from collections.abc import Mapping
from typing import Any

from distqueue import DistQueue
from fusion.colocate import WorkerSpec
from fusion.telemetry import LiveView, RunFolder
from fusion.training.algorithms import Algorithm, make_algorithm
from stalesync.cards.cards import Cards
from stalesync.evaluation import Evaluation
from stalesync.job.config import Config
from stalesync.job.control import ControlDesk
from stalesync.job.decision_settings import admission_spec, conversation_spec
from stalesync.loop.checkpoints import Checkpoints, Saver
from stalesync.loop.controller import Controller
from stalesync.loop.conversing import Conversing
from stalesync.loop.engines import Engines
from stalesync.loop.evaluator import Evaluator
from stalesync.loop.generation import Generation
from stalesync.loop.groups import Groups
from stalesync.loop.reference_stream import ReferenceStream
from stalesync.loop.step import StepRows
from stalesync.loop.step_metrics import StepMetrics
from stalesync.loop.training_run import TrainingRun
from stalesync.loop.update import Updater
from stalesync.policy.admission import Admission
from stalesync.policy.pacing import PaceTally
from stalesync.policy.reward_history import RewardHistory
from stalesync.policy.staleness import StalenessLedger
from stalesync.process.hosts import number_hosts
from stalesync.prompts import PromptSource
from stalesync.prompts.environments import Environments
from stalesync.scoring.scoring import Scorer


def build_run(
    *,
    config: Config,
    spec: WorkerSpec,
    cards: Cards,
    queue: DistQueue,
    source: PromptSource,
    scorer: Scorer,
    folder: RunFolder,
    view: LiveView,
    evaluation: Evaluation,
    inputs: Mapping[str, Any],
    environments: Environments | None = None,
) -> TrainingRun:
    """Return a run that has not begun. ``inputs``: what it depends on (`inputs_of`), kept in its checkpoints."""
    algorithm = make_algorithm(config.algorithm, config.rollout.max_response_length)
    admission = _admission(config, spec, cards, source, scorer, algorithm)
    rewards = RewardHistory(admission.spec.num_rows) if config.rollout.drafts.from_history else None
    step_metrics, saver, pace = StepMetrics(spec.world, folder), Saver(), PaceTally(spec.pace)
    cards.health_checks.append(saver.check)
    size = config.algorithm.group_size
    stream = ReferenceStream(spec=spec, cards=cards, record_reports=step_metrics.take)
    reference = stream if config.algorithm.kl_coef > 0 else None
    groups = Groups(
        size, admission, scorer.prompts, algorithm, queue=queue, folder=folder, reference=reference, rewards=rewards
    )
    generation = Generation(spec, cards, scorer.prompts, step_metrics.take, scorer.wake, rewards)
    held: dict[str, Any] = dict(cards=cards, queue=queue)
    conversing = None
    if environments is not None:
        conversing = Conversing(
            **held,
            environments=environments,
            spec=conversation_spec(config),
            engines=spec.engines,
            groups=groups,
            scorer=scorer,
            source=source,
            data=config.data,
        )
        environments.wake, generation.branch_of = scorer.wake, conversing.conversations.branch_of
    updater = Updater(
        spec=spec, algorithm=algorithm, record_reports=step_metrics.take, reference=reference, view=view, **held
    )
    rows = StepRows(
        **held,
        view=view,
        ledger=admission.ledger,
        source=source,
        updater=updater,
        step_metrics=step_metrics,
        folder=folder,
        pace=pace,
        take_save_metrics=saver.metrics,
    )
    parts = held | dict(spec=spec, admission=admission, groups=groups, generation=generation, step_metrics=step_metrics)
    loop = Controller(
        **parts,
        config=config,
        source=source,
        scorer=scorer,
        engines=Engines(**parts, note=view.note),
        updater=updater,
        desk=ControlDesk(folder.path, config),
        rows=rows,
        folder=folder,
        view=view,
        conversing=conversing,
    )
    return TrainingRun(
        loop=loop,
        evaluator=Evaluator(evaluation=evaluation, loop=loop),
        checkpoints=Checkpoints(loop=loop, evaluation=evaluation, inputs=inputs, saver=saver),
    )


def _admission(
    config: Config, spec: WorkerSpec, cards: Cards, source: PromptSource, scorer: Scorer, algorithm: Algorithm
) -> Admission:
    settings = admission_spec(
        config,
        spec,
        scores_overlapped=scorer.concurrent,
        filters=algorithm.filters,
        by_group=algorithm.by_group,
        num_rows=source.num_rows or 0,
        machines=number_hosts(cards.hosts),
    )
    stalesync = config.stalesync
    return Admission(
        settings, StalenessLedger(stalesync.max_staleness, config.data.prompts_per_step, stalesync.train_tokens)
    )

"""Launch a run: check the config, start Ray and the workers, run the loop, report, and always clean up."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distqueue.config import QueueOptions
from fusion.colocate import RewardModelSpec, Worker, WorkerSpec
from fusion.colocate.frozen.retokenize import same_tokenizer
from fusion.model import ModelConfig
from fusion.npu.device import check_cards
from fusion.resources import RECIPES, as_called
from fusion.rewards import RewardPool, check_required_fields
from fusion.rollout.detokenize import detokenizer_spec
from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.telemetry import LiveView, RunFolder, report_run
from fusion.telemetry.loggers import find_loggers
from fusion.telemetry.run_folder import complete_checkpoints
from stalesync.evaluation.files import EvalFile, OpenedFile, open_files, with_rewards
from stalesync.job import savepoint
from stalesync.job.config import Config
from stalesync.job.resume import Reopened, check_changes, check_resume, check_weights, new_folder, reopen
from stalesync.job.run_inputs import inputs_of
from stalesync.job.tokenizer_folder import describe_masked, end_token_ids, load_tokenizer, masked_ids, num_ids
from stalesync.job.workload import describe
from stalesync.process.garbage import share_arenas
from stalesync.process.process_log import keeping_warnings, logging_to
from stalesync.process.ray_cluster import check_token, ray_cluster
from stalesync.process.ray_folder import root_of
from stalesync.process.ray_guard import Report
from stalesync.process.run_log import Progress, RunLog
from stalesync.process.stopping import acknowledging, blocking_signals, holding, ignore_stops, stoppable
from stalesync.prompts import ChatTemplate, PromptSource
from stalesync.scoring.terms import Term, call_once, check_reference_answers, check_term_fields, start_terms

if TYPE_CHECKING:
    from stalesync.loop.training_run import TrainingRun

log = logging.getLogger(__name__)

IMPORTED_LATE = """ray distqueue.client stalesync.cards.cards stalesync.evaluation.evaluation
stalesync.process.host_check stalesync.scoring.sources stalesync.scoring.scoring
stalesync.cards.text_server stalesync.loop.training_run""".split()
"""What a run needs. Imported before it has a folder, when a signal can still end the process at once: an exception that
a signal raises in an import may be lost, or leave half of a module"""


def launch(config: Config, *, evaluates: str = "") -> Path:
    """Runs a job to its end; returns its folder.

    Args:
        evaluates: what is evaluated, in words: no step is run; "": the job trains.

    Raises:
        ValueError: the config is wrong, another run has the folder, or the run cannot resume; no worker was started.
        RunFailed: Ray did not start, a worker or the queue failed, too many rewards failed, or a checkpoint could not
            be written. Every process of the run has ended and its folder is readable.
        KeyboardInterrupt: Ctrl-C, or `Stopped` for SIGTERM and SIGHUP; likewise.

    Any other exception after the folder has been created is a failure of the run, too; `run.log` and `error.json` in
    the folder describe it (`run_log.py`), and a note of the exception says where.
    """
    trains = not evaluates
    model = config.validate(trains=trains)
    check_resume(config.run)
    config = config.resolved()
    early: list[logging.LogRecord] = []
    with keeping_warnings(early):
        _, source, opened, spec = prepare(config, model)
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
        with keeping_warnings(early):
            rule, terms, files, _ = start_rewards(stack, config, source, opened)
        with holding():  # a run that has a folder reports how it ended
            folder = stack.enter_context(new_folder(config.run)) if earlier is None else earlier.folder
            folder.write_config(asdict(config))
            stack.callback(lambda: report_run(folder.path, **report))
            progress, logs = Progress(), RunLog(folder.path)
            report["notes"] = stack.enter_context(logging_to(logs.controller, early))
            stack.enter_context(logs.recording(progress, report, world=spec.world, settle=ignore_stops))
        if trains:
            print(describe(config))
        if trains and model.num_experts:
            print(config.training.describe_balancing(model.router_aux_coef))
        folder.open_loggers(loggers, asdict(config))
        _run(
            config=config,
            spec=spec,
            source=source,
            rule=rule,
            folder=folder,
            logs=logs,
            progress=progress,
            report=report,
            earlier=earlier,
            inputs=inputs,
            files=files,
            terms=terms,
            trains=trains,
        )
    return folder.path


def prepare(config: Config, model: ModelConfig) -> tuple[Any, PromptSource, list[OpenedFile], WorkerSpec]:
    """Reads the tokenizer and every row of a job whose config is valid, and logs what its user may not expect. Returns
    tokenizer, prompts, the files of its evaluations, and what the cards need.

    Raises:
        ValueError: something cannot be used, by key.
    """
    tokenizer = load_tokenizer(config.model.path, model)
    source = PromptSource(config.data, tokenizer, config.run.seed, held_out=config.run.eval_prompts)
    opened = open_files(config, tokenizer)
    for line in source.template.describe(end_token_ids(tokenizer, model, config.model.path)):
        log.warning("model.path: %s", line)
    spec = worker_spec(config, model, tokenizer)
    warn_if_endless(config, spec)
    return tokenizer, source, opened, spec


def start_rewards(
    stack: ExitStack, config: Config, source: PromptSource, opened: Sequence[OpenedFile], num_answers: int = 64
) -> tuple[RewardPool | None, list[Term], list[EvalFile], list[str]]:
    """Starts the processes of a job's rewards, which end with ``stack``, checks the fields of the data and up to
    ``num_answers`` of its reference answers, and calls each reward once. Returns the reward itself (None: a reward
    model), its terms, the files of the evaluations, and a line for each call.

    Raises:
        ValueError: a reward cannot be loaded, lacks a field, returns no reward, or can match no reference answer.
    """
    rule = stack.enter_context(RewardPool(config.reward)) if config.reward.kind != "model" else None
    if rule is not None:
        check_required_fields(config.reward, rule.required_fields, source.fields)
    terms = start_terms(config.reward, lambda reward, spec: stack.enter_context(RewardPool(reward, spec)))
    check_term_fields(config.reward, terms, source.fields)
    for line in check_reference_answers(rule, terms, source, num_answers):
        log.warning("%s", line)
    num_held_out = config.run.eval_prompts
    held_out = source.evaluation(num_held_out) if num_held_out else []
    files = with_rewards(
        config,
        opened,
        held_out=held_out,
        held_out_rows=source.counts(held_out, num_held_out),
        rule=rule,
        terms=terms,
        start=lambda reward: stack.enter_context(RewardPool(reward)),
        num_answers=num_answers,
    )
    (prompt,) = source.sample(1)
    asked = {file.pool: (f"eval.files: {file.name!r}: ", file.prompts[0]) for file in files}
    asked |= {term.pool: (f"reward.terms[{index}] ({term.spec.name}): ", prompt) for index, term in enumerate(terms)}
    asked[rule] = "", prompt
    pools = [(pool, *asked[pool]) for pool in reversed(asked) if pool is not None]
    group_size = config.algorithm.group_size
    return rule, terms, files, [call_once(pool, one, group_size=group_size, key=key) for pool, key, one in pools]


def _run(
    *,
    config: Config,
    spec: WorkerSpec,
    source: PromptSource,
    rule: RewardPool | None,
    folder: RunFolder,
    logs: RunLog,
    progress: Progress,
    report: dict[str, Any],
    earlier: Reopened | None = None,
    inputs: Mapping[str, Any],
    files: Sequence[EvalFile] = (),
    terms: Sequence[Term] = (),
    trains: bool = True,
) -> None:
    from distqueue import DistQueue
    from distqueue.payload.sweep import memory
    from stalesync.cards.cards import Cards
    from stalesync.cards.kv_servers import kv_servers
    from stalesync.cards.text_server import text_server
    from stalesync.evaluation import Evaluation
    from stalesync.loop.training_run import TASKS, TrainingRun
    from stalesync.process.host_check import check_hosts
    from stalesync.scoring.scoring import Scorer
    from stalesync.scoring.sources import ModelReward, RewardSource, RuleReward, WeightedReward

    with ExitStack() as stack, acknowledging():
        earlier = earlier or Reopened(folder)
        checkpoint, notes = earlier.checkpoint, earlier.notes
        steps_done = 0 if checkpoint is None else savepoint.read(checkpoint)["step"]
        with blocking_signals():  # in the view's thread: the main thread is to receive them
            view = stack.enter_context(LiveView(config.run.steps, title=folder.name, steps_done=steps_done))
        for line in notes:
            view.note(line)
        view.phase("start Ray and the workers")
        progress.stage = "start Ray"
        report_end = Report(str(folder.path), spec.world)
        roots: list[Path | str] = [memory(), *filter(None, (config.queue.spill, config.rollout.kv_spill))]

        def show_report(outcome: str) -> None:
            view.__exit__(None, None, None)
            report_run(folder.path, outcome=outcome)
            sys.stdout.flush()

        check_ray = stack.enter_context(ray_cluster(config.cluster.address, logs.ray, roots, report_end, show_report))
        progress.stage = "compare the hosts"
        models = {"model.path": config.model.path, "reward.model": config.reward.model}
        check_hosts(folder.path, models, config.cluster.stage_timeout_s)
        stack.enter_context(naming_queue(check_ray))
        name = folder.name if config.cluster.address is None else f"{folder.name}-{os.getpid()}"
        options = queue_options(config, folder)
        queue = DistQueue.create(
            TASKS, options, name=name, checkpoint=savepoint.queue_of(None if earlier.ended else checkpoint)
        )
        stack.callback(queue.close)
        progress.stage = "start the workers"
        texts = stack.enter_context(text_server(spec))
        timeout_s = config.cluster.stage_timeout_s
        peers = stack.enter_context(kv_servers(spec))
        restarts = config.run.max_engine_restarts
        cards = stack.enter_context(Cards(spec, queue, timeout_s, logs.of_rank, [check_ray], texts, restarts, peers))
        progress.hosts = [str(host) for host in cards.hosts]
        descriptions = cards.prepare()
        weights = check_weights(earlier, config.run, cards.on().call(Worker.checksums), view.note)
        view.note(f"{spec.world} x {descriptions[0]}; trains in {spec.train}, generates in {spec.infer}")
        for file in files:
            if file.rows is not None:
                view.note(f"evaluates {file.name}: {file.rows.describe()}")
        view.note(f"fusion.deployment={spec.deployment.name}: {spec.deployment.describe()}")
        for line in describe_masked(spec.masked_ids, spec.policy().vocab_size):
            view.note(line)
        reward_source: RewardSource = RuleReward(rule) if rule is not None else ModelReward(cards, spec)
        if terms:
            reward_source = WeightedReward(reward_source, config.reward.title, terms)
        needs_groups = any(pool.needs_group for pool in (rule, *(term.pool for term in terms)) if pool is not None)
        group_size = config.algorithm.group_size if needs_groups else None
        scorer = stack.enter_context(Scorer(reward_source, queue, config.reward.max_failed_share, group_size))
        run = TrainingRun(
            config=config,
            spec=spec,
            cards=cards,
            queue=queue,
            source=source,
            scorer=scorer,
            folder=folder,
            view=view,
            evaluation=Evaluation(
                config.eval,
                files,
                held_out=config.run.eval_prompts > 0,
                max_failed_share=config.reward.max_failed_share,
            ),
            inputs={**inputs, "weights": weights},
        )
        progress.current_step = lambda: min(run.step + 1, config.run.steps)
        progress.stage = "train" if checkpoint is None else "resume"
        if checkpoint is not None:
            _resume(run, earlier, spec)
        for line in folder.notes:
            view.note(line)
        progress.stage = "train"
        # Also here, because nothing below can be relied on to end when Ray has failed.
        stack.enter_context(logs.recording(progress, report, world=spec.world))
        with naming_queue(check_ray):
            try:
                run.run() if trains else run.run_evaluation()
            except KeyboardInterrupt:
                report["next_steps"] = [how_to_resume(folder)] if trains else []
                raise
            finally:
                report["notes"] += folder.notes
        report["notes"] += [*notes, *run.notes()]
        report["next_steps"] = next_steps(config, folder) if trains else []


def _resume(run: TrainingRun, earlier: Reopened, spec: WorkerSpec) -> None:
    """Restores the run from a checkpoint."""
    checkpoint = earlier.checkpoint
    assert checkpoint is not None
    run.restore(earlier)
    run.view.note(f"resuming from {checkpoint}, step {run.step}")
    if (saved_in := savepoint.layout_of(checkpoint)) != spec.train:
        run.view.note(f"it was saved by {saved_in.world} cards in {saved_in}: masters and moments are resharded")


@contextmanager
def naming_queue(check_ray: Callable[[], None]) -> Iterator[None]:
    """Raises the end of the queue as `QueueFailed`, unless it is a consequence of the end of Ray.

    Raises:
        RayEnded: by ``check_ray``.
        QueueFailed: the queue has ended, or there is no space for it.
    """
    from distqueue import QueueClosed, StorageFull
    from stalesync.process.failures import QueueFailed

    try:
        yield
    except (QueueClosed, StorageFull) as error:
        check_ray()
        raise QueueFailed(error) from error


def worker_spec(config: Config, model: ModelConfig, tokenizer: Any) -> WorkerSpec:
    """Returns the part of the config that every card needs.

    Raises:
        ValueError: the reward model has fewer tokens than the policy's tokenizer, whose ids it would have to read.
    """
    deployment, fusion = config.deployment, config.fusion
    turn_end = ChatTemplate(config.data, tokenizer).turn_end
    ends = end_token_ids(tokenizer, model, config.model.path, turn_end)
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
        pace=config.pace,
        ahead=config.stalesync.max_staleness > 0,
        detokenizer=detokenizer_spec(config.model.path, tokenizer, ends),
        kv_pool=_kv_pool(config) if config.rollout.pools_kv else None,
        masked_ids=masked_ids(tokenizer, model, ends),
    )


def _kv_pool(config: Config) -> KVPoolSpec:
    return KVPoolSpec.of(config.rollout, run=secrets.token_hex(8), takes_suspended=config.pools_suspended)


def _reward_model(config: Config, tokenizer: Any) -> RewardModelSpec:
    path = config.reward.model
    assert path is not None
    model = ModelConfig.from_hf(path)
    retokenize = not same_tokenizer(config.model.path, path)
    if not retokenize and model.vocab_size < num_ids(tokenizer):
        raise ValueError(
            f"reward.model: {path} has vocab_size={model.vocab_size} and no tokenizer; the policy's tokenizer has "
            f"{num_ids(tokenizer)} tokens"
        )
    return RewardModelSpec(path, config.score_layout(model, config.deployment.reward_model), retokenize)


def warn_if_endless(config: Config, spec: WorkerSpec) -> None:
    """Warns if nothing but the limit ends a response."""
    rollout = config.rollout
    assert spec.detokenizer is not None
    if not (spec.detokenizer.end_token_ids or rollout.stop or rollout.forced_median):
        log.warning(
            "model.path: %s names no end token (eos_token_id): every response will be "
            "rollout.max_response_length=%d tokens long; name one, or set rollout.stop",
            config.model.path,
            rollout.max_response_length,
        )


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


def how_to_resume(folder: RunFolder) -> str:
    """Returns how a run that was stopped continues."""
    saved = complete_checkpoints(folder.path)
    if not saved:
        return "no checkpoint was saved: the same command begins again"
    return f"continue from step {max(saved)}: the same command with run.name={folder.name} run.resume=true"


def next_steps(config: Config, folder: RunFolder) -> list[str]:
    recipes = [
        "long answers with every step written out: bash recipes/long_answers.sh",
        "your own questions and answers: bash recipes/math_jsonl.sh FILE.jsonl MODEL_FOLDER",
    ]
    rate = ""
    if config.training.schedule == "cosine":
        rate = (
            f" training.lr={config.training.lr / 2:g} (its rate has decayed to 0; it decays again from the one stated)"
        )
    return [
        f"continue: run.name={folder.name} run.resume=true run.steps={2 * config.run.steps}{rate}",
        as_called(f"compare with another run: python scripts/report.py {folder.path} OTHER_RUN"),
        *(recipes if (RECIPES / "long_answers.sh").is_file() else ()),  # a wheel has none
        "your own reward: reward.path=FILE.py:FUNCTION",
    ]

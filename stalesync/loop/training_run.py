"""Run the training loop: create its components, run the steps, evaluate, save checkpoints, and report at the end.

evaluation ─► step ─► step ─┬─► step ─► evaluation ─► … ─► evaluation ─► notes
                            └─► cut ─► checkpoint, written while the next steps run
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from distqueue import DistQueue
from fusion.colocate import Worker, WorkerSpec
from fusion.rollout import EvalAnswer
from fusion.rollout.partial_samples import check_kept
from fusion.telemetry import LiveView, RunFolder
from fusion.telemetry.manifest import read_seals, write_seals
from fusion.telemetry.page.cautions import CautionWatch
from fusion.telemetry.run_folder import complete_checkpoints
from fusion.training.algorithms import make_algorithm
from fusion.training.interface import SKIPPED_IN_A_ROW
from stalesync.cards.cards import Cards
from stalesync.evaluation import Evaluation
from stalesync.evaluation.files import EvalFile
from stalesync.job import savepoint
from stalesync.job.config import Config
from stalesync.job.control import ControlDesk
from stalesync.job.decision_settings import admission_spec
from stalesync.job.resume import Reopened
from stalesync.job.resume_rules import ENDED, RULES, Rule
from stalesync.loop.controller import Controller
from stalesync.loop.engine_restarts import EngineRestarts
from stalesync.loop.generation import EVAL_ROWS, Generation
from stalesync.loop.groups import Groups
from stalesync.loop.saving import Saver
from stalesync.loop.step_metrics import StepMetrics
from stalesync.loop.update import Updater
from stalesync.policy.admission import Admission
from stalesync.policy.commands import Publish, SwitchToTrain
from stalesync.policy.pacing import PaceTally
from stalesync.policy.reward_history import RewardHistory
from stalesync.policy.save_interval import SaveInterval
from stalesync.policy.staleness import StalenessLedger
from stalesync.process.failures import GradientsNotFinite, RunFailed, logging_errors
from stalesync.process.garbage import collecting_seldom
from stalesync.process.hosts import number_hosts
from stalesync.process.run_log import add_note
from stalesync.process.stopping import completing, requested_stop
from stalesync.prompts import Prompt, PromptSource
from stalesync.scoring.scoring import EVALUATED, RESPONSE, Scorer

TASKS = ("reward", "train")
"""Tasks that must acknowledge a sample before the queue frees it."""

log = logging.getLogger(__name__)

RESTARTS = "rollout/engine_restarts"

MAX_SKIPPED_IN_A_ROW = 3
"""Number of updates in a row with gradients that are not finite, with which a run ends: one alone may be an accident"""


class TrainingRun:
    """Runs ``config.run.steps`` steps. ``step``: number of completed steps."""

    def __init__(
        self,
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
    ) -> None:
        self.config, self.cards, self.queue, self.source, self.scorer = config, cards, queue, source, scorer
        self.folder, self.view, self.evaluation, self.inputs = folder, view, evaluation, inputs
        self.step = 0
        self._closing = self._closed = self._logged = 0
        """Number of steps that are closed, the last one perhaps not wholly; wholly; whose metrics are logged"""
        self._metrics: Mapping[str, float] = {}
        """Metrics of the last step that is closed"""
        self._figures: dict[str, float] = {}
        """Metrics of evaluations, for the next row of the log"""
        self._text_server_note = ""
        """In which step engines have lost the server through which they exchange text"""
        stalesync = config.stalesync
        ledger = StalenessLedger(stalesync.max_staleness, config.data.prompts_per_step, stalesync.train_tokens)
        self.max_samples = (stalesync.max_staleness + 1) * ledger.groups_per_step * config.algorithm.group_size
        """Maximum number of samples in progress"""
        algorithm = make_algorithm(config.algorithm, config.rollout.max_response_length)
        facts = admission_spec(
            config,
            spec,
            scores_beside=scorer.concurrent,
            filters=algorithm.filters,
            by_group=algorithm.by_group,
            num_rows=source.num_rows or 0,
            machines=number_hosts(cards.hosts),
        )
        self.admission = Admission(facts, ledger)
        rewards = RewardHistory(self.admission.spec.num_rows) if config.rollout.drafts_history else None
        self.groups = Groups(
            size=config.algorithm.group_size,
            admission=self.admission,
            prompts=scorer.prompts,
            algorithm=algorithm,
            queue=queue,
            folder=folder,
            rewards=rewards,
        )
        self.desk = ControlDesk(folder.path, config)
        self.step_metrics = StepMetrics(spec.world, folder)
        self.generation = Generation(
            spec,
            cards,
            prompts=scorer.prompts,
            take_reports=self.step_metrics.take,
            on_ended_chunks=scorer.wake,
            rewards=rewards,
        )
        self.loop = Controller(
            config=config,
            admission=self.admission,
            cards=cards,
            queue=queue,
            source=source,
            scorer=scorer,
            groups=self.groups,
            generation=self.generation,
            restarts=EngineRestarts(
                spec=spec,
                cards=cards,
                queue=queue,
                admission=self.admission,
                groups=self.groups,
                generation=self.generation,
                step_metrics=self.step_metrics,
                note=view.note,
            ),
            attention_ranks=spec.infer_of_one_engine.dp,
            num_shared_cards=len(spec.deployment.shared),
            updater=Updater(
                spec=spec,
                cards=cards,
                queue=queue,
                view=view,
                algorithm=algorithm,
                record_reports=self.step_metrics.take,
            ),
            desk=self.desk,
            step_metrics=self.step_metrics,
            folder=folder,
            view=view,
        )
        self.trainers = cards.on(spec.deployment.train)
        self._not_training = frozenset(range(spec.world)) - {*spec.deployment.train}
        self.generators = cards.on([rank for ranks in spec.engines for rank in ranks])
        self.drafters, self._drafting_ranks = cards.on(spec.drafting_ranks), spec.drafting_ranks
        self._draft_starts: dict[int, int] = {}
        """Number of processes that each card that drafts had had at the last cut"""
        self.caution_watch = CautionWatch()
        self.pace = PaceTally(spec.pace)
        self.saver = Saver()
        cards.health_checks.append(self.saver.check)

    def run(self) -> None:
        """Runs all remaining steps. The cards are in the training phase at the start and at the end.

        Raises:
            Stopped: SIGTERM has arrived; a checkpoint was saved after the step that was under way.
        """
        last, interval = self.config.run.steps, SaveInterval.parse(self.config.run.save_every)
        if self.evaluation.due(self.step, last):
            self.evaluate_first()
        if self.step:
            self.folder.repeat(self.evaluation.first_metrics())
        saved_at = time.monotonic()
        with collecting_seldom(self.max_samples), self.logging_after_failure(), completing():
            self.view.begin()
            self.step_metrics.begin_first_step()
            while self.step < last:
                with self.profiling(self.step + 1):
                    self.loop.train_step(self.step + 1, close_last=self.begin_close, log_last=self.log_step)
                self.step += 1
                is_best = self.evaluation.due(self.step, last) and self.close_and_evaluate()
                elapsed_s, stop = time.monotonic() - saved_at, requested_stop()
                due = interval.due(self.step, elapsed_s, self.saver.writing)
                if self.step == last or is_best or due or stop is not None:
                    state, saved_at = self.close_and_cut(), time.monotonic()
                    self.save(state)
                if stop is not None and self.step < last:
                    self.saver.finish()
                    raise stop
            self.saver.finish()
        if self.config.rollout.pools_kv:
            live = [ranks for engine, ranks in enumerate(self.cards.engines) if not self.cards.is_down(engine)]
            for stage in [self.cards.on(ranks).begin(Worker.close_kv_pool) for ranks in live]:
                self.cards.wait(stage)
        if self.config.run.profile_steps and (others := self._others()):
            self.cards.on(others).call(Worker.end_profile)  # one that has run no stage since has not written its trace
        self.check_rewards()

    def evaluate_first(self) -> None:
        """Evaluates before the first step of this start of the run. Where that is not the run's first step, the row of
        the step that the checkpoint was saved after is logged, so it is completed; the checkpoint may be the best."""
        start = time.perf_counter()
        is_best, metrics = self.evaluate()
        if not self.step:
            self._figures |= self.evaluation.short_metrics("before")
            return
        if metrics:
            metrics |= {"timing_s/testing": time.perf_counter() - start}
        if self.step == self.config.run.steps:
            metrics |= self.evaluation.short_metrics("after")
        self.folder.complete(self.step, metrics, partial(write_seals, self.checkpoint))
        if is_best:
            self.folder.write_best(self.evaluation.best())

    @contextmanager
    def profiling(self, step: int) -> Iterator[None]:
        """Profiles the cards in the block, if the config names the step. If the step fails, the card that failed writes
        its trace; the others are ended. Cards that do not train may be in a stage that lasts longer than a step: they
        begin and end between two steps of their engine."""
        if step not in self.config.run.profile_steps:
            yield
            return
        folder = str(self.folder.profiles.resolve())
        self.trainers.call(Worker.begin_profile, folder, step)
        self.cards.on(self._others()).ask(Worker.ask_profile, folder, step)
        yield
        self.trainers.call(Worker.end_profile)
        self.cards.on(self._others()).ask(Worker.ask_profile, folder, None)

    def _others(self) -> list[int]:
        """Returns the ranks of the cards that do not train, and live."""
        down = [ranks for engine, ranks in enumerate(self.cards.engines) if self.cards.is_down(engine)]
        return sorted(self._not_training - {rank for ranks in down for rank in ranks})

    def run_evaluation(self) -> None:
        """Evaluates the weights that the run begins with, and runs no step."""
        self.evaluate()
        self.check_rewards()

    def check_rewards(self) -> None:
        """Judges the rewards at the end of the run.

        Raises:
            RewardsFailed: too many failed.
        """
        self.scorer.check_failed()
        self.evaluation.check_failed()

    def begin_close(self) -> None:
        """Begins to close the last step, unless that is done: to acknowledge its samples."""
        if self._closing < self.step:
            self._closing = self.step
            self.loop.begin_close()

    def close_step(self) -> None:
        """Closes the last step, unless that is done: takes its metrics."""
        self.begin_close()
        if self._closed < self.step:
            self._metrics = self.loop.end_close()
            self._closed = self.step

    def log_step(self) -> None:
        """Closes the last step and logs its metrics, unless that is done."""
        if self._logged < self.step:
            self.close_step()
            self.log(self._metrics)

    def close_and_evaluate(self) -> bool:
        """Closes the last step, with an evaluation after it; returns whether it is the best so far."""
        self.close_step()
        start = time.perf_counter()
        is_best, metrics = self.evaluate()
        if metrics:
            self._figures |= metrics | {"timing_s/testing": time.perf_counter() - start}
        if self.step == self.config.run.steps:
            self._figures |= self.evaluation.short_metrics("after")
        return is_best

    def close_and_cut(self) -> dict[str, Any]:
        """Closes the last step, with a cut."""
        self.close_step()
        with self.logging_after_failure():
            state = self.cut()
        self.log_step()
        return state

    @contextmanager
    def logging_after_failure(self) -> Iterator[None]:
        """If the block fails, logs the metrics of the last step, unless that is done, and raises the block's error. If
        the step is not closed they are without the queue's, which may have ended."""
        try:
            yield
        except BaseException:
            if self._logged < self.step:
                with logging_errors("logging the last step's metrics"):
                    self.log(self._metrics if self._closed == self.step else self.loop.take_metrics())
            raise

    def log(self, metrics: Mapping[str, float]) -> None:
        """Logs the metrics of the last step, with those of evaluations and cuts.

        Raises:
            GradientsNotFinite: too many updates in a row were skipped.
        """
        figures, self._figures, self._logged = self._figures, {}, self.step
        self.pace.count(metrics)
        if metrics.get("rollout/draft_exchange_failures") and not self._text_server_note:
            self._text_server_note = (
                f"step {self.step}: the server of the engines' text has ended; drafts are from each engine's own text"
            )
            self.view.note(self._text_server_note)
        if RESTARTS in figures:  # those of the step come on top
            figures[RESTARTS] += metrics.get(RESTARTS, 0)
        self.folder.log(self.step, {**metrics, **figures, **self.saver.metrics()})
        self.view.update(self.step, metrics)
        for caution in self.caution_watch.observe(self.step, metrics):
            self.view.note(f"step {self.step}: {caution}")
        if (skipped := int(metrics.get(SKIPPED_IN_A_ROW, 0))) >= MAX_SKIPPED_IN_A_ROW:
            raise GradientsNotFinite(skipped, self.step)

    def evaluate(self) -> tuple[bool, dict[str, float]]:
        """Evaluates the current weights and records the results; returns whether they are the best so far, and metrics.

        Noise is keyed by the prompt and the answer's number, so two evaluations differ only by the weights. The answers
        are never trained: no task of the queue receives them. Unfinished samples are suspended, as for a cut, and
        every file is answered by itself, so that its batches do not depend on other files.
        """
        if not self.evaluation.files:
            return False, {}
        self.loop.settle()
        restarts, before = self.loop.restarts, self.loop.restarts.num_restarts
        with self.step_metrics.excluded():
            answers = self._answers()
            results = [
                self.evaluation.score(file, self.scorer, answers[file.name], self.step)
                for file in self.evaluation.files
            ]
            self.step_metrics.take(self.scorer.take_reports())
        is_best = self.evaluation.history.add(results)
        metrics = {name: value for result in results for name, value in result.metrics().items()}
        if count := restarts.num_restarts - before:
            self.queue.drop([row for row in self.queue.holding(RESPONSE) if row.startswith(EVAL_ROWS)], EVALUATED)
            self._figures[RESTARTS] = self._figures.get(RESTARTS, 0) + count
        self.folder.log_evaluation(self.step, [result.row() for result in results], metrics)
        when = f"after step {self.step}" if self.step else "before the first step"
        self.view.note(f"evaluation {when}: {', '.join(result.describe() for result in results)}")
        return is_best, metrics

    def _answers(self) -> dict[str, dict[str, EvalAnswer]]:
        """Returns the answers to the prompts of each file, by its name. If no engine lives to give one, the weights are
        published again, which waits until one is replaced."""
        files, samples = self.evaluation.files, self.evaluation.config.samples
        asked = {file.name: file.asked(samples) for file in files}
        answers: dict[str, dict[str, EvalAnswer]] = {file.name: {} for file in files}
        while any(len(answers[name]) < len(prompts) for name, prompts in asked.items()):
            self.loop.execute(Publish(self.admission.ledger.version))
            self.view.phase("evaluate")
            if self.loop.end_publish():
                for file in files:
                    left = [prompt for prompt in asked[file.name] if prompt.id not in answers[file.name]]
                    answers[file.name] |= self._answer(file, left)
            self.loop.execute(SwitchToTrain())
            self.loop.restarts.observe()
        return answers

    def _answer(self, file: EvalFile, prompts: Sequence[Prompt]) -> dict[str, EvalAnswer]:
        try:
            return self.generation.answer(
                prompts,
                self.desk.share.engines,
                sampling=self.evaluation.config.sampling,
                for_model=file.pool is None and self.config.reward.kind == "model",
            )
        except RunFailed as error:
            add_note(error, f"evaluation of {file.describe()} after step {self.step}")
            raise

    def cut(self) -> dict[str, Any]:
        """Pauses the run for a consistent snapshot of weights, queue and controller, for `save`. The cards' state is
        copied, the queue's is written, and the controller's is returned."""
        self.view.phase("save")
        with self.saver.pause():
            self.loop.settle()
            snapshot = self.trainers.begin(Worker.snapshot)
            savepoint.begin(self.checkpoint, self.queue if self.admission.ledger.num_untrained else None)
            state = self.state_dict()
            self.step_metrics.take(self.cards.wait(snapshot))
            if self.config.rollout.drafts_history:
                self.drafters.call(Worker.snapshot_drafts)
                self._draft_starts = {rank: self.cards.num_starts(rank) for rank in self._drafting_ranks}
        return state

    def save(self, state: Mapping[str, Any]) -> None:
        """Writes a checkpoint from which a run of the same name can resume, and the Hugging Face export, while the next
        steps run. The cards hash what they write; the manifest of all files is written last."""
        target, export, as_json = self.checkpoint, str(self.folder.hf), json.dumps(state)
        log_bytes = self.folder.log_bytes()
        starts, best, chosen = self._draft_starts, self.evaluation.best(), self.evaluation.history.best

        def write() -> None:
            self.trainers.call(Worker.save, str(target / savepoint.TRAINER), export)
            if self.config.rollout.drafts_history:
                if ranks := self._unchanged(starts):
                    self.cards.on(ranks).call(Worker.save_drafts, str(target / savepoint.DRAFTS))
            savepoint.finish(target, as_json, self.folder.seal(log_bytes))
            if best is not None:
                self.folder.write_best(best)
            savepoint.prune(target.parent, self.config.run.keep, spared=chosen[:1] if chosen else ())

        self.saver.begin(write, discard=partial(savepoint.discard, target))

    def _unchanged(self, starts: Mapping[int, int]) -> list[int]:
        """Returns the ranks whose processes are those of the cut, by the number of processes that each had: one that
        was replaced since has no copy to write."""
        same = [rank for rank, number in starts.items() if self.cards.num_starts(rank) == number]
        if others := sorted(starts.keys() - {*same}):
            log.warning("ranks %s were replaced: their drafts are not part of the checkpoint", others)
        return same

    def restore(self, earlier: Reopened) -> None:
        """Resumes from a checkpoint. The queue must have been created from the checkpoint's queue; if the groups in
        progress end, without it."""
        checkpoint, state = earlier.checkpoint, earlier.state
        assert checkpoint is not None
        check_kept(self.queue.holding, self.config.rollout.truncates)
        if earlier.ended:
            state = savepoint.without_groups(state, ENDED)
        self.load_state_dict(state, other_order=any(RULES[key] is Rule.ORDER for key in earlier.accepted))
        self.folder.rewind(self.step, read_seals(checkpoint))
        if earlier.ended:
            self.folder.log_groups(self.step + 1, earlier.ended, f"failed:{ENDED}")
        saved = complete_checkpoints(self.folder.path)
        digests = {} if "eval.files" in earlier.accepted else self.evaluation.digests
        self.evaluation.history.restore(self.folder.evaluations(), digests, saved)
        self.folder.write_best(self.evaluation.best())
        steps_left = (self.config.run.steps - self.step) * self.config.algorithm.minibatches
        self.trainers.call(Worker.restore, str(checkpoint / savepoint.TRAINER), steps_left)
        if line := savepoint.schedule_of(checkpoint, self.config, steps_left).describe():
            self.view.note(line)
        if self.config.rollout.drafts_history:
            self.generators.call(Worker.restore_drafts, str(checkpoint / savepoint.DRAFTS))

    def state_dict(self) -> dict[str, Any]:
        """Returns plain JSON, between two steps. No engine has a request."""
        state: dict[str, Any] = {"step": self.step, "inputs": self.inputs}
        state |= {"prompts": self.source.state_dict(), "share": self.desk.state_dict()}
        return state | self.admission.state_dict() | self.groups.state_dict() | self.scorer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], other_order: bool = False) -> None:
        """Restores the state into this new object. ``other_order``: whether prompts may come in another order."""
        self.step = self._closing = self._closed = self._logged = state["step"]
        self.source.load_state_dict(state["prompts"], other_order)
        self.desk.load_state_dict(state["share"])
        self.admission.load_state_dict(state)
        self.groups.load_state_dict(state)
        self.scorer.load_state_dict(state, self.groups.scored)

    @property
    def checkpoint(self) -> Path:
        """The folder of the current step's checkpoint."""
        return self.folder.checkpoints / f"step-{self.step}"

    def notes(self) -> list[str]:
        """Returns the notes of the final report."""
        ledger, num_failed = self.admission.ledger, self.groups.num_failed_rewards
        lines = self.pace.notes() + self.evaluation.notes()
        lines += [f"{count} groups {name}" for name, count in ledger.ended.items() if name != "trained"]
        if self._text_server_note:
            lines.append(self._text_server_note)
        if num_restarts := self.loop.restarts.num_restarts:
            lines.append(f"{num_restarts} engines died and were replaced (rollout/engine_restarts)")
        if ledger.num_untrained:
            lines.append(f"{ledger.num_untrained} groups are in progress and saved in the last checkpoint")
        if num_failed:
            lines.append(f"{num_failed} samples could not be scored and were not trained (reward/failed)")
        if self.source.num_bad_rows:
            lines.append(f"{self.source.num_bad_rows} rows of data.source could not be used (data.bad_rows=skip)")
        if num_skipped := self.source.metrics().get("data/skipped_prompts", 0):
            lines.append(f"{num_skipped:.0f} prompts were longer than data.max_prompt_length")
        return lines

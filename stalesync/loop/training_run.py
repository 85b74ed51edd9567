"""Run all steps of a run, with evaluations and checkpoints between them.

evaluation ─► step ─► step ─┬─► step ─► evaluation ─► … ─► evaluation ─► notes
                            └─► cut ─► checkpoint, written while the next steps run
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fusion.colocate import Worker
from stalesync.loop.checkpoints import Checkpoints
from stalesync.loop.controller import Controller
from stalesync.loop.evaluator import Evaluator
from stalesync.loop.step import Step
from stalesync.policy.save_interval import SaveInterval
from stalesync.process.garbage import collecting_seldom
from stalesync.process.stopping import completing, notes_of_request, requested_stop


@dataclass(kw_only=True)
class TrainingRun:
    loop: Controller
    evaluator: Evaluator
    checkpoints: Checkpoints

    @property
    def step(self) -> int:
        return self.loop.last.number

    def run(self) -> None:
        """Run all remaining steps. The cards are in the training phase at the start and at the end. Raise Stopped if
        SIGTERM has arrived; a checkpoint was saved after the step that was under way."""
        loop, config, saver = self.loop, self.loop.config, self.checkpoints.saver
        last = config.run.steps
        interval = SaveInterval.parse(config.run.save_every)
        self.evaluator.begin()
        saved_at = time.monotonic()
        with collecting_seldom(loop.max_samples), self.logging_after_failure(), completing():
            loop.view.begin()
            loop.step_metrics.begin_first_step()
            while self.step < last:
                with self.profiling(self.step + 1):
                    loop.train_step()
                is_best = self.evaluator.evaluation.due(self.step, last) and self.evaluator.after_step()
                elapsed_s, stop = time.monotonic() - saved_at, requested_stop()
                due = interval.due(self.step, elapsed_s, saver.writing)
                if self.step == last or is_best or due or stop is not None:
                    state, saved_at = self.close_and_cut(), time.monotonic()
                    self.checkpoints.save(state)
                if stop is not None and self.step < last:
                    saver.finish()
                    raise stop
            saver.finish()
        if config.rollout.kv_pool.pools_kv:
            loop.engines.close_kv_pools()
        if config.run.profile_steps and (others := self._others()):
            loop.cards.on(others).call(Worker.end_profile)  # one that has run no stage since has not written its trace
        self.check_rewards()

    def run_evaluation(self, step: int) -> None:
        """Evaluate the weights that the run begins with, which are those after ``step``, and run no step."""
        self.loop.last = Step(step, self.loop.rows, logged=True)
        self.evaluator.evaluate(alone=True)
        self.check_rewards()

    def check_rewards(self) -> None:
        """Raise `RewardsFailed` if too many rewards failed, at the end of the run."""
        self.loop.scorer.check_failed()
        self.evaluator.evaluation.check_failed()

    def close_and_cut(self) -> dict[str, Any]:
        """Close and log the last step, with a cut; return the state to save."""
        self.loop.last.close()
        with self.logging_after_failure():
            state = self.checkpoints.cut()
        self.loop.last.log()
        return state

    @contextmanager
    def logging_after_failure(self) -> Iterator[None]:
        """If the block fails, log the last completed step, unless that is done, and raise the block's error."""
        try:
            yield
        except BaseException:
            self.loop.last.log_after_failure()
            raise

    @contextmanager
    def profiling(self, step: int) -> Iterator[None]:
        """Profile the cards in the block, if the config names the step. If the step fails, the card that failed writes
        its trace; the others are ended. Cards that do not train may be in a stage that lasts longer than a step: they
        begin and end between two steps of their engine."""
        if step not in self.loop.config.run.profile_steps:
            yield
            return
        cards, folder = self.loop.cards, str(self.loop.folder.profiles.resolve())
        trainers = cards.on(self.loop.spec.deployment.train)
        trainers.call(Worker.begin_profile, folder, step)
        cards.on(self._others()).ask(Worker.ask_profile, folder, step)
        yield
        trainers.call(Worker.end_profile)
        cards.on(self._others()).ask(Worker.ask_profile, folder, None)

    def _others(self) -> list[int]:
        """Return the ranks of the cards that do not train, and live."""
        return [rank for rank in self.loop.cards.living if rank not in self.loop.spec.deployment.train]

    def notes(self) -> list[str]:
        ledger, source = self.loop.admission.ledger, self.loop.source
        lines = self.loop.rows.pace.notes() + self.evaluator.evaluation.notes()
        lines += [f"{count} groups {name}" for name, count in ledger.ended.items() if name != "trained"]
        if self.loop.rows.text_server_note:
            lines.append(self.loop.rows.text_server_note)
        if num_restarts := self.loop.engines.num_restarts:
            lines.append(f"{num_restarts} engines died and were replaced (rollout/engine_restarts)")
        if ledger.num_untrained:
            lines.append(f"{ledger.num_untrained} groups are in progress and saved in the last checkpoint")
        if num_failed := self.loop.groups.num_failed_rewards:
            lines.append(f"{num_failed} samples could not be scored and were not trained (reward/failed)")
        if source.rows.num_bad:
            lines.append(f"{source.rows.num_bad} rows of data.source could not be used (data.bad_rows=skip)")
        if num_skipped := source.metrics().get("data/skipped_prompts", 0):
            lines.append(f"{num_skipped:.0f} prompts were longer than data.max_prompt_length")
        return lines + notes_of_request()

"""Evaluate the current weights between two steps: pause the run, answer every file's prompts, score, and record."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from fusion.rollout import EvalAnswer
from fusion.telemetry.manifest import write_seals
from stalesync.evaluation import Evaluation
from stalesync.evaluation.files import EvalFile
from stalesync.job import savepoint
from stalesync.loop.controller import Controller
from stalesync.loop.evaluated_turns import EvaluatedTurns
from stalesync.loop.generation import EVAL_ROWS
from stalesync.loop.step import RESTARTS
from stalesync.policy.commands import Publish, SwitchToTrain
from stalesync.process.failures import RunFailed
from stalesync.process.run_log import add_note
from stalesync.prompts import Prompt
from stalesync.scoring.scoring import EVALUATED, RESPONSE


@dataclass(kw_only=True)
class Evaluator:
    """Evaluate the weights of ``loop``."""

    evaluation: Evaluation
    loop: Controller

    @property
    def last(self) -> int:
        return self.loop.config.run.steps

    @property
    def by_model(self) -> bool:
        """Whether the run's own reward is a model's."""
        return self.loop.config.reward.kind == "model"

    def begin(self) -> None:
        """Evaluate before the first step of this start of the run, if that is due. Where the run was resumed, this
        completes the row of the step that the checkpoint was saved after; the checkpoint may be the best."""
        number, folder = self.loop.last.number, self.loop.folder
        if self.evaluation.due(number, self.last):
            start = time.perf_counter()
            is_best, metrics = self.evaluate()
            if not number:
                self.loop.rows.extra |= self.evaluation.short_metrics("before")
            else:
                metrics |= {"timing_s/testing": time.perf_counter() - start} if metrics else {}
                if number == self.last:
                    metrics |= self.evaluation.short_metrics("after")
                folder.complete(number, metrics, partial(write_seals, savepoint.path_of(folder, number)))
                if is_best:
                    folder.write_best(self.evaluation.best())
        if number:
            folder.repeat(self.evaluation.first_metrics())

    def after_step(self) -> bool:
        """Close the last step, with an evaluation after it; return whether it is the best so far."""
        self.loop.last.close()
        start = time.perf_counter()
        is_best, metrics = self.evaluate()
        if metrics:
            self.loop.rows.extra |= metrics | {"timing_s/testing": time.perf_counter() - start}
        if self.loop.last.number == self.last:
            self.loop.rows.extra |= self.evaluation.short_metrics("after")
        return is_best

    def evaluate(self, alone: bool = False) -> tuple[bool, dict[str, float]]:
        """Evaluate the current weights and record the results; return whether they are the best so far, and metrics.
        ``alone``: the step has no row of metrics, as none before the first one has.
        Noise is keyed by the prompt and the answer's number, so two evaluations differ only by the weights. The answers
        are never trained: no task of the queue receives them. Unfinished samples are suspended, as for a cut, and every
        file is answered by itself, so that its batches do not depend on other files."""
        if not self.evaluation.files:
            return False, {}
        loop, number, step_metrics = self.loop, self.loop.last.number, self.loop.step_metrics
        loop.settle()
        before = loop.engines.num_restarts
        with step_metrics.excluded(), ExitStack() as stack:
            talks = self._begin_conversations(stack)
            answers = self._answers(talks)
            results = [
                self.evaluation.score(
                    file, loop.scorer, answers[file.name], number, known=talks[file.name].outcomes if talks else None
                )
                for file in self.evaluation.files
            ]
            step_metrics.take(loop.scorer.take_reports())
        is_best = self.evaluation.history.add(results)
        metrics = {name: value for result in results for name, value in result.metrics().items()}
        count = loop.engines.num_restarts - before
        if count or (talks and self.by_model):  # rows of lost engines, and of turns that were continued
            loop.queue.drop([row for row in loop.queue.holding(RESPONSE) if row.startswith(EVAL_ROWS)], EVALUATED)
        if count:
            self.loop.rows.extra[RESTARTS] = self.loop.rows.extra.get(RESTARTS, 0) + count
        loop.folder.log_evaluation(number, [r.row() for r in results], metrics if alone or not number else {})
        when = f"after step {number}" if number else "before the first step"
        loop.view.note(f"evaluation {when}: {', '.join(result.describe() for result in results)}")
        return is_best, metrics

    def _begin_conversations(self, stack: ExitStack) -> dict[str, EvaluatedTurns]:
        """Begin each file's conversations, by name, which end with ``stack``; {}: prompts are answered in one turn."""
        conversing, config = self.loop.conversing, self.evaluation.config
        if conversing is None:
            return {}
        spec = replace(conversing.spec, max_tokens=config.sampling.get("max_tokens", conversing.spec.max_tokens))
        talks = {
            file.name: EvaluatedTurns(conversing.environments, spec, file.asked(config.samples))
            for file in self.evaluation.files
        }
        for talk in talks.values():
            stack.callback(talk.close)
        return talks

    def _answers(self, talks: Mapping[str, EvaluatedTurns]) -> dict[str, dict[str, EvalAnswer]]:
        """Return the answers to each file's prompts, by name. If no engine is left, weights are published again."""
        files, samples = self.evaluation.files, self.evaluation.config.samples
        asked = {file.name: file.asked(samples) for file in files}
        answers = {file.name: talks[file.name].answers if talks else dict[str, EvalAnswer]() for file in files}
        while any(len(answers[name]) < len(prompts) for name, prompts in asked.items()):
            self.loop.execute(Publish(self.loop.admission.ledger.version))
            self.loop.view.phase("evaluate")
            self.loop.end_publish()
            for file in files:
                self.answer(file, asked[file.name], answers[file.name], talks.get(file.name))
            self.loop.execute(SwitchToTrain())
        return answers

    def answer(
        self,
        file: EvalFile,
        asked: Sequence[Prompt],
        answers: dict[str, EvalAnswer],
        talk: EvaluatedTurns | None = None,
    ) -> None:
        """Add to ``answers`` of the prompts of a file, as long as engines are left. Those of an engine that is lost
        are asked of the others. ``talk``: the prompts' conversations, which are continued in rounds."""
        generation, engines = self.loop.generation, self.loop.engines
        try:
            while (left := [prompt for prompt in asked if prompt.id not in answers]) and (
                present := [engine for engine in self.loop.desk.share.engines if engine not in engines.absent]
            ):
                for running in generation.begin_answers(
                    left if talk is None else talk.prompts,
                    present,
                    spoken={} if talk is None else talk.left,
                    sampling=self.evaluation.config.sampling,
                    for_model=file.pool is None and self.by_model,
                ):
                    with engines.replacing():
                        taken = generation.take_answers(running)
                        answers.update(taken) if talk is None else talk.observe(taken)
                if talk is not None:
                    talk.await_environments(self.loop.cards.check)
                    generation.forget_answers(talk.answered, present)
        except RunFailed as error:
            add_note(error, f"evaluation of {file.describe()} after step {self.loop.last.number}")
            raise

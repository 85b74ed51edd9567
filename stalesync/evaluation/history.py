"""Decide when to evaluate and which checkpoint is the best, from the results so far. Pure.

Invariants (property-tested):
1. Without a result there is an evaluation before the next step; then after every multiple of `eval.every`, and after
   the last step.
2. The best step is the first with the extreme value of `eval.best` among the evaluations after a step; an evaluation
   before the first step is of the model that the run was given, which is not saved.
3. A history that was saved and restored decides as one that was not. A restored one leaves out steps that come later
   and, for the best, steps whose checkpoint is gone."""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from stalesync.evaluation.config import EvalConfig, Goal
from stalesync.evaluation.results import FileResult


class EvalHistory:
    """Hold the results of a run's evaluations, in order of steps. ``goal``: whether `eval.best` is to be high or low;
    None: it is not set."""

    def __init__(self, config: EvalConfig, goal: Goal | None = None) -> None:
        self._every, self._metric, self._goal = config.every, config.best, goal
        self.results: list[FileResult] = []
        self.best: tuple[int, float] | None = None
        """Step and value of the best evaluation after a step; None: there was none, or `eval.best` is not set"""

    def due(self, step: int, last: int) -> bool:
        """Return whether to evaluate after ``step`` of ``last`` steps (0: before the first one)."""
        if not self.results:
            return True
        return step > self.results[-1].step and (step == last or bool(self._every and step % self._every == 0))

    def add(self, results: Sequence[FileResult]) -> bool:
        """Record an evaluation; return whether it is the best one so far."""
        self.results += map(_without_answers, results)
        return self._choose(results)

    def restore(
        self, rows: Iterable[Mapping[str, Any]], digests: Mapping[str, str | None], saved: Container[int]
    ) -> None:
        """Restore the results of a run's earlier starts into this empty history. ``rows``: of `FileResult.row`, of
        steps that the resumed run has; ``digests``: of the files that are evaluated now, by name; ``saved``: steps of
        which there is a checkpoint. Raise ValueError if a file has other content than when it was evaluated."""
        by_step: dict[int, list[FileResult]] = {}
        for result in map(FileResult.from_row, rows):
            if result.digest != digests.get(result.file, result.digest):
                raise ValueError(
                    f"eval.files: cannot resume: the file {result.file!r} has other content than when it was evaluated "
                    f"after step {result.step}; give it another name"
                )
            by_step.setdefault(result.step, []).append(result)
        for step, results in by_step.items():
            self.results += map(_without_answers, results)
            if step in saved:
                self._choose(results)

    def first(self, file: str) -> FileResult | None:
        return next((result for result in self.results if result.file == file), None)

    def last(self, file: str) -> FileResult | None:
        return next((result for result in reversed(self.results) if result.file == file), None)

    def _choose(self, results: Sequence[FileResult]) -> bool:
        for result in results:
            value = result.metrics().get(self._metric or "")
            if value is None or not result.step:
                continue
            known = None if self.best is None else self.best[1]
            if known is None or (value > known if self._goal == "max" else value < known):
                self.best = (result.step, value)
                return True
        return False


def _without_answers(result: FileResult) -> FileResult:
    """Return what a history needs of a result: answers are in the file."""
    return replace(result, answers=[], right="")

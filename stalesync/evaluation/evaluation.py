"""Evaluate a run's files, and record the results: as metrics, in `evaluations.jsonl`, and in the report."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from fusion.rewards import RewardOutcome
from fusion.rollout import EvalAnswer
from fusion.telemetry.shortening import shortened
from stalesync.evaluation.config import HELD_OUT, EvalConfig
from stalesync.evaluation.files import EvalFile
from stalesync.evaluation.history import EvalHistory
from stalesync.evaluation.results import FileResult, estimates_of, graded
from stalesync.process.failures import RewardsFailed
from stalesync.scoring.failed_rewards import FailedRewards
from stalesync.scoring.scoring import Scorer
from stalesync.scoring.sources import RuleReward

ANSWERS_KEPT, MAX_ANSWER_CHARACTERS = 64, 1500
"""Number of prompts of a file whose first answers are recorded, and how much of each text"""


class Evaluation:
    """Evaluate ``files``, held-out prompts among them if ``held_out``. ``max_failed_share``: of the rewards of files
    that have one of their own; the run's own reward is judged with the samples of the steps."""

    def __init__(
        self, config: EvalConfig, files: Sequence[EvalFile], *, held_out: bool = False, max_failed_share: float = 1.0
    ) -> None:
        self.config, self.files = config, files
        self.history = EvalHistory(config, config.check_best(held_out))
        self._max_failed_share = max_failed_share
        self._failed = {file.name: FailedRewards(max_failed_share) for file in files if file.pool is not None}

    @property
    def digests(self) -> dict[str, str | None]:
        """Digests of the files' content, by name."""
        return {file.name: file.digest for file in self.files}

    def due(self, step: int, last: int) -> bool:
        """Return whether to evaluate after ``step`` of ``last`` steps (0: before the first one)."""
        return bool(self.files) and self.history.due(step, last)

    def score(
        self,
        file: EvalFile,
        scorer: Scorer,
        answers: Mapping[str, EvalAnswer],
        step: int,
        *,
        known: Mapping[str, RewardOutcome] | None = None,
    ) -> FileResult:
        """Score the answers to the prompts of ``file.asked``, by their ids. ``known``: outcomes of those that cannot be
        scored. Raise `RewardsFailed`, with file and reward, if too many of the reward's results failed, or all of this
        file's."""
        samples, asked = self.config.samples, file.asked(self.config.samples)
        source = None if file.pool is None else RuleReward(file.pool)
        try:
            outcomes = scorer.score_answers(asked, answers, source, group_size=samples, known=known)
            if file.pool is not None and (verdict := self._failed[file.name].observe([one for _, one in outcomes])):
                raise RewardsFailed(str(verdict))
            errors = [outcome for _, outcome in outcomes if outcome.error is not None]
            if len(errors) == len(outcomes) and self._max_failed_share < 1:
                raise RewardsFailed(
                    f"none of {len(outcomes)} answers could be scored. The first failure ({errors[0].error}):\n"
                    f"{errors[0].detail}"
                )
        except RewardsFailed as error:
            raise RewardsFailed(f"evaluation of {file.describe()} after step {step}: {error}") from error
        starts = range(0, len(asked), samples)
        by_prompt = ([answers[prompt.id] for prompt in asked[start : start + samples]] for start in starts)
        return FileResult(
            step=step,
            file=file.name,
            reward=file.reward,
            digest=file.digest,
            prompts=len(file.prompts),
            samples=samples,
            failed=len(errors),
            rows={} if file.rows is None else asdict(file.rows),
            estimates=estimates_of(
                [[outcome for _, outcome in outcomes[start : start + samples]] for start in starts],
                [[one.response_tokens for one in given if one.finish_reason != "abort"] for given in by_prompt],
                self.config.pass_reward,
            ),
            answers=[
                {
                    "prompt": shortened(asked[start].text, MAX_ANSWER_CHARACTERS),
                    "answer": shortened(asked[start].answer, MAX_ANSWER_CHARACTERS),
                    "response": shortened(outcomes[start][0], MAX_ANSWER_CHARACTERS),
                    "reward": outcomes[start][1].reward,
                }
                for start in starts[:ANSWERS_KEPT]
            ],
            right="".join(graded(outcomes[start][1], self.config.pass_reward) for start in starts),
        )

    def check_failed(self) -> None:
        """Raise `RewardsFailed`, with file and reward, if too many rewards of a file failed, at the end of a run."""
        for file in self.files:
            if file.pool is not None and (verdict := self._failed[file.name].judge()):
                raise RewardsFailed(f"evaluation of {file.describe()}: {verdict}")

    def best(self) -> dict[str, str | int | float] | None:
        """Return what `best.json` records; None: no checkpoint is the best."""
        if self.history.best is None or self.config.best is None:
            return None
        step, value = self.history.best
        return {"metric": self.config.best, "value": value, "step": step, "checkpoint": f"checkpoints/step-{step}"}

    def short_metrics(self, when: str) -> dict[str, float]:
        """Return `val/rewards/<when>`, the held-out prompts' mean reward in the last evaluation, if any was scored."""
        last = self.history.last(HELD_OUT)
        return {} if last is None or last.mean is None else {f"val/rewards/{when}": last.mean.value}

    def first_metrics(self) -> dict[str, float]:
        """Return the metrics of the evaluation before the first step, if there was one."""
        first = [result for result in self.history.results if not result.step]
        return {name: value for result in first for name, value in result.metrics().items()}

    def notes(self) -> list[str]:
        """Return the mean rewards of the first and the last evaluation by file, and which checkpoint is the best."""
        lines = []
        trained = any(result.step for result in self.history.results)
        for file in self.files:
            what = "held-out prompts" if file.name == HELD_OUT else file.name
            ends = [self.history.first(file.name), self.history.last(file.name)]
            means = {end.step: end.mean.value for end in ends if end is not None and end.mean is not None}
            if means:
                when = {step: f" after step {step}" if step else " before" for step in means if trained}
                rewards = ", ".join(f"{mean:.3f}{when.get(step, '')}" for step, mean in means.items())
                lines.append(f"reward on {what}: {rewards} (evaluations.jsonl)")
        if best := self.best():
            lines.append(f"best checkpoint: {best['checkpoint']}, {best['metric']}={best['value']:.3g} (best.json)")
        return lines

"""Summarize the answers to one file's prompts: an `Estimate` by statistic, metrics, and a row of `evaluations.jsonl`.
Pure.

A prompt counts with those of its answers that could be scored: its mean reward is theirs, and it counts for pass@k if
there are at least k of them. A prompt without any is left out. Where a reward has several terms
(`RewardOutcome.terms`), its mean is that of their weighted sum, each term has a mean of its own, and an answer is
correct by the first, the reward itself."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fusion.rewards import RewardOutcome
from fusion.telemetry.evaluations import RIGHT, WRONG
from stalesync.evaluation.config import logged_statistics, metric_of
from stalesync.evaluation.estimates import Estimate, estimate, pass_at_each


@dataclass(frozen=True)
class FileResult:
    """The evaluation of one file. ``step``: number of completed training steps; ``file``, ``reward``: the file's name,
    and what scored its answers; ``digest``: of the file's content; None: the prompts are held out of `data.source`;
    ``prompts``, ``samples``: number of prompts, and of answers to each; ``failed``: number of answers that could not be
    scored; ``estimates``: by statistic: `reward/mean@<k>`, `reward/pass@<1 to k>`, `response_length/mean@<k>`, and of a
    reward of several terms `reward/<term>/mean@<k>`; ``rows``: number of the file's rows by what became of them
    (`RowCounts`); ``answers``: a few of them: prompt, reference answer, response, reward; ``right``: a character for
    each prompt: whether its first answer is correct (`graded`)."""

    step: int
    file: str
    reward: str
    digest: str | None
    prompts: int
    samples: int
    failed: int
    estimates: dict[str, Estimate]
    answers: list[dict[str, Any]] = field(default_factory=list)
    rows: dict[str, int] = field(default_factory=dict)
    right: str = ""

    def row(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "FileResult":
        """Restore a result from what `row` returned; other keys are ignored."""
        fields = {item.name: row[item.name] for item in dataclasses.fields(cls) if item.name not in ("rows", "right")}
        estimates = {name: Estimate(**one) for name, one in row["estimates"].items()}
        return cls(**fields | {"rows": row.get("rows", {}), "right": row.get("right", ""), "estimates": estimates})

    @property
    def mean(self) -> Estimate | None:
        """The mean reward; None: no answer could be scored."""
        return self.estimates.get(f"reward/mean@{self.samples}")

    def metrics(self) -> dict[str, float]:
        """Return the metrics, by verl's names (`metric_of`)."""
        terms = [name for name in self.estimates if name.startswith("reward/") and name.count("/") > 1]
        metrics: dict[str, float] = {}
        auxiliary = f"val-aux/{self.file}"
        for statistic in (*logged_statistics(self.samples), *terms):
            if (one := self.estimates.get(statistic)) is not None:
                metrics[metric_of(self.file, statistic, self.samples)] = one.value
                if one.low is not None and one.high is not None:
                    metrics |= {f"{auxiliary}/{statistic}/low": one.low, f"{auxiliary}/{statistic}/high": one.high}
        metrics[f"{auxiliary}/reward/failed"] = float(self.failed)
        if self.rows:
            metrics[f"{auxiliary}/rows/dropped"] = float(self.rows["read"] - self.rows["evaluated"])
        return metrics

    def describe(self) -> str:
        """Return the mean reward in one line."""
        if (mean := self.mean) is None:
            return f"{self.file}: no answer could be scored by {self.reward}"
        interval = "" if mean.low is None else f" [{mean.low:.3f}, {mean.high:.3f}]"
        return f"{self.file} {mean.value:.3f}{interval}"


def graded(outcome: RewardOutcome, pass_reward: float) -> str:
    """Return `RIGHT` or `WRONG`, by the first term where a reward has several; `-` if it could not be scored."""
    if outcome.reward is None:
        return "-"
    reward = next(iter(outcome.terms.values())) if outcome.terms else outcome.reward
    return RIGHT if reward >= pass_reward else WRONG


def estimates_of(
    outcomes: Sequence[Sequence[RewardOutcome]], lengths: Sequence[Sequence[int]], pass_reward: float
) -> dict[str, Estimate]:
    """Estimate the statistics of a file; those that no prompt has are left out. ``outcomes``: of every prompt's
    answers; ``lengths``: tokens of those that have ended; ``pass_reward``: minimum of a correct one."""
    samples = max(map(len, outcomes), default=0)
    scored = [[answer for answer in answers if answer.reward is not None] for answers in outcomes]
    rewards = [[answer.reward for answer in answers if answer.reward is not None] for answers in scored]
    estimates = {f"reward/mean@{samples}": _mean_of_prompts(rewards)}
    terms = next((answer.terms for answers in scored for answer in answers if answer.terms), {})
    by_term = {name: [[(answer.terms or {})[name] for answer in answers] for answers in scored] for name in terms}
    estimates |= {f"reward/{name}/mean@{samples}": _mean_of_prompts(parts) for name, parts in by_term.items()}
    graded = by_term[next(iter(by_term))] if by_term else rewards
    counts = [(len(grade), sum(reward >= pass_reward for reward in grade)) for grade in graded]
    passed = {count: pass_at_each(*count) for count in {*counts}}
    for k in range(1, samples + 1):
        by_prompt = [passed[count][k - 1] for count in counts if count[0] >= k]
        estimates[f"reward/pass@{k}"] = estimate(by_prompt, within=(0.0, 1.0))
    estimates[f"response_length/mean@{samples}"] = _mean_of_prompts(lengths)
    return {statistic: one for statistic, one in estimates.items() if one is not None}


def _mean_of_prompts(by_prompt: Sequence[Sequence[float]]) -> Estimate | None:
    """Estimate the mean over prompts of the mean over answers; a prompt without any is left out."""
    return estimate([sum(answers) / len(answers) for answers in by_prompt if answers])

"""Score samples by a rule in guarded processes, or by a reward model on its cards."""

import time
from collections.abc import Callable, Sequence

from fusion.colocate import StageReport, Worker, WorkerSpec
from fusion.rewards import RewardOutcome, RewardPool, Term, combine
from fusion.rewards.outcome import usable
from fusion.training import split_over_ranks
from stalesync.cards.cards import Cards
from stalesync.cards.stage_calls import calls_of_replicas, stage_call
from stalesync.scoring.samples import Sample


class RewardSource:
    """Score samples. ``concurrent``: may do so while the engines generate."""

    concurrent = True

    def __call__(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        """Return one outcome per sample, in order."""
        raise NotImplementedError

    def take_reports(self) -> list[StageReport]:
        """Return the reports of the cards used since the last call."""
        return []


class RuleReward(RewardSource):
    """Score text in the guarded processes of ``pool``, in at least ``min_s`` seconds for a number of samples."""

    def __init__(self, pool: RewardPool, min_s: Callable[[int], float] = lambda num_samples: 0.0):
        self._pool, self._min_s = pool, min_s

    def __call__(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        end_s = time.monotonic() + self._min_s(len(samples))
        outcomes = self._pool.score([sample.for_reward() for sample in samples])
        time.sleep(max(0.0, end_s - time.monotonic()))
        return outcomes


class ModelReward(RewardSource):
    """Score samples by the reward model on the cards that host it, which read the samples' tokens from the queue."""

    def __init__(self, cards: Cards, spec: WorkerSpec):
        assert spec.reward_model is not None
        self.concurrent = not {*spec.deployment.reward_model} & {*spec.deployment.actor}
        self._cards, self._ranks = cards, spec.deployment.reward_model
        self._layout = spec.reward_model.layout
        self._reports: list[StageReport] = []

    def __call__(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        shares = split_over_ranks([sample.tokens for sample in samples], self._layout.replicas)
        rows = [sample.rows[-1] for sample in samples]
        calls = [stage_call(Worker.score, [rows[index] for index in share]) for share in shares]
        reports = self._cards.call_each(calls_of_replicas(self._layout, self._ranks, calls))
        self._reports += reports
        outcome_by_id = {id: outcome for report in reports for id, outcome in report.scores.items()}
        lost = RewardOutcome(None, error="lost", detail="its tokens were damaged or lost in the queue")
        return [outcome_by_id.get(row, lost) for row in rows]

    def take_reports(self) -> list[StageReport]:
        reports, self._reports = self._reports, []
        return reports


class EnvironmentReward(RewardSource):
    """Score conversations by what their environments gave for their turns. ``reward_of``: by the sample's id."""

    def __init__(self, reward_of: Callable[[str], float]):
        self.reward_of = reward_of

    def __call__(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        return [self._outcome(self.reward_of(sample.id)) for sample in samples]

    def _outcome(self, reward: float) -> RewardOutcome:
        if usable(reward):
            return RewardOutcome(reward)
        return RewardOutcome(None, "bad_type", f"the sum of the rewards of a conversation is {reward}, beyond float32")


class WeightedReward(RewardSource):
    """Add ``terms`` to the reward of ``base``, which has the weight 1; ``title``: its name among them."""

    def __init__(self, base: RewardSource, title: str, terms: Sequence[Term]):
        self.concurrent = base.concurrent
        self._base, self._title, self._terms = base, title, terms

    def __call__(self, samples: Sequence[Sample]) -> list[RewardOutcome]:
        parts = {self._title: (1.0, self._base(samples))}
        texts, lengths = [sample.for_reward() for sample in samples], [sample.sampled_tokens for sample in samples]
        for term in self._terms:
            parts[term.spec.name] = term.spec.weight, term.outcomes(texts, lengths)
        return combine(parts)

    def take_reports(self) -> list[StageReport]:
        return self._base.take_reports()

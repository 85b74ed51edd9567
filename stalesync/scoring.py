"""From finished samples to rewards: by a rule in guarded processes, or by the reward model on its cards.

start ─► samples are generated ─► finish
  └─ scored as they come, in a thread beside: by a rule, or by a reward model whose cards do not generate
                                    └─ all at once, after the cards have switched to TRAIN: by one whose cards do
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from distqueue import DistQueue
from fusion.colocate import StageReport, WorkerSpec
from fusion.inference import Output
from fusion.rewards import RewardOutcome, RewardPool, RewardSample
from fusion.training import split_over_ranks
from stalesync.cards import Cards
from stalesync.prompts import Prompt

BATCH = 64
"""Samples scored at a time, while others are still being generated."""


@dataclass
class Scored:
    """What the controller keeps of a sample: never its tensors."""

    id: str
    prompt: Prompt
    response: str
    prompt_tokens: int
    response_tokens: int
    outcome: RewardOutcome


@dataclass(frozen=True)
class Finished:
    """A sample to be judged. ``tokens`` of prompt and response, only where the queue does not hold them."""

    id: str
    prompt: Prompt
    response: str
    length: int
    tokens: tuple[Sequence[int], Sequence[int]] | None = None


class Judge(Protocol):
    """``beside``: may judge while the cards generate."""

    beside: bool

    def __call__(self, samples: Sequence[Finished]) -> list[RewardOutcome]: ...

    def reports(self) -> list[StageReport]:
        """Of the cards it has used since it was asked last."""


class RuleJudge:
    """Rules and users' functions, in the guarded processes of ``pool``."""

    beside = True

    def __init__(self, pool: RewardPool):
        self._pool = pool

    def __call__(self, samples: Sequence[Finished]) -> list[RewardOutcome]:
        return self._pool.score(
            [RewardSample(one.prompt.text, one.response, one.prompt.answer, one.prompt.fields) for one in samples]
        )

    def reports(self) -> list[StageReport]:
        return []


class ModelJudge:
    """The reward model, on the cards that host it."""

    def __init__(self, cards: Cards, spec: WorkerSpec):
        assert spec.reward_model is not None
        self._cards, self._ranks, self._replicas = cards, spec.deployment.reward_model, spec.reward_model.layout.dp
        self.beside = not {*self._ranks} & {*spec.deployment.actor}
        self._reports: list[StageReport] = []

    def __call__(self, samples: Sequence[Finished]) -> list[RewardOutcome]:
        shares = split_over_ranks([one.length for one in samples], self._replicas)
        kept = {one.id: one.tokens for one in samples if one.tokens is not None}
        ids = [[samples[index].id for index in share] for share in shares]
        reports = self._cards.call("score", ids, kept or None, ranks=self._ranks)
        self._reports += reports
        found = {id: outcome for report in reports for id, outcome in report.scores.items()}
        return [found[one.id] for one in samples]

    def reports(self) -> list[StageReport]:
        reports, self._reports = self._reports, []
        return reports


class Scorer:
    """Scores the samples of one step at a time."""

    def __init__(self, judge: Judge, queue: DistQueue, tokenizer: Any, group_size: int):
        self._judge, self._queue, self._tokenizer, self._group_size = judge, queue, tokenizer, group_size
        self._thread = ThreadPoolExecutor(1, "rewards")
        self._prompts: Mapping[str, Prompt] = {}
        self._running: Future[list[Scored]] | None = None

    def start(self, prompts: Mapping[str, Prompt]) -> None:
        """Before the groups of these prompts are generated."""
        self._prompts = prompts
        if self._judge.beside:
            self._running = self._thread.submit(self._score, BATCH)

    def finish(self) -> tuple[list[Scored], list[StageReport]]:
        """All samples of the step, by id, and the reports of the cards that scored them. After the cards have switched
        to TRAIN."""
        if self._running is not None:
            scored, self._running = self._running.result(), None
        else:
            scored = self._score(len(self._prompts) * self._group_size)
        return scored, self._judge.reports()

    def answers(self, prompts: Sequence[Prompt], outputs: Mapping[str, Output]) -> list[tuple[str, RewardOutcome]]:
        """The text and the outcome of one answer a prompt, which the queue does not hold. In the TRAIN phase."""
        found = [outputs[prompt.id] for prompt in prompts]
        texts = [self.text(output.tokens) for output in found]
        samples = [
            Finished(prompt.id, prompt, text, len(prompt.ids) + len(output.tokens), (prompt.ids, output.tokens))
            for prompt, text, output in zip(prompts, texts, found, strict=True)
        ]
        outcomes = self._judge(samples)
        self._judge.reports()
        return list(zip(texts, outcomes, strict=True))

    def text(self, tokens: Sequence[int]) -> str:
        """The response as the reward sees it: without the end token that stopped it, with every other token."""
        ended = bool(tokens) and tokens[-1] == self._tokenizer.eos_token_id
        return self._tokenizer.decode(list(tokens[:-1] if ended else tokens))

    def _score(self, batch_size: int) -> list[Scored]:
        left, scored = len(self._prompts) * self._group_size, []
        while left:
            batch = self._queue.get("reward", ["prompt", "response"], count=min(batch_size, left))
            lengths = [(len(batch["prompt"][row]), len(batch["response"][row])) for row in range(len(batch))]
            samples = [
                Finished(id, self._prompts[group], self.text(batch["response"][row].tolist()), sum(lengths[row]))
                for row, (id, group) in enumerate(zip(batch.ids, batch.groups, strict=True))
            ]
            for one, sizes, outcome in zip(samples, lengths, self._judge(samples), strict=True):
                scored.append(Scored(one.id, one.prompt, one.response, *sizes, outcome))
            self._queue.ack("reward", batch.ids)
            left -= len(batch)
        return sorted(scored, key=lambda sample: sample.id)

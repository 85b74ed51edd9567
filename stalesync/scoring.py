"""From finished samples to rewards: by a rule in guarded processes, or by the reward model on its cards.

    queue ─► a thread takes samples as they finish ─► arrived
               └─ scored at once: by a rule, or by a reward model whose cards do not generate ─► scored
                                    └─ later, by `judge`: by one whose cards do, after they have switched to TRAIN

Only who a sample is, how long it is, and its text stay here; its tensors never come.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from distqueue import DistQueue, PackedBatch
from distqueue.core import QueueClosed
from fusion.colocate import StageReport, Worker, WorkerSpec
from fusion.inference import Output
from fusion.rewards import RewardOutcome, RewardPool, RewardSample
from fusion.training import split_over_ranks
from stalesync.cards import Cards
from stalesync.prompts import Prompt

BATCH = 64
"""Samples scored at a time, while others are still being generated."""

LOOK_S = 1.0
"""The thread that waits for samples looks this often whether it is to end."""


@dataclass
class Scored:
    """What the controller keeps of a sample: never its tensors. ``oldest``, ``newest``: policy versions of its
    tokens."""

    id: str
    prompt: Prompt
    response: str
    prompt_tokens: int
    response_tokens: int
    outcome: RewardOutcome
    oldest: int = 0
    newest: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.response_tokens


@dataclass(frozen=True)
class Finished:
    """A sample to be judged. ``tokens`` of prompt and response, only where the queue does not hold them."""

    id: str
    prompt: Prompt
    response: str
    prompt_tokens: int
    response_tokens: int
    versions: tuple[int, int] = (0, 0)
    tokens: tuple[Sequence[int], Sequence[int]] | None = None

    @property
    def length(self) -> int:
        return self.prompt_tokens + self.response_tokens

    def scored(self, outcome: RewardOutcome) -> Scored:
        sizes = self.prompt_tokens, self.response_tokens
        return Scored(self.id, self.prompt, self.response, *sizes, outcome, *self.versions)


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
        reports = self._cards.on(self._ranks).call(Worker.score, ids, kept or None)
        self._reports += reports
        found = {id: outcome for report in reports for id, outcome in report.scores.items()}
        return [found[one.id] for one in samples]

    def reports(self) -> list[StageReport]:
        reports, self._reports = self._reports, []
        return reports


class Scorer:
    """Takes samples from the queue's task `reward` while the block lasts: use it as a context manager."""

    def __init__(self, judge: Judge, queue: DistQueue, tokenizer: Any):
        self._judge, self._queue, self._tokenizer = judge, queue, tokenizer
        self._prompts: dict[str, Prompt] = {}
        self._news = threading.Condition()
        self._arrived: list[Finished] = []
        self._scored: list[Scored] = []
        self._waiting: list[Finished] = []
        """For `judge`"""
        self.unscored = 0
        """Samples that have arrived and are not scored, or of whose score `news` has not told yet"""
        self._error: BaseException | None = None
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)

    def __enter__(self) -> Scorer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()

    @property
    def beside(self) -> bool:
        """Whether samples are scored while others are generated."""
        return self._judge.beside

    def expect(self, prompts: Iterable[Prompt]) -> None:
        """Before groups of these prompts are generated."""
        self._prompts |= {prompt.id: prompt for prompt in prompts}

    @property
    def expected(self) -> dict[str, Prompt]:
        """Prompts of whose groups samples are still to be scored."""
        return dict(self._prompts)

    def forget(self, group: str) -> None:
        """Every sample of it is scored."""
        del self._prompts[group]

    def news(self, patience_s: float) -> tuple[list[Finished], list[Scored]]:
        """What has arrived and what was scored since the last call, by id; waits at most so long for the first. What
        the scoring raised is raised here."""
        with self._news:
            if not (self._arrived or self._scored or self._error):
                self._news.wait(patience_s)
            if self._error is not None:
                raise self._error
            arrived, self._arrived = self._arrived, []
            scored, self._scored = self._scored, []
            self.unscored -= len(scored)
        return sorted(arrived, key=lambda one: one.id), sorted(scored, key=lambda one: one.id)

    def judge(self) -> tuple[list[Scored], list[StageReport]]:
        """Scores what has arrived and could not be scored beside. In the TRAIN phase. Also the cards' reports."""
        with self._news:
            waiting, self._waiting = sorted(self._waiting, key=lambda one: one.id), []
        if not waiting:
            return [], self._judge.reports()
        outcomes = self._judge(waiting)
        self._queue.ack("reward", [one.id for one in waiting])
        with self._news:
            self.unscored -= len(waiting)
        return [one.scored(outcome) for one, outcome in zip(waiting, outcomes, strict=True)], self._judge.reports()

    def reports(self) -> list[StageReport]:
        """Of the cards that have scored since they were asked for last, here or by `judge`."""
        return self._judge.reports()

    def answers(self, prompts: Sequence[Prompt], outputs: Mapping[str, Output]) -> list[tuple[str, RewardOutcome]]:
        """The text and the outcome of one answer a prompt, which the queue does not hold. In the TRAIN phase."""
        found = [outputs[prompt.id] for prompt in prompts]
        texts = [self.text(output.tokens) for output in found]
        samples = [
            Finished(prompt.id, prompt, text, len(prompt.ids), len(output.tokens), tokens=(prompt.ids, output.tokens))
            for prompt, text, output in zip(prompts, texts, found, strict=True)
        ]
        outcomes = self._judge(samples)
        return list(zip(texts, outcomes, strict=True))

    def text(self, tokens: Sequence[int]) -> str:
        """The response as the reward sees it: without the end token that stopped it, with every other token."""
        ended = bool(tokens) and tokens[-1] == self._tokenizer.eos_token_id
        return self._tokenizer.decode(list(tokens[:-1] if ended else tokens))

    def _run(self) -> None:
        try:
            while not self._ends.is_set():
                try:
                    batch = self._queue.get("reward", ["prompt", "response"], BATCH, partial=True, timeout_s=LOOK_S)
                except TimeoutError:
                    continue
                self._take(batch)
        except BaseException as error:
            if self._ends.is_set() and isinstance(error, QueueClosed):
                return
            with self._news:
                self._error = error
                self._news.notify_all()

    def _take(self, batch: PackedBatch) -> None:
        finished = [self._finished(batch, row) for row in range(len(batch))]
        with self._news:
            self._arrived += finished
            self.unscored += len(finished)
            if not self.beside:
                self._waiting += finished
            self._news.notify_all()
        if not self.beside:
            return
        scored = [one.scored(outcome) for one, outcome in zip(finished, self._judge(finished), strict=True)]
        self._queue.ack("reward", batch.ids)
        with self._news:
            self._scored += scored
            self._news.notify_all()

    def _finished(self, batch: PackedBatch, row: int) -> Finished:
        prompt, response = batch["prompt"][row], batch["response"][row]
        sizes = len(prompt), len(response)
        known = self._prompts[batch.groups[row]]
        return Finished(batch.ids[row], known, self.text(response.tolist()), *sizes, batch.versions[row])

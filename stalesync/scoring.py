"""From finished samples to rewards, while others are generated wherever the source of rewards may.

    queue ─► the thread leases samples as they finish ─► `poll`: generated
               └─ scored at once, where the source is concurrent ───────► `poll`: scored
                                    └─ else by `score_waiting`, when the cards have switched to TRAIN

The queue delivers a sample's text, and its lengths as metadata; its tokens are never sent to this process. The cards of
a reward model read them directly from the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from distqueue import PackedBatch
from distqueue.core import QueueClosed
from fusion.colocate import StageReport
from fusion.rewards import RewardOutcome
from fusion.rollout.packing import TEXT
from fusion.rollout.types import EvalAnswer
from stalesync.prompts import Prompt
from stalesync.reward_sources import RewardSource
from stalesync.samples import GeneratedSample, ScoredSample

REWARD = "reward"
"""The queue's task of scoring."""

EVALUATED = "evaluated"
"""Reason for which the tokens of a held-out prompt's answer are dropped from the queue."""

MAX_BATCH = 64
"""Maximum number of samples scored at a time, while others are still being generated."""

POLL_S = 1.0
"""Interval at which the thread that waits for samples checks whether it must end."""


class ScoringQueue(Protocol):
    """The part of the queue's interface that scoring uses."""

    def get(self, task: str, columns: Sequence[str], count: int, *, partial: bool, timeout_s: float) -> PackedBatch: ...

    def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> dict[str, list[int]]: ...

    def ack(self, task: str, ids: Sequence[str]) -> None: ...

    def drop(self, ids: Sequence[str], reason: str) -> None: ...


class ScoringProgress:
    """Tracks which samples were generated, wait for their score, and are scored. Pure.

    Invariants (property-tested): every sample is taken once as generated and once as scored, never scored first;
    `num_unscored` counts the samples that are generated and not taken as scored yet.
    """

    def __init__(self) -> None:
        self.num_unscored = 0
        self._generated: list[GeneratedSample] = []
        self._scored: list[ScoredSample] = []
        self._waiting: list[GeneratedSample] = []

    @property
    def has_news(self) -> bool:
        return bool(self._generated or self._scored)

    def observe_generated(self, samples: Sequence[GeneratedSample], wait: bool) -> None:
        """Records generated samples. ``wait``: `take_waiting` returns them for scoring; else the caller scores them
        now."""
        self._generated += samples
        self.num_unscored += len(samples)
        if wait:
            self._waiting += samples

    def observe_scored(self, samples: Sequence[ScoredSample]) -> None:
        self._scored += samples

    def take_generated(self) -> list[GeneratedSample]:
        """Returns the samples generated since the last call, in order of ids."""
        generated, self._generated = self._generated, []
        return sorted(generated, key=lambda sample: sample.id)

    def take_scored(self) -> list[ScoredSample]:
        """Returns the samples scored since the last call, in order of ids."""
        scored, self._scored = self._scored, []
        self.num_unscored -= len(scored)
        return sorted(scored, key=lambda sample: sample.id)

    def take_waiting(self) -> list[GeneratedSample]:
        """Returns the samples that wait to be scored, in order of ids."""
        waiting, self._waiting = self._waiting, []
        return sorted(waiting, key=lambda sample: sample.id)


class Scorer:
    """Leases samples of the queue's task `reward` while the block lasts: use it as a context manager."""

    def __init__(self, source: RewardSource, queue: ScoringQueue):
        self._source, self._queue = source, queue
        self.prompts: dict[str, Prompt] = {}
        """Prompts of all groups that have not ended, by id; `Groups` adds each before its samples are generated"""
        self._progress = ScoringProgress()
        self._changed = threading.Condition()
        """Lock for all accesses to the progress and the error"""
        self._error: BaseException | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)

    def __enter__(self) -> Scorer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()

    @property
    def concurrent(self) -> bool:
        """Whether samples are scored while others are generated."""
        return self._source.concurrent

    @property
    def num_unscored(self) -> int:
        """Number of generated samples whose score `poll` has not returned yet."""
        with self._changed:
            return self._progress.num_unscored

    def poll(self, timeout_s: float) -> tuple[list[GeneratedSample], list[ScoredSample]]:
        """Returns the samples generated and those scored since the last call, each in order of ids; waits at most
        ``timeout_s`` for the first one. Raises the exception of the scoring thread, if any."""
        with self._changed:
            if not (self._progress.has_news or self._error):
                self._changed.wait(timeout_s)
            if self._error is not None:
                raise self._error
            return self._progress.take_generated(), self._progress.take_scored()

    def score_waiting(self) -> tuple[list[ScoredSample], list[StageReport]]:
        """Scores the samples that could not be scored concurrently, in the TRAIN phase. Also returns the cards'
        reports."""
        with self._changed:
            waiting = self._progress.take_waiting()
        if not waiting:
            return [], self._source.take_reports()
        scored = self._score(waiting)
        with self._changed:
            self._progress.observe_scored(scored)
            return self._progress.take_scored(), self._source.take_reports()

    def take_reports(self) -> list[StageReport]:
        """Returns the reports of cards that have scored since the last call, here or in `score_waiting`."""
        return self._source.take_reports()

    def score_answers(
        self, prompts: Sequence[Prompt], answers: Mapping[str, EvalAnswer]
    ) -> list[tuple[str, RewardOutcome]]:
        """Scores one answer per prompt (by its id), in the TRAIN phase; returns text and outcome of each. Drops the
        rows of the answers' tokens from the queue."""
        samples = [
            GeneratedSample(
                id=answers[prompt.id].row or prompt.id,
                prompt=prompt,
                response=answers[prompt.id].text,
                prompt_tokens=len(prompt.ids),
                response_tokens=answers[prompt.id].response_tokens,
            )
            for prompt in prompts
        ]
        outcomes = self._source(samples)
        if rows := [answers[prompt.id].row for prompt in prompts if answers[prompt.id].row]:
            self._queue.drop(rows, EVALUATED)
        return [(sample.response, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    batch = self._queue.get(REWARD, [TEXT], MAX_BATCH, partial=True, timeout_s=POLL_S)
                except TimeoutError:
                    continue
                self._take(batch)
        except BaseException as error:
            if self._stopping.is_set() and isinstance(error, QueueClosed):
                return
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self, batch: PackedBatch) -> None:
        samples = self._describe(batch)
        with self._changed:
            self._progress.observe_generated(samples, wait=not self.concurrent)
            self._changed.notify_all()
        if not self.concurrent:
            return
        scored = self._score(samples)
        with self._changed:
            self._progress.observe_scored(scored)
            self._changed.notify_all()

    def _score(self, samples: Sequence[GeneratedSample]) -> list[ScoredSample]:
        outcomes = self._source(samples)
        self._queue.ack(REWARD, [sample.id for sample in samples])
        return [sample.scored(outcome) for sample, outcome in zip(samples, outcomes, strict=True)]

    def _describe(self, batch: PackedBatch) -> list[GeneratedSample]:
        response_tokens = self._queue.lengths(batch.ids, ["response"])["response"]
        samples = []
        for row, id in enumerate(batch.ids):
            prompt = self.prompts[batch.groups[row]]
            samples.append(
                GeneratedSample(
                    id=id,
                    prompt=prompt,
                    response=batch[TEXT][row],
                    prompt_tokens=len(prompt.ids),
                    response_tokens=response_tokens[row],
                    versions=batch.versions[row],
                )
            )
        return samples

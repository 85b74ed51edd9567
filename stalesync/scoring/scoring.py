"""From finished samples to rewards, while others are generated wherever the source of rewards may.

    queue ─► the thread leases samples as they finish ─► `poll`: generated
               └─ scored at once, where the source is concurrent ───────► `poll`: scored
                                    └─ else by `score_waiting`, when the cards have switched to TRAIN

The queue delivers a sample's text, whether it was cut, and its lengths as metadata; its tokens are never sent to this
process. The cards of a reward model read them directly from the queue.

A reward that asks for the other responses of a group has each sample wait until all of its group have arrived or are
lost (`WholeGroups`). A sample is then acknowledged when it arrives: the controller has its text, and a checkpoint
contains it. Otherwise it is acknowledged when it is scored.

The queue delivers a sample again whose lease has ended before it was acknowledged: it expired, or the queue's actor was
restarted, whose journal holds no leases. Such a sample is scored once all the same (`Arrivals`)."""

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import sub
from typing import Any

from distqueue import DistQueue, PackedBatch
from distqueue.errors import QueueClosed
from fusion.colocate import StageReport
from fusion.rewards import RewardOutcome
from fusion.rewards.batch_size import ScoringBatch
from fusion.rewards.whole_groups import WholeGroups
from fusion.rollout.packing import CUT, SAMPLED_TOKENS, TEXT
from fusion.rollout.types import EvalAnswer, conversation_of
from stalesync.policy.conversations import Conversation
from stalesync.process.failures import RewardsFailed
from stalesync.prompts import Prompt
from stalesync.scoring.failed_rewards import FailedRewards, TooManyFailed
from stalesync.scoring.progress import Arrivals, ScoringProgress
from stalesync.scoring.samples import LOST, Sample, by_id
from stalesync.scoring.sources import RewardSource

REWARD = "reward"
"""The queue's task of scoring."""
RESPONSE = "response"
"""Column of the response's tokens, of which the controller receives the number only."""
EVALUATED = "evaluated"
"""Reason for which the tokens of a held-out prompt's answer are dropped from the queue."""
MAX_STOP_S = 2.0
"""Maximum seconds for which the end of the block waits until the samples that are being scored are scored"""
POLL_S = 1.0
"""Interval at which the thread that waits for samples checks whether it must end."""


class Scorer:
    """Lease samples of the queue's task `reward` while the block lasts: use it as a context manager. After the block
    its thread scores no sample; a call of the source that is still under way after `MAX_STOP_S` is left behind.
    ``max_failed_share``: if the share of failed rewards exceeds it (`FailedRewards`), the call that scores or polls
    raises `RewardsFailed`; ``group_size``: number of samples of a group, all of which the source is given together;
    None: each is scored when it has arrived; ``turns``: samples are conversations, whose observations are counted apart
    (`WorkerSpec.turns`); ``conversation``: gives a conversation by its id, on any thread."""

    def __init__(
        self,
        source: RewardSource,
        queue: DistQueue,
        max_failed_share: float = 1.0,
        group_size: int | None = None,
        *,
        turns: bool = False,
        conversation: Callable[[str], Conversation] | None = None,
    ):
        self._source, self._queue = source, queue
        self._turns, self._conversation = turns, conversation
        self._columns = (TEXT, CUT, SAMPLED_TOKENS) if turns else (TEXT, CUT)
        self._groups = None if group_size is None else WholeGroups[Sample](group_size)
        self._released: list[Sample] = []
        """Samples that need not wait for others of their group any more, for the thread to score"""
        self._failed = FailedRewards(max_failed_share)
        self.prompts: dict[str, Prompt] = {}
        """Prompts of all groups that have not ended, by id; `Groups` adds each before its samples are generated"""
        self._arrivals = Arrivals(self.prompts)
        self._progress = ScoringProgress()
        self._changed = threading.Condition()
        """Lock for all accesses to the progress and the error"""
        self._error: BaseException | None = None
        self._woken = False
        """Whether `wake` was called since the last `poll`"""
        self._stopping = threading.Event()
        self._scoring = threading.Lock()
        """Held by the thread while it handles samples"""
        self._batch_size = ScoringBatch()
        self._thread = threading.Thread(target=self._run, name="rewards", daemon=True)

    def __enter__(self) -> "Scorer":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        # The thread itself may wait for samples for another `POLL_S`; it is not joined, as it takes none any more.
        self._stopping.set()
        if self._scoring.acquire(timeout=MAX_STOP_S):
            self._scoring.release()

    @property
    def concurrent(self) -> bool:
        """Whether samples are scored while others are generated."""
        return self._source.concurrent

    @property
    def num_unscored(self) -> int:
        """Number of generated samples whose score `poll` has not returned yet, without those that wait for others of
        their group."""
        with self._changed:
            return self._progress.num_unscored

    def wait_acknowledged(self) -> None:
        """Wait until every scored sample is acknowledged to the queue. Raise the exception of the scoring thread, if
        any."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or not self._progress.num_unacknowledged)
            if self._error is not None:
                raise self._error

    def poll(self, timeout_s: float) -> tuple[list[Sample], list[Sample]]:
        """Return the samples generated and those scored since the last call, each in order of ids; wait at most
        ``timeout_s`` for the first one, or for `wake`. Raise the exception of the scoring thread, if any."""
        with self._changed:
            if not (self._progress.has_news or self._error or self._woken):
                self._changed.wait(timeout_s)
            self._woken = False
            if self._error is not None:
                raise self._error
            return self._progress.take_generated(), self._progress.take_scored()

    def wake(self) -> None:
        """End the wait of `poll`: something else has happened. Thread-safe."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def score_waiting(self) -> tuple[list[Sample], list[StageReport]]:
        """Score the samples that could not be scored concurrently, in the TRAIN phase. Also returns the cards'
        reports."""
        with self._changed:
            waiting = self._progress.take_waiting()
        if not waiting:
            return [], self._source.take_reports()
        self._score(waiting)
        with self._changed:
            return self._progress.take_scored(), self._source.take_reports()

    def take_reports(self) -> list[StageReport]:
        """Return the reports of cards that have scored since the last call, here or in `score_waiting`."""
        return self._source.take_reports()

    def note_lost(self, samples: Sequence[Sample]) -> None:
        """Record samples that the queue has lost before they arrived: no other sample waits for them."""
        if self._groups is not None and samples:
            with self._changed:
                self._observe_ready(self._groups.give_up(samples))

    def state_dict(self) -> dict[str, Any]:
        """Return the samples that wait for others of their group as plain JSON; nothing if there are none."""
        with self._changed:
            held = [] if self._groups is None else [sample.unscored_state_dict() for sample in self._groups.held()]
        return {"held": held} if held else {}

    def load_state_dict(self, state: Mapping[str, Any], scored: Mapping[str, Sequence[Sample]]) -> None:
        """Restore the state; other keys are ignored. `prompts` has been restored. ``scored``: samples by group that
        have a score, of groups that have not ended."""
        known = {sample.id for members in scored.values() for sample in members}
        held = [Sample.restore(self.prompts[fields["group"]], fields) for fields in state.get("held", ())]
        held = [sample for sample in held if sample.id not in known]  # one may have been lost after it had arrived
        texts = {
            group: {sample.id: None if sample.outcome.error == LOST else sample.response for sample in members}
            for group, members in scored.items()
        }
        with self._changed:
            self._observe_ready(held if self._groups is None else self._groups.restore(held, texts))

    def score_answers(
        self,
        prompts: Sequence[Prompt],
        answers: Mapping[str, EvalAnswer],
        source: RewardSource | None = None,
        *,
        group_size: int = 1,
        known: Mapping[str, RewardOutcome] | None = None,
    ) -> list[tuple[str, RewardOutcome]]:
        """Score one answer per prompt (by its id), in the TRAIN phase; return text and outcome of each. Drop the rows
        of the answers' tokens from the queue. ``source``: a reward of these prompts' own, whose failures are not
        counted here; None: the run's; ``group_size``: number of consecutive prompts that are the same one: their
        answers are a group; ``known``: outcomes of answers that cannot be scored, by the prompt's id."""
        samples = [
            Sample(
                id=answers[prompt.id].row or prompt.id,
                prompt=prompt,
                response=answers[prompt.id].text,
                prompt_tokens=len(prompt.ids),
                response_tokens=answers[prompt.id].response_tokens,
            )
            for prompt in prompts
        ]
        for start in range(0, len(samples), group_size):
            group = samples[start : start + group_size]
            for sample in group:
                sample.others = [other.response for other in group if other is not sample]
        known = known or {}
        to_score = [sample for prompt, sample in zip(prompts, samples, strict=True) if prompt.id not in known]
        scored = iter((source or self._source)(to_score) if to_score else ())
        outcomes = [known[prompt.id] if prompt.id in known else next(scored) for prompt in prompts]
        if source is None:
            with self._changed:
                _refuse(self._failed.observe(outcomes))
        if rows := [answers[prompt.id].row for prompt in prompts if answers[prompt.id].row]:
            self._queue.drop(rows, EVALUATED)
        return [(sample.response, outcome) for sample, outcome in zip(samples, outcomes, strict=True)]

    def observe_outcomes(self, outcomes: Sequence[RewardOutcome]) -> None:
        """Count outcomes of what was not given to be scored; raise `RewardsFailed` if too many failed."""
        with self._changed:
            _refuse(self._failed.observe(outcomes))

    def check_failed(self) -> None:
        """Raise `RewardsFailed` if too many rewards failed, at the end of a run."""
        with self._changed:
            _refuse(self._failed.judge())

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                try:
                    count = self._batch_size.count
                    batch = self._queue.get(
                        REWARD, self._columns, count, lengths=[RESPONSE], partial=True, timeout_s=POLL_S
                    )
                except TimeoutError:
                    batch = None
                start = time.perf_counter()
                with self._scoring:
                    if not self._stopping.is_set():
                        self._take(batch)
                if batch is not None:
                    self._batch_size.observe(len(batch), time.perf_counter() - start)
        except BaseException as error:
            if self._stopping.is_set() and isinstance(error, QueueClosed):
                return
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _take(self, batch: PackedBatch | None) -> None:
        """Handle the samples of a batch, and score what is ready."""
        samples = [] if batch is None else self._describe(batch)
        with self._changed:
            self._progress.observe_generated(samples)
            if self._groups is None:
                self._observe_ready(samples)
            else:
                self._observe_ready(self._groups.add(samples))
                self._progress.observe_to_acknowledge(len(samples))
            ready, self._released = self._released, []
            self._changed.notify_all()
        if self._groups is not None:
            self._acknowledge(samples)
        if ready:
            self._score(ready)

    def _observe_ready(self, samples: Sequence[Sample]) -> None:
        """Record samples that can be scored; holds the lock."""
        self._progress.observe_ready(samples, wait=not self.concurrent)
        if self.concurrent:
            self._released += samples

    def _score(self, samples: Sequence[Sample]) -> None:
        """Score samples. They are reported before they are acknowledged, so that training need not wait for that."""
        outcomes = self._source(samples)
        for sample, outcome in zip(samples, outcomes, strict=True):
            sample.outcome = outcome
        with self._changed:
            _refuse(self._failed.observe(outcomes))
            self._progress.observe_scored(samples)
            if self._groups is None:
                self._progress.observe_to_acknowledge(len(samples))
            self._changed.notify_all()
        if self._groups is None:
            self._acknowledge(samples)

    def _acknowledge(self, samples: Sequence[Sample]) -> None:
        if not samples:
            return
        self._queue.ack(REWARD, [sample.rows[-1] for sample in samples])
        with self._changed:
            self._progress.observe_acknowledged(len(samples))
            self._changed.notify_all()

    def _describe(self, batch: PackedBatch) -> list[Sample]:
        """Return the batch's samples in order of ids. Leaves out those that have arrived before, and those whose group
        has ended meanwhile: the queue has lost them, and `Groups.note_lost` has counted them."""
        groups = {*batch.groups}
        prompts_by_group = {group: prompt for group in groups if (prompt := self.prompts.get(group)) is not None}
        rows = self._arrivals.new(batch.ids, batch.groups)
        if len(prompts_by_group) < len(groups):
            rows = [row for row in rows if batch.groups[row] in prompts_by_group]
        if len(rows) < len(batch):
            batch = batch.select(rows)
        if not batch.ids:
            return []
        prompts = [prompts_by_group[group] for group in batch.groups]
        prompt_tokens = [len(prompt.ids) for prompt in prompts]
        oldest, newest = zip(*batch.versions, strict=True)
        texts, lengths, cut = batch[TEXT].texts(), batch.lengths[RESPONSE], batch[CUT].buffer.tolist()
        ids = [*map(conversation_of, batch.ids)] if self._turns else batch.ids
        fields: list[Iterable[Any]] = [ids, prompts, texts, prompt_tokens, lengths, oldest, newest, cut]
        if SAMPLED_TOKENS in batch.columns:
            fields.append(map(sub, lengths, batch[SAMPLED_TOKENS].buffer.tolist()))
        samples = list(map(Sample, *fields))  # by keyword it would take three times as long
        for sample, row in zip(samples, batch.ids, strict=True) if self._turns else ():
            if row != sample.id and self._conversation is not None:
                sample.add_branches(self._conversation(sample.id))
        return sorted(samples, key=by_id)


def _refuse(verdict: TooManyFailed | None) -> None:
    if verdict is not None:
        raise RewardsFailed(str(verdict))

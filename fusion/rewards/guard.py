"""Score samples in guarded processes and attribute each failure to the sample that caused it.

Invariants:
1. Every sample gets exactly one outcome, in the order of the arguments.
2. A sample that raises, exceeds the limit of time or memory, returns no finite number or kills its process fails alone:
   the samples queued behind it are still scored, each exactly once. A reward that scores a batch is called again for
   each sample of a call that failed so, so that the others have their scores.
3. `reward` is None if and only if `error` is set; a failure is never reported as 0.
4. No child survives `close` or the end of this process, however it ends; none is started after `close`. A call of
   `score` under way on another thread raises then.
5. No process that a sample starts survives its outcome, and none that a child starts survives the child, also in a
   session of its own (`keeper.py`)."""

import logging
import selectors
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

from fusion.rewards.config import RewardConfig, RewardSpec
from fusion.rewards.outcome import RewardOutcome, RewardSample
from fusion.rewards.process import Child, GuardedPool
from fusion.rewards.wire import OTHERS, PREFILL, SPLIT, Result, ScoringStarted

log = logging.getLogger(__name__)

CHUNK = 64


class RewardBatch:
    """Samples of one call: the indices that wait, the outcomes, the number without one.
    ``alone``: indices that a reward that scores a batch gets one by one.

    Invariants (tests/rewards/test_reward_batches.py): an index is taken once, unless it is put back into ``waiting``;
    one of ``alone`` is taken by itself."""

    def __init__(self, samples: Sequence[RewardSample]) -> None:
        self.samples = samples
        self.waiting = deque(range(len(samples)))
        self.outcomes: list[RewardOutcome | None] = [None] * len(samples)
        self.num_open = len(samples)
        self.alone: set[int] = set()

    def take(self, limit: int, share: int) -> list[int]:
        """Remove and return the next indices that wait: ``share``, at most ``limit``; one of ``alone`` by itself."""
        count = min(limit, share, len(self.waiting))
        if count and self.waiting[0] in self.alone:
            count = 1
        indices: list[int] = []
        while len(indices) < count and not (indices and self.waiting[0] in self.alone):
            indices.append(self.waiting.popleft())
        return indices


class RewardPool(GuardedPool[Child]):
    """Score samples in `config.workers` children. Concurrent calls of `score` run one after another. The constructor
    starts the children, which are kept alive, and returns when they are ready.
    ``spec``: what the children compute; None: the reward of the config, without its terms.
    Raise ValueError: the config is invalid, or the user's function cannot be loaded (names `reward.path`)."""

    def __init__(self, config: RewardConfig, spec: RewardSpec | None = None) -> None:
        config.validate()
        computed = spec or config.spec
        super().__init__(lambda: Child(config, computed), workers=config.workers, label=computed.label)
        self._config = config
        self.kind = computed.kind
        """Kind of reward that the children compute (`RewardSpec.kind`)"""
        self._lock = threading.Lock()
        self._logged_errors: set[tuple[str, str]] = set()
        self._started = ScoringStarted("", [])
        """What the children have reported of the reward"""
        try:
            self._fill()
            while not self._start_error and not all(child.ready for child in self._children):
                self._process_events(RewardBatch([]))
            if self._start_error:
                raise ValueError(self._start_error)
        except BaseException:
            self.close()
            raise

    @property
    def required_fields(self) -> frozenset[str]:
        """Fields of the data row without which the reward cannot be called."""
        return frozenset(self._started.required_fields)

    @property
    def needs_group(self) -> bool:
        """Whether the reward asks for the other responses of a sample's group (`RewardSample.others`)."""
        return OTHERS in self._started.asks

    def check_fields(self, everywhere: Collection[str]) -> None:
        """Check that every row of the data has the fields that the reward requires.
        ``everywhere``: fields that every row has, besides prompt and answer.
        Raise ValueError: names the reward, the fields that some row lacks, and the fields that every row has."""
        if missing := sorted(self.required_fields - {*everywhere}):
            raise ValueError(
                f"{self.label}: the reward requires the field {' and '.join(map(repr, missing))}, which the data lacks "
                f"in some or all rows. Besides prompt and answer, every row has: "
                f"{', '.join(sorted(everywhere)) or 'no field'}. Give the parameter a default, or add the field to the "
                "data"
            )

    def score(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """Score samples; returns one outcome per sample, in order. A sample's failure is stored in its outcome and
        logged once per distinct error.
        Raise RuntimeError: the pool is closed, or another thread closes it meanwhile."""
        with self._lock:
            self._check_open()
            batch = RewardBatch(samples)
            try:
                for child in [child for child in self._children if child.has_ended]:
                    self._drop(child)  # killed from outside while it was idle: it fails no sample
                self._fill()
                while batch.num_open:
                    self._check_open()
                    if not self._children:
                        self._fail_remaining(batch)
                        break
                    idle = [child for child in self._children if child.is_idle]
                    for num_served, child in enumerate(idle):
                        self._dispatch(child, batch, num_idle=len(idle) - num_served)
                    self._process_events(batch)
            except BaseException:
                # Children may hold samples of this batch; the next call starts with new ones.
                self._end_all()
                raise
            return [outcome for outcome in batch.outcomes if outcome is not None]

    def close(self) -> None:
        """Kill every child, and wait until a call of `score` on another thread has ended; idempotent."""
        self._closed = True
        for child in list(self._children):
            child.kill()  # wakes that call
        with self._lock:
            self._end_all()
            self._selector.close()

    def _dispatch(self, child: Child, batch: RewardBatch, num_idle: int) -> None:
        # Chunks shrink with the samples that remain (guided self-scheduling): slow ones spread over children. A batch
        # is to be large instead.
        num_waiting = len(batch.waiting)
        share = -(-num_waiting // num_idle) if self._started.scores_batch else num_waiting // (2 * len(self._children))
        indices = batch.take(CHUNK, max(1, share))
        if not indices:
            return
        if self._started.scores_batch and len(indices) == 1:
            batch.alone.update(indices)
        child.deadline = time.monotonic() + self._config.time_limit_s
        child.enqueue([(i, self._arguments(batch.samples[i])) for i in indices], in_one_call=self._started.scores_batch)
        self._watch(child)

    def _arguments(self, sample: RewardSample) -> tuple[str, str, str, dict[str, Any]]:
        fields = sample.fields | {OTHERS: [*sample.others]} if self.needs_group else sample.fields
        if PREFILL in self._started.asks:
            fields = fields | {PREFILL: sample.prefill}
        # A format is one of all that the model's turn contains.
        response = sample.prefill + sample.response if self.kind == "format" else sample.response
        return sample.prompt, response, sample.answer, fields

    def _process_events(self, batch: RewardBatch) -> None:
        """Wait for the next event (a result, a socket that accepts data, a deadline) and process it."""
        busy = [child for child in self._children if child.pending or child.retired or not child.ready]
        wait_s = min((child.deadline for child in busy), default=0.0) - time.monotonic()
        responsive = set()
        events_by_child = self._selector.select(max(wait_s, 0.0))
        self._check_open()  # if another thread has closed the pool, it has killed the children
        for key, events in events_by_child:
            child = key.data
            responsive.add(child)
            if events & selectors.EVENT_WRITE:
                child.flush()
                self._watch(child)
            if events & selectors.EVENT_READ:
                self._read(child, batch)
        # A child with an event is checked next time: its result may have waited while this process was busy.
        now = time.monotonic()
        for child in busy:
            if child not in responsive and child.deadline <= now:
                self._expire(child, batch)

    def _read(self, child: Child, batch: RewardBatch) -> None:
        replies, alive = child.receive()
        for index, reply in replies:
            if isinstance(reply, Result) and child.pending and child.pending[0] == index:
                if reply.error == SPLIT:
                    self._split(child, reply, batch)
                else:
                    self._take(child, reply, batch)
            elif isinstance(reply, ScoringStarted) and not child.ready:
                self._start(child, reply)
            else:
                alive = False
                child.unreadable = f"was killed, as it had sent a result of sample {index}, which it was not scoring"
                break
        if not alive and child in self._children:
            self._handle_exit(child, batch)

    def _start(self, child: Child, started: ScoringStarted) -> None:
        self._start_error = started.error
        if started.error:
            self._drop(child)
            return
        child.ready = True
        self._started = started

    def _take(self, child: Child, result: Result, batch: RewardBatch) -> None:
        index = child.pending.popleft()
        child.deadline = time.monotonic() + self._config.time_limit_s
        child.retired = result.error == "memory"
        outcome = RewardOutcome(result.reward, result.error, result.detail, seconds=result.seconds)
        self._settle(batch, index, outcome, result.key)

    def _split(self, child: Child, result: Result, batch: RewardBatch) -> None:
        """Have each sample of a call that failed scored alone."""
        child.retired = result.key == "memory"
        batch.alone.update(child.pending)
        self._requeue(child, batch)

    def _handle_exit(self, child: Child, batch: RewardBatch) -> None:
        end, trace = self._drop_ended(child)
        if not child.ready:
            self._start_error = f"{self.label}: its process {end} before it was ready\n{trace}".rstrip()
            return
        detail = f"the process that scored this sample {end}\n{trace}".rstrip()
        self._fail_current(child, batch, error="died", detail=detail, distinct=end)
        self._fill()

    def _expire(self, child: Child, batch: RewardBatch) -> None:
        if not child.ready:
            self._start_error = self._drop_late(child)
            return
        trace = child.dump_stack()
        self._drop(child)
        limit = self._config.time_limit_s
        distinct = next((line.rpartition(" in ")[2] for line in trace.splitlines() if " in " in line), "")
        detail = f"exceeded reward.time_limit_s={limit}; its stack was\n{trace}".rstrip()
        self._fail_current(child, batch, error="timeout", detail=detail, distinct=distinct)
        self._fill()

    def _fail_current(self, child: Child, batch: RewardBatch, *, error: str, detail: str, distinct: str) -> None:
        """Fail the sample that the child was scoring; requeue the samples behind it at the front. Of the samples of one
        call, none is known to be the cause: requeue all, each to be scored alone."""
        if child.retired or not child.pending:
            self._requeue(child, batch)
            return
        if self._started.scores_batch and child.pending[0] not in batch.alone:
            batch.alone.update(child.pending)
            self._requeue(child, batch)
            return
        index = child.pending.popleft()
        self._requeue(child, batch)
        seconds = time.monotonic() - child.deadline + self._config.time_limit_s
        self._settle(batch, index, RewardOutcome(None, error, detail, seconds=seconds), distinct)

    def _requeue(self, child: Child, batch: RewardBatch) -> None:
        batch.waiting.extendleft(reversed(child.pending))
        child.pending.clear()

    def _settle(self, batch: RewardBatch, index: int, outcome: RewardOutcome, distinct: str) -> None:
        """Store a sample's outcome; log its error unless one of the same kind and ``distinct`` key was logged."""
        assert batch.outcomes[index] is None, f"sample {index} was scored twice"
        batch.outcomes[index] = outcome
        batch.num_open -= 1
        if outcome.error and (outcome.error, distinct) not in self._logged_errors:
            self._logged_errors.add((outcome.error, distinct))
            log.warning(
                "%s: a sample failed (%s) and is not scored. Logged once; reward/failed counts all.\n%s",
                self.label, outcome.error, outcome.detail,
            )  # fmt: skip

    def _fail_remaining(self, batch: RewardBatch) -> None:
        detail = f"no process could be started to score this sample: {self._start_error}"
        for index in batch.waiting:
            self._settle(batch, index, RewardOutcome(None, "died", detail), "start")
        batch.waiting.clear()
        assert not batch.num_open

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the reward pool is closed")

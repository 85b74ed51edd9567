"""A few guarded processes that score samples, and who pays when one of them fails.

Invariants:
1. Every sample gets exactly one outcome, in the order given.
2. A sample that raises, runs past the time limit, returns no finite number or kills its process costs itself only:
   those behind it are scored all the same, and none of them is settled twice.
3. `reward` is None if and only if `error` is set; a failure is never a 0.
4. After `close`, or after this process is gone in whatever way, no child is left.
"""

from __future__ import annotations

import logging
import selectors
import signal
import threading
import time
from collections import deque
from collections.abc import Sequence

from fusion.rewards.config import RewardConfig
from fusion.rewards.outcome import RewardOutcome, RewardSample
from fusion.rewards.process import Child, start_child
from fusion.rewards.wire import START

log = logging.getLogger(__name__)

START_LIMIT_S = 60.0
CHUNK = 64


class RewardPool:
    """Scores samples in `config.workers` children. One call of `score` at a time; further callers wait their turn.

    The children are started at once and kept warm. The constructor returns when they are ready.

    Raises:
        ValueError: the config is wrong, or the user's function cannot be loaded (naming `reward.path`).
    """

    def __init__(self, config: RewardConfig) -> None:
        config.validate()
        self._config = config
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._children: list[Child] = []
        self._shown: set[tuple[str, str]] = set()
        self._start_error = ""
        self._closed = False
        try:
            self._fill()
            while not self._start_error and not all(child.ready for child in self._children):
                self._turn(_Batch([]))
            if self._start_error:
                raise ValueError(self._start_error)
        except BaseException:
            self.close()
            raise

    def score(self, samples: Sequence[RewardSample]) -> list[RewardOutcome]:
        """One outcome per sample, in order. What fails is in its outcome and is logged once per distinct error; only
        being interrupted or closed raises."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            batch = _Batch(samples)
            try:
                self._replace_dead()
                self._fill()
                while batch.open:
                    if not self._children:
                        self._give_up(batch)
                        break
                    for child in self._children:
                        if child.ready and not child.pending:
                            self._hand_out(child, batch)
                    self._turn(batch)
            except BaseException:
                # Children may hold half of this batch; the next call starts with fresh ones.
                self._end_all()
                raise
            return [outcome for outcome in batch.outcomes if outcome is not None]

    def close(self) -> None:
        """Ends every child; may be called again."""
        self._closed = True
        self._end_all()
        self._selector.close()

    def __enter__(self) -> RewardPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _hand_out(self, child: Child, batch: _Batch) -> None:
        # Shares shrink with what is left (guided self-scheduling), so slow samples end up spread over all children.
        count = min(CHUNK, max(1, len(batch.waiting) // (2 * len(self._children))), len(batch.waiting))
        if not count:
            return
        indices = [batch.waiting.popleft() for _ in range(count)]
        child.deadline = time.monotonic() + self._config.time_limit_s
        child.hand([(i, (s.prompt, s.response, s.answer, s.fields)) for i in indices for s in (batch.samples[i],)])
        self._watch(child)

    def _turn(self, batch: _Batch) -> None:
        """Waits for the next thing to happen and deals with it."""
        busy = [child for child in self._children if child.pending or not child.ready]
        wait_s = min((child.deadline for child in busy), default=0.0) - time.monotonic()
        heard = set()
        for key, events in self._selector.select(max(wait_s, 0.0)):
            child = key.data
            heard.add(child)
            if events & selectors.EVENT_WRITE:
                child.flush()
                self._watch(child)
            if events & selectors.EVENT_READ:
                self._hear(child, batch)
        # Who was heard is judged next time: its result may have lain in the pipe while this process was kept busy.
        now = time.monotonic()
        for child in busy:
            if child not in heard and child.deadline <= now:
                self._expire(child, batch)

    def _hear(self, child: Child, batch: _Batch) -> None:
        frames, there = child.receive()
        for index, value in frames:
            if index == START:
                if value is not None:
                    self._start_error = value
                    self._drop(child)
                    return
                child.ready, self._start_error = True, ""
                continue
            done = child.pending.popleft()
            assert done == index, f"child answered sample {index}, expected {done}"
            child.deadline = time.monotonic() + self._config.time_limit_s
            reward, error, detail, distinct, seconds = value
            self._settle(batch, index, RewardOutcome(reward, error, detail, seconds), distinct)
        if not there:
            self._bury(child, batch)

    def _bury(self, child: Child, batch: _Batch) -> None:
        trace = child.written_trace()
        # Its socket closes a moment before its status can be read.
        status = self._drop(child, grace_s=1.0)
        end = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        if not child.ready:
            self._start_error = f"{self._source()}: its process {end} before it was ready\n{trace}".rstrip()
            return
        self._charge(child, batch, "died", f"the process that scored this sample {end}\n{trace}".rstrip(), end)
        self._fill()

    def _expire(self, child: Child, batch: _Batch) -> None:
        trace = child.dump_stack()
        self._drop(child)
        if not child.ready:
            self._start_error = f"{self._source()}: not ready after {START_LIMIT_S:.0f} s\n{trace}".rstrip()
            return
        limit = self._config.time_limit_s
        distinct = next((line.rpartition(" in ")[2] for line in trace.splitlines() if " in " in line), "")
        detail = f"ran past reward.time_limit_s={limit}; it was at\n{trace}".rstrip()
        self._charge(child, batch, "timeout", detail, distinct)
        self._fill()

    def _charge(self, child: Child, batch: _Batch, error: str, detail: str, distinct: str) -> None:
        """The sample the child was at pays for its end; those behind it go back to the front of the line."""
        if not child.pending:
            return
        index = child.pending.popleft()
        batch.waiting.extendleft(reversed(child.pending))
        child.pending.clear()
        seconds = time.monotonic() - child.deadline + self._config.time_limit_s
        self._settle(batch, index, RewardOutcome(None, error, detail, seconds), distinct)

    def _settle(self, batch: _Batch, index: int, outcome: RewardOutcome, distinct: str) -> None:
        assert batch.outcomes[index] is None, f"sample {index} was scored twice"
        batch.outcomes[index] = outcome
        batch.open -= 1
        if outcome.error and (outcome.error, distinct) not in self._shown:
            self._shown.add((outcome.error, distinct))
            log.warning(
                "%s: a sample failed (%s) and is not scored. Shown once; reward/failed counts every one.\n%s",
                self._source(), outcome.error, outcome.detail,
            )  # fmt: skip

    def _give_up(self, batch: _Batch) -> None:
        detail = f"no process could be started to score it: {self._start_error}"
        for index in batch.waiting:
            self._settle(batch, index, RewardOutcome(None, "died", detail), "start")
        batch.waiting.clear()
        assert not batch.open

    def _source(self) -> str:
        config = self._config
        return f"reward.path={config.path!r}" if config.kind == "custom" else f"reward.name={config.name!r}"

    def _fill(self) -> None:
        """Starts children up to `workers`."""
        while len(self._children) < self._config.workers:
            child = start_child(self._config)
            child.deadline = time.monotonic() + START_LIMIT_S
            self._children.append(child)
            self._selector.register(child, selectors.EVENT_READ, child)

    def _replace_dead(self) -> None:
        """A child that died idle (killed from outside) must not cost the next sample."""
        for child in [c for c in self._children if c.process.poll() is not None]:
            self._drop(child)

    def _watch(self, child: Child) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.wants_write else 0)
        self._selector.modify(child, events, child)

    def _drop(self, child: Child, grace_s: float = 0.0) -> int:
        self._children.remove(child)
        self._selector.unregister(child)
        return child.end(grace_s)

    def _end_all(self) -> None:
        for child in list(self._children):
            self._drop(child)


class _Batch:
    """The samples of one call: which wait, which are settled, how many are open."""

    def __init__(self, samples: Sequence[RewardSample]) -> None:
        self.samples = samples
        self.waiting = deque(range(len(samples)))
        self.outcomes: list[RewardOutcome | None] = [None] * len(samples)
        self.open = len(samples)

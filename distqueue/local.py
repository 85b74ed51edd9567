"""The queue in one process: the core behind a lock, and payloads where they were put. Thread-safe.

Nobody holds the lock while waiting or copying payload, so a starved reader delays no other client, and nothing polls: a
waiter sleeps until it is answered or until its deadline, and a timer runs while a lease's end could serve one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from typing import Any

from distqueue.config import LEASE_S
from distqueue.core import QueueCore, Share
from distqueue.messages import Delivery, Put
from distqueue.packed import PackedBatch
from distqueue.payload.buffers import WarmBuffers
from distqueue.payload.gather import gather_columns
from distqueue.payload.segment_file import Stretch, stretches_of
from distqueue.samples import SampleTable, Span, Want
from distqueue.segments import Segment, Shard

HERE = "here"

log = logging.getLogger(__name__)


class LocalQueue:
    """Samples between the stages of one process; `DistQueue` is the same across processes.

    `tasks`: who must acknowledge a sample before it is freed. `group_size`: members of every group, for `whole_groups`.
    `lease_s`: what a reader got and has not acknowledged within it is handed out again. `max_rows`, `max_bytes`: a put
    of new samples waits for room.
    """

    def __init__(
        self,
        tasks: Iterable[str],
        *,
        group_size: int | None = None,
        lease_s: float = LEASE_S,
        max_rows: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._core = QueueCore(SampleTable(tasks, lease_s, group_size), max_rows=max_rows)
        self._core.ledger.add_shard(Shard(HERE, HERE, HERE, max_bytes or 1 << 62, recycles=False))
        self._payloads: dict[str, dict[str, Stretch]] = {}
        """Columns of live segments by path"""
        self._lock = threading.RLock()
        self._alarm: threading.Timer | None = None
        self._alarm_s = float("inf")
        self._buffers = WarmBuffers()

    def put(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = ()
    ) -> tuple[str, ...]:
        """Creates the batch's samples, or adds its columns to those already here; the queue keeps its buffers, so they
        are not written to any more. `groups` and `versions` (a version, or those of the oldest and newest token)
        default to the batch's own. Returns the ids that were dropped before and so were not stored.

        ValueError, with nothing changed: a column put twice or in another layout, a sample already done, a group that
        changes or outgrows group_size, a new sample after `seal`, more than max_rows or max_bytes at once.
        """
        batch = batch.labelled(groups, versions)
        if not batch.ids:
            return ()
        while True:
            segment = self._room(batch)
            with self._lock:
                self._payloads[segment.path] = stretches_of(batch)
                try:
                    return self._core.commit(segment.number, segment.path, time.time())
                except LookupError:  # this thread came to it only after lease_s
                    self._payloads.pop(segment.path, None)
                finally:
                    self._follow_up()

    def get(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        min_version: int | None = None,
        partial: bool = False,
        share: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """Waits for `count` samples that hold all `columns`, or for as many as fill `token_budget` (a sample counts as
        its longest wanted column), whichever comes first; oldest first; whole groups where asked, in which a dropped
        member counts towards `count` but is not there. They are leased to the caller until `ack`.

        `min_version`: samples whose oldest token is older are left where they are, and named in `too_old` of what is
        returned. `partial`: at least one, and no more than are there, rather than wait for all.
        `share=(rank, readers)`: the batch is dealt out over that many readers, balanced by tokens, and this is the part
        of one.

        TimeoutError says which columns are missing for how many samples. QueueClosed; QueueDrained once the queue is
        sealed and the task has had everything. ValueError: a request that this queue can never serve.
        """
        want = Want(task, tuple(columns), count, token_budget, whole_groups, min_version, partial)
        with self._asking(want, share) as found:
            futures.wait([found], timeout_s)
            return self._gather(*self._taken(found, want))

    async def get_async(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        min_version: int | None = None,
        partial: bool = False,
        share: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """`get` for a coroutine; one cancelled while it waits has taken nothing."""
        want = Want(task, tuple(columns), count, token_budget, whole_groups, min_version, partial)
        with self._asking(want, share) as found:
            answered = asyncio.wrap_future(found)
            answered.add_done_callback(_heard)
            await asyncio.wait([answered], timeout=timeout_s)
            return self._gather(*self._taken(found, want))

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """A copy of columns of live samples, without a lease. ValueError names the sample and the column it lacks."""
        with self._lock:
            found = self._with_sources(self._core.locate(ids, columns))
        return self._gather(*found)

    def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> dict[str, list[int]]:
        """Returns the tokens of live samples by column, in the order of `ids`: metadata, no payload is read. 1 each
        where a column is dense, text or metadata. ValueError names the sample and the column it lacks."""
        with self._lock:
            found = self._core.lengths(ids, columns)
        return dict(zip(columns, found.tolist(), strict=True))

    def claim(self, task: str, ids: Iterable[str]) -> None:
        """Leases named samples to `task`, whatever columns they hold, and reads nothing: for a writer that knows which
        samples it works on. ValueError, with nothing leased: a sample never put or ended, or one that `task` holds or
        has acknowledged."""
        self._change("claim", task, tuple(ids))

    def ack(self, task: str, ids: Iterable[str]) -> None:
        """`task` is through with `ids`: never handed to it again, freed once every task has said so. To repeat it does
        no harm. ValueError: a sample never put, or never handed to `task`."""
        self._change("ack", task, tuple(ids))

    def drop(self, ids: Iterable[str], reason: str) -> None:
        """Ends samples under the name `dropped:<reason>` and frees them; their groups go on without them."""
        self._change("drop", tuple(ids), reason)

    def renew(self, task: str, ids: Iterable[str]) -> None:
        """Holds what `task` was handed for another `lease_s`."""
        self._change("renew", task, tuple(ids))

    def give_back(self, task: str, ids: Iterable[str]) -> None:
        """What `task` was handed and will not work on is open again at once; what it has acknowledged is not."""
        self._change("give_back", task, tuple(ids))

    def seal(self) -> None:
        """No new sample comes: gets are served what is left, then QueueDrained."""
        self._change("seal")

    def stats(self) -> dict[str, float]:
        """Metrics: live samples, bytes held, how samples ended; per task depth (samples it has neither got nor
        acknowledged), leased, waiters, redelivered, age of its oldest sample in seconds."""
        with self._lock:
            self._core.tick(time.time())
            return self._core.stats(time.time())

    def state(self) -> dict[str, Any]:
        """What is waiting for what, and for how long."""
        with self._lock:
            return self._core.state(time.time())

    def close(self) -> None:
        """Frees everything; whoever waits, and every later call, gets QueueClosed."""
        with self._lock:
            self._core.close()
            self._payloads.clear()
            if self._alarm is not None:
                self._alarm.cancel()

    # ---- parts of the above

    def _room(self, batch: PackedBatch) -> Segment:
        found: futures.Future[Segment] = futures.Future()
        with self._lock:
            writer = self._core.ask_room(Put.of(batch), HERE, batch.nbytes, time.time(), _answer(found))
            self._follow_up()
        try:
            if not found.done():
                log.warning("a put of %d samples waits: %s", len(batch), writer.full)
            return found.result()
        except BaseException:
            with self._lock:
                self._core.writers.leave(writer)
                if found.done() and not found.exception():
                    self._core.cancel(found.result().number, time.time())
            raise

    def _change(self, method: str, *args: Any) -> None:
        with self._lock:
            getattr(self._core, method)(*args, time.time())
            self._follow_up()

    def _follow_up(self) -> None:
        """After every change: frees payloads, and sets the alarm where someone waits."""
        for _, path in self._core.ledger.discards:
            self._payloads.pop(path, None)  # a reservation that was given up has none
        self._core.ledger.discards.clear()
        if self._core.closed or not self._core.awaited:
            return
        next_s = self._core.tick(time.time())
        if next_s is not None and next_s < self._alarm_s:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm, self._alarm_s = threading.Timer(max(0.0, next_s - time.time()), self._ring), next_s
            self._alarm.daemon = True
            self._alarm.start()

    def _ring(self) -> None:
        with self._lock:
            self._alarm, self._alarm_s = None, float("inf")
            self._follow_up()

    @contextmanager
    def _asking(self, want: Want, share: tuple[int, int] | None) -> Iterator[futures.Future[Found]]:
        """The answer to come, until nobody waits for it any more."""
        found: futures.Future[Found] = futures.Future()
        with self._lock:
            answer = _answer(found, self._with_sources)
            waiter = self._core.ask(want, None if share is None else Share(*share), time.time(), answer)
            self._follow_up()
        try:
            yield found
        except BaseException:
            with self._lock:
                if found.done() and not found.exception() and not self._core.closed:
                    self._core.give_back(want.task, found.result()[0].ids, time.time())
            raise
        finally:
            with self._lock:
                self._core.readers.leave(waiter)

    def _taken(self, found: futures.Future[Found], want: Want) -> Found:
        with self._lock:
            if not found.done():
                raise TimeoutError(self._core.explain(want))
        return found.result()

    def _with_sources(self, delivery: Delivery) -> Found:
        """With where its payload lies: what is freed meanwhile stays for this reader."""
        return delivery, [self._payloads[place.path] for place in delivery.places]

    def _gather(self, delivery: Delivery, sources: list[dict[str, Stretch]]) -> PackedBatch:
        columns = gather_columns(delivery.parts, sources, self._buffers)
        return PackedBatch(delivery.ids, columns, delivery.groups, delivery.versions, delivery.too_old)


def _heard(answered: asyncio.Future[Any]) -> None:
    """What it was answered is read elsewhere; or asyncio would say that nobody has."""
    if not answered.cancelled():
        answered.exception()


Found = tuple[Delivery, list[dict[str, Stretch]]]


def _answer(found: futures.Future[Any], then: Callable[[Any], Any] = lambda value: value) -> Callable[[Any], None]:
    """What the core calls to answer."""

    def answer(value: Any) -> None:
        if isinstance(value, Exception):
            found.set_exception(value)
        else:
            found.set_result(then(value))

    return answer

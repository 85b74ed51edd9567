"""The queue in one process: `QueueCore` behind a lock, payloads kept where they were put. Thread-safe.

The lock is never held while waiting or copying payload, so a starved reader delays no other client. Nothing polls: a
waiter sleeps until it is answered or reaches its deadline; a timer runs only while an expiring lease could serve it."""

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any

from distqueue.clock import epoch_s
from distqueue.config import LEASE_S
from distqueue.core import QueueCore
from distqueue.interface import Change, SampleQueue
from distqueue.messages import Delivery, Put
from distqueue.packed import PackedBatch
from distqueue.payload.buffers import BufferPool
from distqueue.payload.columns import gather_columns, packed, stretches_of
from distqueue.payload.segment_file import Stretch
from distqueue.request import GetRequest, await_first, resolving
from distqueue.samples import SampleTable
from distqueue.segments import Segment, ShardState

HERE = "here"
"""The only node, and the only shard"""
log = logging.getLogger(__name__)

Located = tuple[Delivery, list[dict[str, Stretch]]]
"""A delivery and, per place of it, the columns that lie there"""


class LocalQueue(SampleQueue):
    """Samples between the stages of one process; `DistQueue` is the same across processes.

    `tasks`: the stages that must acknowledge a sample before it is freed. `lease_s`: a sample not acknowledged within
    it is handed out again. `max_rows`, `max_bytes`: bounds beyond which a put of new samples waits."""

    def __init__(
        self,
        tasks: Iterable[str],
        *,
        lease_s: float = LEASE_S,
        max_rows: int | None = None,
        max_bytes: int | None = None,
    ) -> None:
        self._core = QueueCore(SampleTable(tasks, lease_s), max_rows=max_rows)
        self._core.ledger.add_shard(
            ShardState(name=HERE, node=HERE, folder=HERE, max_bytes=max_bytes or 1 << 62, recycles=False)
        )
        self._payloads: dict[str, dict[str, Stretch]] = {}
        """Columns of live segments by path"""
        self._lock = threading.RLock()
        self._timer: threading.Timer | None = None
        self._timer_s = float("inf")
        self._buffers = BufferPool()

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        with self._lock:
            located = self._locate(self._core.locate(ids, columns))
        return self._gather(located)

    def fetch(self, request: GetRequest, left: futures.Future[None] | None = None) -> PackedBatch:
        answer: futures.Future[Located] = futures.Future()
        selection = request.selection()
        with self._lock:
            waiter = self._core.ask(selection, now_s=epoch_s(), answer=resolving(answer, self._locate))
            self._follow_up()
        try:
            await_first(answer, left, request.timeout_s)
            with self._lock:
                if not answer.done():
                    raise TimeoutError(self._core.table.explain(request))
            return self._gather(answer.result())
        except BaseException:
            with self._lock:
                if answer.done() and not answer.exception() and not self._core.closed:
                    self._core.give_back(selection.task, answer.result()[0].ids, epoch_s())
            raise
        finally:
            with self._lock:
                self._core.readers.leave(waiter)

    def stats(self) -> dict[str, float]:
        with self._lock:
            self._core.tick(epoch_s())
            return self._core.stats(epoch_s())

    def state(self) -> dict[str, Any]:
        with self._lock:
            return self._core.state(epoch_s())

    def close(self) -> None:
        with self._lock:
            self._core.close()
            self._payloads.clear()
            if self._timer is not None:
                self._timer.cancel()

    def _put(self, batch: PackedBatch, claim: str) -> tuple[str, ...]:
        if not batch.ids:
            return ()
        columns = stretches_of(batch)
        while True:
            segment = self._reserve(batch, claim)
            with self._lock:
                self._payloads[segment.path] = columns
                try:
                    return self._core.commit(segment.number, segment.path, epoch_s())
                except LookupError:  # this thread ran again only after lease_s: its reservation has expired
                    self._payloads.pop(segment.path, None)
                finally:
                    self._follow_up()

    def _change(self, change: Change[...], *args: Any) -> None:
        with self._lock:
            change(self._core, *args, epoch_s())
            self._follow_up()

    def _look(self, look: Callable[..., Any], *args: Any) -> Any:
        with self._lock:
            return look(self._core, *args)

    def _reserve(self, batch: PackedBatch, claim: str) -> Segment:
        answer: futures.Future[Segment] = futures.Future()
        with self._lock:
            writer = self._core.ask_room(
                Put.of(batch, claim), node=HERE, nbytes=batch.nbytes, now_s=epoch_s(), answer=resolving(answer)
            )
            self._follow_up()
        try:
            if not answer.done():
                log.warning("a put of %d samples is waiting: %s", len(batch), writer.full)
            return answer.result()
        except BaseException:
            with self._lock:
                self._core.writers.leave(writer)
                if answer.done() and not answer.exception():
                    self._core.cancel(answer.result().number, epoch_s())
            raise

    def _follow_up(self) -> None:
        """After every change: free payloads, and set the timer if a client is waiting."""
        for _, path in self._core.ledger.discards:
            self._payloads.pop(path, None)  # a cancelled reservation has none
        self._core.ledger.discards.clear()
        if self._core.closed or not self._core.awaited:
            return
        next_s = self._core.tick(epoch_s())
        if next_s is not None and next_s < self._timer_s:
            if self._timer is not None:
                self._timer.cancel()
            self._timer, self._timer_s = threading.Timer(max(0.0, next_s - epoch_s()), self._expire), next_s
            self._timer.daemon = True
            self._timer.start()

    def _expire(self) -> None:
        with self._lock:
            self._timer, self._timer_s = None, float("inf")
            self._follow_up()

    def _locate(self, delivery: Delivery) -> Located:
        """Hold references to the payload, so that it outlives samples that end while this reader copies them."""
        return delivery, [self._payloads[place.path] for place in delivery.places]

    def _gather(self, located: Located) -> PackedBatch:
        delivery, sources = located
        return packed(delivery, gather_columns(delivery.parts, sources, self._buffers))

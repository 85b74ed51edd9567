"""The queue in one process: the table decides, the store holds, and readers wait for a change. Thread-safe.

Waiting: all waiters, threads and coroutines alike, wait on one future that is resolved and replaced at every change of
state; whoever wakes looks again. Nobody holds the lock while waiting or copying payload, so a starved reader delays
no other client, and nothing polls: a waiter sleeps until a change, its deadline, or the next end of a lease. A get is
no change: it takes samples away, and when its lease ends there is at most what there was before.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass

from distqueue.column import Column
from distqueue.packed import PackedBatch
from distqueue.storage import PayloadStore
from distqueue.table import SampleTable, Span, Want

LEASE_S = 900.0
"""How long a reader may hold samples before they are handed out again"""


class QueueClosed(RuntimeError):
    """The queue was closed, or what held it has died."""


@dataclass(frozen=True)
class Picked:
    """Samples that were picked, their payload still where it lies."""

    ids: tuple[str, ...]
    views: dict[str, list[Column]]
    groups: tuple[str, ...]
    versions: tuple[Span, ...]

    def gather(self) -> PackedBatch:
        """One copy of every byte, in memory of the reader's own."""
        columns = {name: Column.concat(views) for name, views in self.views.items()}
        return PackedBatch(self.ids, columns, self.groups, self.versions)


class LocalQueue:
    """Samples between the stages of one process; `DistQueue` is the same across processes.

    `tasks`: who must acknowledge a sample before it is freed. `group_size`: members of every group, for `whole_groups`.
    `lease_s`: what a reader got and has not acknowledged within it is handed out again.
    """

    def __init__(self, tasks: Iterable[str], *, group_size: int | None = None, lease_s: float = LEASE_S) -> None:
        self._table = SampleTable(tasks, lease_s, group_size)
        self._store = PayloadStore()
        self._lock = threading.Lock()
        self._changed: futures.Future[None] = futures.Future()
        self._waiters: Counter[str] = Counter()
        self._late = 0
        self._closed = False

    def put(
        self, batch: PackedBatch, groups: Sequence[str] = (), versions: Sequence[int | Span] = ()
    ) -> tuple[str, ...]:
        """Creates the batch's samples, or adds its columns to those already here; the queue keeps its buffers, so they
        are not written to any more. `groups` and `versions` (a version, or those of the oldest and newest token)
        default to the batch's own. Returns the ids that were dropped before and so were not stored.

        ValueError, with nothing changed: a column put twice or in another layout, a sample already done, a group that
        changes or outgrows group_size.
        """
        batch = batch.labelled(groups, versions)
        tokens = {
            name: column.lengths().tolist() if column.kind == "tensor" else [1] * len(batch)
            for name, column in batch.columns.items()
        }
        with self._lock:
            self._check_open()
            self._store.check(batch)
            late = set(self._table.put(batch.ids, tokens, batch.groups, batch.versions, time.monotonic()))
            self._late += len(late)
            kept = [row for row, id in enumerate(batch.ids) if id not in late]
            self._store.put(batch if not late else batch.select(kept))
            self._announce()
        return tuple(id for id in batch.ids if id in late)

    def get(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """Waits for `count` samples that hold all `columns`, or for as many as fill `token_budget` (a sample counts as
        its longest wanted column), whichever comes first; oldest first; whole groups where asked, in which a dropped
        member counts towards `count` but is not there. They are leased to the caller until `ack`.

        TimeoutError says which columns are missing for how many samples. QueueClosed. ValueError: a request that this
        queue can never serve.
        """
        want = Want(task, tuple(columns), count, token_budget, whole_groups)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._waiting(want):
            while True:
                picked, changed, wait_s = self._attempt(want, deadline_s)
                if picked:
                    return picked.gather()
                futures.wait([changed], wait_s)

    async def get_async(
        self,
        task: str,
        columns: Sequence[str],
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        timeout_s: float | None = None,
    ) -> PackedBatch:
        """`get` for a coroutine; one cancelled while it waits has taken nothing."""
        want = Want(task, tuple(columns), count, token_budget, whole_groups)
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        with self._waiting(want):
            while True:
                picked, changed, wait_s = self._attempt(want, deadline_s)
                if picked:
                    return picked.gather()
                await asyncio.wait([asyncio.wrap_future(changed)], timeout=wait_s)

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch:
        """A copy of columns of live samples, without a lease. ValueError names the sample and the column it lacks."""
        if not ids or not columns:
            raise ValueError(f"read of {len(ids)} ids and columns={columns}: expected at least one of each")
        with self._lock:
            self._check_open()
            self._table.check_columns(ids, columns)
            picked = self._pick(ids, columns)
        return picked.gather()

    def ack(self, task: str, ids: Iterable[str]) -> None:
        """`task` is through with `ids`: never handed to it again, freed once every task has said so. To repeat it does
        no harm. ValueError: a sample never put, or never handed to `task`."""
        with self._lock:
            self._check_open()
            self._store.release(self._table.ack(task, tuple(ids)))
            self._announce()

    def drop(self, ids: Iterable[str], reason: str) -> None:
        """Ends samples under the name `dropped:<reason>` and frees them; their groups go on without them."""
        with self._lock:
            self._check_open()
            self._store.release(self._table.drop(ids, reason))
            self._announce()

    def stats(self) -> dict[str, float]:
        """Metrics: live samples, bytes held, how samples ended; per task depth (samples it has neither got nor
        acknowledged), leased, waiters, redelivered, age of its oldest sample in seconds."""
        with self._lock:
            now_s, table = time.monotonic(), self._table
            table.expire(now_s)
            stats: dict[str, float] = {
                "distqueue/rows": len(table.rows),
                "distqueue/bytes": self._store.nbytes,
                "distqueue/late": self._late,
            }
            stats |= {f"distqueue/ended/{name}": count for name, count in table.ended.items()}
            for task in table.tasks:
                states = Counter(row.claims[task].state for row in table.rows.values())
                born_s = (row.born_s for row in table.rows.values() if row.claims[task].state != "acked")
                stats |= {
                    f"distqueue/{task}/depth": states["open"],
                    f"distqueue/{task}/leased": states["leased"],
                    f"distqueue/{task}/waiters": self._waiters[task],
                    f"distqueue/{task}/redelivered": table.redelivered[task],
                    f"distqueue/{task}/age_s": now_s - next(born_s, now_s),
                }
            return stats

    def close(self) -> None:
        """Frees everything; whoever waits, and every later call, gets QueueClosed."""
        with self._lock:
            self._closed = True
            self._table = SampleTable(self._table.tasks, self._table.lease_s, self._table.group_size)
            self._store = PayloadStore()
            self._announce()

    def _attempt(
        self, want: Want, deadline_s: float | None
    ) -> tuple[Picked | None, futures.Future[None], float | None]:
        """(samples or None, what to wait for, for at most how many seconds)."""
        with self._lock:
            self._check_open(want)
            now_s = time.monotonic()
            self._table.expire(now_s)
            if ids := self._table.plan(want):
                self._table.lease(want.task, ids, want.columns, now_s)
                return self._pick(ids, want.columns), self._changed, None
            if deadline_s is not None and now_s >= deadline_s:
                raise TimeoutError(self._table.explain(want))
            ends = [end_s for end_s in (deadline_s, self._table.next_expiry_s()) if end_s is not None]
            return None, self._changed, min(ends) - now_s if ends else None

    def _pick(self, ids: Sequence[str], columns: Sequence[str]) -> Picked:
        rows = [self._table.rows[id] for id in ids]
        groups = tuple(row.group for row in rows)
        versions = tuple(row.versions for row in rows if row.versions)
        views = {name: self._store.views(ids, name) for name in columns}
        return Picked(tuple(ids), views, groups if any(groups) else (), versions if len(versions) == len(rows) else ())

    @contextmanager
    def _waiting(self, want: Want) -> Iterator[None]:
        with self._lock:
            self._check_open(want)
            self._table.check(want)
            self._waiters[want.task] += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiters[want.task] -= 1

    def _check_open(self, want: Want | None = None) -> None:
        if self._closed:
            waited = f"; task {want.task!r} gets no {list(want.columns)} any more" if want else ""
            raise QueueClosed(f"the queue is closed{waited}")

    def _announce(self) -> None:
        """Wakes all waiters."""
        changed, self._changed = self._changed, futures.Future()
        changed.set_result(None)

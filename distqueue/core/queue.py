"""The core of a queue: table, ledger, readers and writers, and every change told to a journal.

Invariants (tests/distqueue/test_recovery.py): what changes the state durably is told to `record` in the order in which
it happened, and `recover` from that makes the same state but for leases (nobody holds any) and reservations; a call
that raises has changed nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np

from distqueue.column import Layout
from distqueue.config import LEASE_S
from distqueue.core import history, report
from distqueue.core.delivery import deliver
from distqueue.core.errors import QueueClosed
from distqueue.core.readers import Readers, Share, Waiter
from distqueue.core.writers import Writer, Writers
from distqueue.messages import Delivery, Put, names_to_array, pack
from distqueue.samples import Ended, SampleTable, Taken, Want
from distqueue.segments import Segment, SegmentLedger

REMEMBERED_PUTS = 4096
"""Committed puts that are recognised when their writer, who did not hear of it, commits again"""


class QueueCore:
    def __init__(
        self,
        table: SampleTable,
        *,
        max_rows: int | None = None,
        epoch: str = "",
        record: Callable[[str, bytes], None] | None = None,
    ) -> None:
        """`epoch`: makes this life's file names its own. `record`: is told every durable change, kind and body."""
        self.table = table
        self.ledger = SegmentLedger(epoch)
        self.writers = Writers(table, self.ledger, max_rows, self._check_put)
        self.readers = Readers(table, self._delivered, lambda: self.sealed and not self.writers.bring_new_rows)
        self.layouts: dict[str, Layout] = {}
        self.record = record
        self.closed = False
        self.recovered = False
        """Who held what before is not known: an ack of a sample that was never handed out here counts"""
        self.late = 0
        self._numbers = count()
        self.committed: OrderedDict[tuple[int, str], tuple[str, ...]] = OrderedDict()

    @property
    def sealed(self) -> bool:
        return self.writers.sealed

    @property
    def awaited(self) -> bool:
        """Whether anybody waits for anything."""
        return bool(self.readers.waiting or self.writers.waiting)

    # ---- putting

    def ask_room(
        self,
        put: Put,
        node: str,
        nbytes: int,
        now_s: float,
        answer: Callable[[Segment | Exception], None],
        number: int | None = None,
    ) -> Writer:
        """A file for the payload of a put, now or once there is room. `number`: of a writer that asks again. What is
        answered may be ValueError: the put is wrong, or larger than a shard."""
        self._check_open()
        writer = Writer(put, node, nbytes, next(self._numbers) if number is None else number, answer)
        self.writers.join(writer)
        self.writers.serve(now_s)
        return writer

    def commit(self, number: int, path: str, now_s: float) -> tuple[str, ...]:
        """The payload is written: its samples are there from now on. Returns the ids that came too late. To repeat it
        does no harm. LookupError: no such reservation (any more); reserve again. ValueError: another put has come
        between that this one does not go with; its reservation is given back."""
        self._check_open()
        if (number, path) in self.committed:
            return self.committed[number, path]
        reservation, segment = self.writers.find(number, path), self.ledger.segments[number]
        put = reservation.put
        try:
            late = self.apply_put(put, number, path, now_s)
        except ValueError:
            self.cancel(number, now_s)
            raise
        del self.writers.reserved[number]
        if self.record:
            self.record("put", history.put_event(segment, put, now_s))
        self.readers.serve(now_s)
        return late

    def put(self, put: Put, nbytes: int, number: int, path: str, now_s: float) -> tuple[str, ...]:
        """A put whose payload is written already, into a file that was granted: see `commit`."""
        self._check_open()
        if (number, path) not in self.committed:
            self.writers.declare(number, path, put, nbytes, now_s)
        return self.commit(number, path, now_s)

    def grant(self, node: str, nbytes: int, now_s: float) -> Segment | None:
        """A file of so many bytes for what a writer of this node puts next, or None: let it ask for room then. It is
        taken back where its room is wanted, and after the lease."""
        return None if self.closed else self.writers.grant(node, nbytes, now_s)

    def cancel(self, number: int, now_s: float) -> None:
        """A writer that cannot write gives its reservation back."""
        if self.writers.cancel(number):
            self.writers.serve(now_s)
            if self.sealed:  # it may have been all that was to come
                self.readers.serve(now_s)

    # ---- getting

    def ask(
        self,
        want: Want,
        share: Share | None,
        now_s: float,
        answer: Callable[[Delivery | Exception], None],
        place: tuple[int, float] | None = None,
    ) -> Waiter:
        """Serves `want` now or later, through `answer`. `place`: number and time of a waiter that asks again.

        ValueError: a want that this queue can never serve.
        """
        self._check_open(want)
        self.table.check(want)
        waiter = Waiter(want, share, *(place or (next(self._numbers), now_s)), answer)
        self.readers.join(waiter)
        self.tick(now_s)
        return waiter

    def explain(self, want: Want) -> str:
        """Why `want` is not served."""
        return self.table.explain(want)

    def locate(self, ids: Sequence[str], columns: Sequence[str], skip_ended: bool = False) -> Delivery:
        """Where columns of live samples lie, without a lease. ValueError names the sample and the column it lacks.
        `skip_ended` leaves out samples that have ended."""
        self._check_open()
        if not ids or not columns:
            raise ValueError(f"read of {len(ids)} ids and columns={columns}: expected at least one of each")
        if skip_ended:
            ids = [id for id, live in zip(ids, self.table.are_live(ids).tolist(), strict=True) if live]
        self.table.check_columns(ids, columns)
        if not ids:
            return Delivery((), (), (), (), ())
        rows = self.table.find(ids)
        return deliver(self.table, self.ledger, tuple(ids), *self.table.describe(rows), rows, columns)

    def tick(self, now_s: float) -> float | None:
        """Ends leases and reservations that have run out, and serves; returns when to come again."""
        self.table.expire(now_s)
        reservations = bool(self.writers.waiting) or self.sealed  # their end gives room, or is the end
        if reservations:
            self.writers.serve(now_s)
        self.readers.serve(now_s)
        ends = [self.table.next_expiry_s(), self.ledger.next_expiry_s() if reservations else None]
        return min((end for end in ends if end is not None), default=None)

    # ---- ending

    def ack(self, task: str, ids: Sequence[str], now_s: float) -> None:
        self._check_open()
        ended = self.table.ack(task, ids, replayed=self.recovered)
        self._tell("ack", {"task": task, "count": len(ids)}, ids)
        self.end(ended, now_s)

    def drop(self, ids: Sequence[str], reason: str, now_s: float) -> None:
        self._check_open()
        ended = self.table.drop(ids, reason)
        self._tell("drop", {"reason": reason, "count": len(ids)}, ids)
        self.end(ended, now_s)

    def lose(self, numbers: Sequence[int], reason: str, now_s: float) -> tuple[str, ...]:
        """Segments are gone: their samples end as `lost:<reason>`, and who was writing one writes it again. Returns
        the samples."""
        for number in numbers:
            self.cancel(number, now_s)
        self._tell("lose", {"numbers": list(numbers), "reason": reason})
        return self.apply_lose(numbers, reason, now_s)

    def claim(self, task: str, ids: Sequence[str], now_s: float) -> None:
        """Leases named samples to a task, whatever columns they hold. ValueError: see `SampleTable.claim`."""
        self._check_open()
        self.tick(now_s)
        self.table.claim(task, ids, now_s)

    def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> np.ndarray:
        """(columns, B) int64: tokens of live samples. ValueError: see `SampleTable.lengths`."""
        self._check_open()
        return self.table.lengths(ids, columns)

    def renew(self, task: str, ids: Sequence[str], now_s: float) -> None:
        self._check_open()
        self.table.check_task(task)
        self.table.renew(task, ids, now_s)

    def give_back(self, task: str, ids: Sequence[str], now_s: float) -> None:
        """What a reader got and will not use is open again at once."""
        self._check_open()
        self.table.check_task(task)
        self.table.release_lease(task, ids)
        self.readers.serve(now_s)

    def seal(self, now_s: float) -> None:
        """No new sample comes but those that are being written: gets are served what is left, then QueueDrained."""
        self._check_open()
        if not self.sealed:
            self._tell("seal", {})
            self.writers.sealed = True
            self.writers.serve(now_s)
            self.readers.serve(now_s)

    def close(self) -> None:
        """Whoever waits, and every later call, gets QueueClosed."""
        self.closed = True
        readers, writers = self.readers.everybody(), self.writers.waiting
        self.readers.waiting, self.writers.waiting = {}, []
        for waiter in readers:
            waiter.answer(self._closed(waiter.want))
        for writer in writers:
            writer.answer(self._closed())

    def moved(self, number: int, shard: str, path: str, spilled: bool = False) -> None:
        if not self.ledger.segments[number].dead:  # a journal has heard of its end
            self._tell("move", {"number": number, "shard": shard, "path": path, "spilled": spilled})
        self.ledger.moved(number, shard, path, spilled)

    def stats(self, now_s: float) -> dict[str, float]:
        return report.stats(self, now_s)

    def state(self, now_s: float) -> dict[str, Any]:
        return report.state(self, now_s)

    # ---- going on

    def snapshot(self, copied_to: Callable[[int], str] | None = None) -> bytes:
        """All that is durable; leases and reservations are not. `copied_to`: path of a segment's copy, by number."""
        return history.snapshot(self, copied_to)

    @classmethod
    def recover(
        cls, snapshot: bytes, events: Iterable[tuple[str, bytes]], lease_s: float = LEASE_S, **options: Any
    ) -> QueueCore:
        """The core that made the snapshot, after the events; `options` as for a new one."""
        core = history.restore(cls, snapshot, lease_s, options)
        record, core.record = core.record, None
        for kind, body in events:
            history.replay(core, kind, body)
        core.ledger.discards.clear()
        core.record = record
        return core

    # ---- parts of the above

    def apply_put(self, put: Put, number: int, path: str, now_s: float) -> tuple[str, ...]:
        self._check_layouts(put)
        late = self.table.put(put.ids, put.tokens, number, put.groups, put.versions, now_s)
        self.ledger.commit(number)
        for name, info in put.columns.items():
            self.layouts.setdefault(name, info.layout)
        self.late += len(late)
        if len(late) == len(put.ids) or not put.columns:
            self.ledger.free([number])
        self.committed[number, path] = late
        if len(self.committed) > REMEMBERED_PUTS:
            self.committed.popitem(last=False)
        return late

    def apply_lose(self, numbers: Sequence[int], reason: str, now_s: float) -> tuple[str, ...]:
        ended = self.table.lose(numbers, f"lost:{reason}")
        self.end(ended, now_s)
        return ended.ids

    def end(self, ended: Ended, now_s: float) -> None:
        self.ledger.free(ended.segments)
        self.readers.serve(now_s)
        if self.writers.waiting:
            self.writers.serve(now_s)

    def _delivered(self, taken: Taken, columns: Sequence[str]) -> Delivery:
        about = taken.ids, taken.groups, taken.versions, taken.rows
        return deliver(self.table, self.ledger, *about, columns, taken.too_old)

    def _tell(self, kind: str, fields: dict[str, Any], ids: Sequence[str] | None = None) -> None:
        if self.record:
            self.record(kind, pack(fields, {} if ids is None else {"ids": names_to_array(ids)}))

    def _check_open(self, want: Want | None = None) -> None:
        if self.closed:
            raise self._closed(want)

    def _closed(self, want: Want | None = None) -> QueueClosed:
        waited = f"; task {want.task!r} gets no {list(want.columns)} any more" if want else ""
        return QueueClosed(f"the queue is closed{waited}")

    def _check_put(self, put: Put) -> int:
        """How many samples of it are new."""
        self._check_layouts(put)
        return self.table.check_put(put.ids, put.columns, put.groups)

    def _check_layouts(self, put: Put) -> None:
        for name, info in put.columns.items():
            known = self.layouts.get(name, info.layout)
            if info.layout != known:
                raise ValueError(f"column {name!r}: put as {info.layout}, but this queue holds it as {known}")

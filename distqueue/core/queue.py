"""The core of a queue: sample table, segment ledger, readers and writers; every durable change is recorded.

Invariants (tests/distqueue/test_recovery.py): every durable change is passed to `record`, in the order in which it
happened; `recover` from those events makes the same state, without leases and reservations; a call that raises has
changed nothing.

A commit may be repeated: its writer calls again within a second if the answer was lost. It is recognised as long as its
segment is live where it was written, whatever else was put meanwhile; so only puts whose segment has ended or moved
need to be remembered, and of these the last few: a writer waits for each answer, so a repeated put is among the newest.
One that is forgotten all the same is put again, which stores nothing twice: samples that were dropped or lost meanwhile
are late, and a column that exists, or a sample that is done, is refused."""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import numpy as np

from distqueue.config import LEASE_S
from distqueue.core import recovery, report
from distqueue.core.readers import Readers, Waiter, deliver
from distqueue.core.writers import Writer, Writers
from distqueue.errors import LOST, LostSample, QueueClosed
from distqueue.layout import ColumnLayout
from distqueue.messages import Delivery, Put, names_to_array, pack
from distqueue.samples import Ended, SampleTable, Selection, Taken
from distqueue.segments import Segment, SegmentLedger

REMEMBERED_PUTS = 16
"""Last puts that are recognised, when they are repeated, also where their segment has ended or moved"""


class QueueCore:
    def __init__(
        self,
        table: SampleTable,
        *,
        max_rows: int | None = None,
        epoch: str = "",
        record: Callable[[str, bytes], None] | None = None,
    ) -> None:
        """`epoch`: part of file names, so that they differ between restarts. `record`: called with the kind and body of
        every durable change."""
        self.table = table
        self.ledger = SegmentLedger(epoch)
        self.writers = Writers(table, self.ledger, max_rows=max_rows, check=self._check_put)
        self.readers = Readers(table, self.ledger, lambda: self.sealed and not self.writers.bring_new_rows)
        self.layouts: dict[str, ColumnLayout] = {}
        self.record = record
        self.closed = False
        self._failure: QueueClosed | None = None
        """why it was closed, if that was not asked for"""
        self.recovered = False
        """Leases from before are unknown: an ack of a sample that was never handed out here is accepted"""
        self.late = 0
        """samples put to after they had been dropped"""
        self.lost: list[LostSample] = []
        """samples whose payload is gone, in the order in which they ended"""
        self._numbers = count()
        self.committed: dict[tuple[int, str], tuple[str, ...]] = {}
        """(segment, path) of the last puts: the ids that were late"""

    @property
    def sealed(self) -> bool:
        return self.writers.sealed

    @property
    def awaited(self) -> bool:
        return bool(self.readers.waiting or self.writers.waiting)

    # ---- putting

    def ask_room(
        self,
        put: Put,
        *,
        node: str,
        nbytes: int,
        now_s: float,
        answer: Callable[[Segment | Exception], None],
        number: int | None = None,
    ) -> Writer:
        """Reserve a file for the payload of a put, now or once there is room. `number`: that of a writer that asks
        again. The answer may be an exception: the put is invalid, or larger than a shard."""
        self._check_open()
        writer = Writer(
            put, node=node, nbytes=nbytes, number=next(self._numbers) if number is None else number, answer=answer
        )
        self.writers.join(writer)
        self.writers.serve(now_s)
        return writer

    def commit(self, number: int, path: str, now_s: float) -> tuple[str, ...]:
        """Commit a put whose payload is written: its samples exist from now on. Return the ids that were dropped
        before. Idempotent. LookupError: no such reservation, or it expired; reserve again. ValueError: a put that was
        committed meanwhile conflicts with this one, whose reservation is cancelled."""
        self._check_open()
        if self._is_committed(number, path):
            return self.committed.get((number, path), ())
        reservation, segment = self.writers.find(number, path), self.ledger.segments[number]
        put = reservation.put
        try:
            late = self.apply_put(put, number=number, path=path, now_s=now_s)
        except Exception:
            self.cancel(number, now_s)
            raise
        del self.writers.reserved[number]
        if self.record:
            self.record("put", recovery.put_event(segment, put, now_s))
        self.readers.serve(now_s)
        return late

    def put(self, put: Put, *, nbytes: int, number: int, path: str, now_s: float) -> tuple[str, ...]:
        """Commit a put whose payload is written to a granted file: see `commit`."""
        self._check_open()
        if not self._is_committed(number, path):
            self.writers.declare(put, nbytes=nbytes, number=number, path=path, now_s=now_s)
        return self.commit(number, path, now_s)

    def grant(self, node: str, nbytes: int, now_s: float) -> Segment | None:
        """Grant a file of `nbytes` for the next put of a writer on this node, or None: it must ask for room then.
        A grant is revoked when its room is needed, and expires after the lease."""
        return None if self.closed else self.writers.grant(node, nbytes, now_s)

    def cancel(self, number: int, now_s: float) -> None:
        """Cancel the reservation or grant of a writer that will not write."""
        if self.writers.cancel(number):
            self.writers.serve(now_s)
            if self.sealed:  # it may have been the last put to come
                self.readers.serve(now_s)

    # ---- getting

    def ask(
        self,
        selection: Selection,
        *,
        now_s: float,
        answer: Callable[[Delivery | Exception], None],
        place: tuple[int, float] | None = None,
    ) -> Waiter:
        """Serve `selection` now or later, through `answer`. `place`: (number, since_s) of a waiter that asks again.

        Raise ValueError: a task that this queue does not have."""
        self._check_open(selection)
        self.table.check_task(selection.task)
        number, since_s = place or (next(self._numbers), now_s)
        waiter = Waiter(selection, number=number, since_s=since_s, answer=answer)
        self.readers.join(waiter)
        self.tick(now_s)
        return waiter

    def locate(
        self, ids: Sequence[str], columns: Sequence[str], *, lengths: Sequence[str] = (), skip_ended: bool = False
    ) -> Delivery:
        """Locate columns of live samples, without a lease. `lengths`: columns of which only the tokens are delivered;
        `skip_ended`: leave out samples that have ended. ValueError names the sample and the column it lacks."""
        self._check_open()
        if not ids or not columns:
            raise ValueError(f"read of {len(ids)} ids and columns={columns}: expected at least one of each")
        if skip_ended:
            ids = [id for id, live in zip(ids, self.table.are_live(ids).tolist(), strict=True) if live]
        taken = self.table.find(ids, (*columns, *lengths)) if ids else Taken()
        return deliver(self.table, self.ledger, taken, columns=columns, lengths=lengths)

    def tick(self, now_s: float) -> float | None:
        """Expire leases and reservations, and serve those waiting. Return when to call again; None: after a change."""
        self.table.expire(now_s)
        reservations = bool(self.writers.waiting) or self.sealed  # their expiry makes room, or drains the queue
        if reservations:
            self.writers.serve(now_s)
        self.readers.serve(now_s)
        ends = [self.table.next_expiry_s(), self.ledger.next_expiry_s() if reservations else None]
        return min((end for end in ends if end is not None), default=None)

    # ---- ending

    def ack(self, task: str, ids: Sequence[str], now_s: float) -> None:
        self._check_open()
        ended = self.table.ack(task, ids, replayed=self.recovered)
        self._record("ack", {"task": task, "count": len(ids)}, ids)
        self.end(ended, now_s)

    def ack_with_stats(self, task: str, ids: Sequence[str], now_s: float) -> dict[str, float]:
        self.ack(task, ids, now_s)
        return self.stats(now_s)

    def drop(self, ids: Sequence[str], reason: str, now_s: float) -> None:
        self._check_open()
        ended = self.table.drop(ids, reason)
        self._record("drop", {"reason": reason, "count": len(ids)}, ids)
        self.end(ended, now_s)

    def lose(self, numbers: Sequence[int], reason: str, now_s: float) -> tuple[str, ...]:
        """End the samples of lost segments as `lost:<reason>` and cancel reservations of them, whose writers write
        again. Return the samples' ids."""
        for number in numbers:
            self.cancel(number, now_s)
        return self.lose_samples(self.table.at(numbers), reason, now_s)

    def lose_samples(self, ids: Sequence[str], reason: str, now_s: float) -> tuple[str, ...]:
        """End the live ones of these samples as `lost:<reason>`. Return their ids."""
        self._check_open()
        self._record("lost", {"reason": reason, "count": len(ids)}, ids)
        return self.apply_lose(ids, reason, now_s)

    def lost_since(self, first: int) -> list[LostSample]:
        """Return the samples whose payload is gone, in the order in which they ended, from number `first` on."""
        self._check_open()
        return self.lost[first:]

    def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> np.ndarray:
        """(columns, B) int64: tokens of live samples. ValueError: see `SampleTable.lengths`."""
        self._check_open()
        return self.table.lengths(ids, columns)

    def holding(self, column: str) -> list[str]:
        """The ids of the live samples that hold a column, in the order of their first put. Visits every sample."""
        self._check_open()
        return self.table.holding(column)

    def renew(self, task: str, ids: Sequence[str], now_s: float) -> None:
        self._check_open()
        self.table.renew(task, ids, now_s)

    def give_back(self, task: str, ids: Sequence[str], now_s: float) -> None:
        """Release the leases of samples that a reader will not use: they are open again at once."""
        self._check_open()
        self.table.release_lease(task, ids)
        self.readers.serve(now_s)

    def seal(self, now_s: float) -> None:
        """Accept no new samples but those being written: gets are served what remains, then QueueDrained."""
        self._check_open()
        if not self.sealed:
            self._record("seal", {})
            self.writers.sealed = True
            self.writers.serve(now_s)
            self.readers.serve(now_s)

    def close(self, failure: QueueClosed | None = None) -> None:
        """Close the queue: every waiting and every later call raises QueueClosed, or the failure that closed it."""
        self.closed, self._failure = True, self._failure or failure
        readers, writers = self.readers.all_waiting(), self.writers.waiting
        self.readers.waiting, self.writers.waiting = {}, []
        for waiter in readers:
            waiter.answer(self._closed(waiter.selection))
        for writer in writers:
            writer.answer(self._closed())

    def moved(self, number: int, shard: str, path: str, *, spilled: bool = False) -> None:
        """Record that a segment was moved to another file."""
        if not self.ledger.segments[number].dead:  # its end is in the journal
            self._record("move", {"number": number, "shard": shard, "path": path, "spilled": spilled})
        self.ledger.moved(number, shard, path, spilled=spilled)

    stats, state = report.stats, report.state

    # ---- recovery

    snapshot = recovery.snapshot

    @classmethod
    def recover(
        cls,
        snapshot: bytes,
        events: Iterable[tuple[str, bytes]],
        lease_s: float = LEASE_S,
        *,
        has_gaps: bool = False,
        **options: Any,
    ) -> "QueueCore":
        """Rebuild the core that made the snapshot and recorded the events since; `options` as for a new core.
        `has_gaps`: events are missing, so that others may be about samples that do not exist; these are skipped."""
        core = recovery.restore(cls, snapshot, lease_s, options)
        record, core.record = core.record, None
        for kind, body in events:
            try:
                recovery.replay(core, kind, body)
            except (ValueError, LookupError, AssertionError):
                if not has_gaps:
                    raise
        core.ledger.discards.clear()
        core.record = record
        return core

    def apply_put(self, put: Put, *, number: int, path: str, now_s: float) -> tuple[str, ...]:
        self._check_layouts(put)
        if put.claim:
            self.tick(now_s)
        late = self.table.put(
            put.ids, put.tokens, segment=number, groups=put.groups, versions=put.versions, now_s=now_s, claim=put.claim
        )
        self.ledger.commit(number)
        path = self.ledger.segments[number].path  # the same string for all segments that this file ever holds
        for name, info in put.columns.items():
            self.layouts.setdefault(name, info.layout)
        self.late += len(late)
        if len(late) == len(put.ids) or not put.columns:
            self.ledger.free([number])
        self.remember_put(number, path, late)
        return late

    def remember_put(self, number: int, path: str, late: tuple[str, ...]) -> None:
        self.committed[number, path] = late
        if len(self.committed) > REMEMBERED_PUTS:
            del self.committed[next(iter(self.committed))]

    def apply_lose(self, ids: Sequence[str], reason: str, now_s: float) -> tuple[str, ...]:
        ended = self.table.lose(ids, f"{LOST}{reason}")
        self.lost += [LostSample(*one, f"{LOST}{reason}") for one in zip(ended.ids, ended.groups, strict=True)]
        self.end(ended, now_s)
        return ended.ids

    def end(self, ended: Ended, now_s: float) -> None:
        self.ledger.free(ended.segments)
        self.readers.serve(now_s)
        if self.writers.waiting:
            self.writers.serve(now_s)

    def _is_committed(self, number: int, path: str) -> bool:
        segment = self.ledger.segments.get(number)
        is_live = segment is not None and segment.live and segment.path == path
        return is_live or (number, path) in self.committed

    def _record(self, kind: str, fields: dict[str, Any], ids: Sequence[str] | None = None) -> None:
        if self.record:
            self.record(kind, pack(fields, {} if ids is None else {"ids": names_to_array(ids)}))

    def _check_open(self, selection: Selection | None = None) -> None:
        if self.closed:
            raise self._closed(selection)

    def _closed(self, selection: Selection | None = None) -> QueueClosed:
        if self._failure is not None:
            return type(self._failure)(*self._failure.args)
        waiting = f"; task {selection.task!r} cannot get {list(selection.required)}" if selection else ""
        return QueueClosed(f"the queue is closed{waiting}")

    def _check_put(self, put: Put) -> int:
        """Validate a put. Return how many of its samples are new."""
        self._check_layouts(put)
        return self.table.check_put(put.ids, put.columns, put.groups)

    def _check_layouts(self, put: Put) -> None:
        for name, info in put.columns.items():
            known = self.layouts.get(name, info.layout)
            if info.layout != known:
                raise ValueError(f"column {name!r}: put as {info.layout}, but this queue holds it as {known}")

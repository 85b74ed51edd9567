"""Puts that are announced and not committed: which writers get a file to write, and which wait for room (backpressure).

First come, first served. A put that only adds columns to existing samples overtakes waiting writers and may exceed the
bounds: it is what lets samples finish and free their room.

With every put a writer is granted a file for a later one of this size, so that a put takes one call. A grant is a file
without a put; it is revoked when its room is needed.

Invariants (tests/distqueue/core/test_writers.py): a writer is answered once, or leaves; live rows and rows being
written never exceed `max_rows`, nor a shard's bytes its bound, except by puts that only add columns; a reservation is
committed, cancelled, or expires after the lease; no writer waits for room that is merely granted."""

from bisect import insort
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass

from distqueue.errors import NoRoomForRows
from distqueue.messages import Put
from distqueue.samples import SampleTable
from distqueue.segments import Segment, SegmentLedger


@dataclass(eq=False)
class Writer:
    """A put that waits for room. `answer` is called once, with the file to write or an exception; `full` says why it
    waits."""

    put: Put
    _: KW_ONLY
    node: str
    nbytes: int
    number: int
    answer: Callable[[Segment | Exception], None]
    full: str = ""


@dataclass(frozen=True)
class Reservation:
    """A put whose payload is being written."""

    put: Put
    new_rows: int


class Writers:
    """`check` raises ValueError for an invalid put and returns how many of its samples are new."""

    def __init__(
        self, table: SampleTable, ledger: SegmentLedger, *, max_rows: int | None, check: Callable[[Put], int]
    ) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: expected a positive number or None")
        self._table, self._ledger, self._max_rows, self._check = table, ledger, max_rows, check
        self.waiting: list[Writer] = []
        self.reserved: dict[int, Reservation] = {}
        self.granted: dict[int, Segment] = {}
        """Granted files by the numbers of their segments, oldest first"""
        self.sealed = False

    def join(self, writer: Writer) -> None:
        insort(self.waiting, writer, key=lambda other: other.number)

    def leave(self, writer: Writer) -> None:
        """Remove a writer, answered or not."""
        if writer in self.waiting:
            self.waiting.remove(writer)

    def serve(self, now_s: float) -> None:
        """Answer every writer for which there is room."""
        self._expire(now_s)
        full = ""
        for writer in list(self.waiting):
            try:
                reserved = self._reserve(writer, now_s, full)
            except Exception as error:  # whatever is wrong with a put is its writer's, and delays no other
                self.leave(writer)
                writer.answer(error)
                continue
            if isinstance(reserved, Segment):
                self.leave(writer)
                writer.answer(reserved)
            else:
                writer.full = full = reserved

    def find(self, number: int, path: str) -> Reservation:
        """Find a reservation. LookupError: it expired, was cancelled, or never existed."""
        segment = self._ledger.segments.get(number)
        if number not in self.reserved or segment is None or segment.path != path:
            raise LookupError(f"segment {number} at {path}: not reserved, or expired")
        return self.reserved[number]

    def grant(self, node: str, nbytes: int, now_s: float) -> Segment | None:
        """Grant a file for the next put of a writer on this node, unless room is short."""
        shard = self._ledger.shard_for(node)
        if shard is None or self.waiting or self.sealed or nbytes > shard.max_bytes:
            return None
        segment = self._ledger.reserve(shard.name, nbytes, now_s + self._table.lease_s)
        if segment is not None:
            self.granted[segment.number] = segment
        return segment

    def declare(self, put: Put, *, nbytes: int, number: int, path: str, now_s: float) -> None:
        """Turn a grant into the reservation of this put. LookupError: the grant was revoked; NoRoomForRows, a
        subclass: there is no room for the rows. ValueError: the put is invalid. In both cases the file is cancelled."""
        segment = self.granted.get(number)
        if segment is None or segment.path != path:
            raise LookupError(f"segment {number} at {path}: not granted, or revoked")
        new = 0
        try:
            if self.waiting or self.sealed or self._max_rows is not None:  # otherwise the commit validates it
                new = self._check_new(put)
                if new and (self.waiting or self._full_of_rows(new, now_s)):
                    raise NoRoomForRows(f"segment {number}: no room for {new} new samples yet")
        except Exception:
            self.cancel(number)
            raise
        del self.granted[number]
        segment.nbytes = nbytes
        self.reserved[number] = Reservation(put, new)

    def revoke(self, shard: str) -> bool:
        """Revoke the oldest grant of a shard. Return whether there was one."""
        oldest = next((number for number, segment in self.granted.items() if segment.shard == shard), None)
        return oldest is not None and self.cancel(oldest)

    def cancel(self, number: int) -> bool:
        """Cancel a reservation or a grant. Return whether there was one."""
        if self.reserved.pop(number, None) is None and self.granted.pop(number, None) is None:
            return False
        self._ledger.free([number])
        return True

    @property
    def bring_new_rows(self) -> bool:
        return any(reservation.new_rows for reservation in self.reserved.values())

    def _expire(self, now_s: float) -> None:
        """Cancel reservations and grants that their writers did not use in time."""
        for number in self._ledger.expired(now_s):
            self.cancel(number)

    def _reserve(self, writer: Writer, now_s: float, full: str) -> Segment | str:
        """Reserve a file, or return the reason why there is no space; `full`: the reason why an earlier writer
        waits."""
        put = writer.put
        new = self._check_new(put)
        if new and full:
            return full
        if new and (rows := self._full_of_rows(new, now_s)):
            return rows
        shard = self._ledger.shard_for(writer.node)
        if shard is None:
            return "every shard is being removed"
        while True:
            segment = self._ledger.reserve(shard.name, writer.nbytes, now_s + self._table.lease_s, exceed=not new)
            if segment is not None or not self.revoke(shard.name):
                break
        if segment is None:
            held = f"shard {shard.name!r} holds {shard.held:,} of max_bytes={shard.max_bytes:,}"
            return held + self._bottleneck(now_s)
        self.reserved[segment.number] = Reservation(put, new)
        return segment

    def _check_new(self, put: Put) -> int:
        """Validate a put. Return how many of its samples are new."""
        new = self._check(put)
        if new and self.sealed:
            raise ValueError(f"sample {put.ids[0]!r}: the queue is sealed; no new sample can be put")
        return new

    def _full_of_rows(self, new: int, now_s: float) -> str | None:
        if self._max_rows is None:
            return None
        if new > self._max_rows:
            raise ValueError(f"a put of {new:,} new samples; this queue holds max_rows={self._max_rows:,}")
        held = len(self._table) + sum(reservation.new_rows for reservation in self.reserved.values())
        if held + new <= self._max_rows:
            return None
        return f"the queue holds {held:,} samples of max_rows={self._max_rows:,}{self._bottleneck(now_s)}"

    def _bottleneck(self, now_s: float) -> str:
        """Name the task that is furthest behind."""
        tasks = self._table.stats(now_s)["tasks"]
        slowest = min(tasks, key=lambda task: tasks[task]["acked"])
        open_, leased = tasks[slowest]["open"], tasks[slowest]["leased"]
        return f"; task {slowest!r} has {open_:,} to get and {leased:,} to acknowledge"

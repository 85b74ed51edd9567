"""Puts between being told of and being there: who gets a file to write, and who waits until there is room.

First come, first served. What only adds columns to samples that are here passes by those who wait, and by the bounds:
it is what lets samples end.

Who has put once is granted a file for the next time, so that a put takes one call; a grant is a file without a put yet,
and is taken back where its room is wanted.

Invariants (tests/distqueue/core/test_writers.py): a writer is answered once, or leaves; the rows that are here and
those that are being written are never more than `max_rows`, nor a shard's bytes more than its own bound, but for puts
that only add columns; a reservation is committed, cancelled, or given up after the lease; nobody waits for room that is
granted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass

from distqueue.messages import Put
from distqueue.samples import SampleTable
from distqueue.segments import Segment, SegmentLedger


@dataclass(eq=False)
class Writer:
    """A put that has no room yet. `answer` is called once, with the file to write or an exception; `full` says why not
    yet."""

    put: Put
    node: str
    nbytes: int
    number: int
    answer: Callable[[Segment | Exception], None]
    full: str = ""


@dataclass(frozen=True)
class Reservation:
    put: Put
    new_rows: int
    node: str


class Writers:
    """`check` raises what is wrong with a put and returns how many of its samples are new."""

    def __init__(
        self, table: SampleTable, ledger: SegmentLedger, max_rows: int | None, check: Callable[[Put], int]
    ) -> None:
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: expected a positive number or None")
        self._table, self._ledger, self._max_rows, self._check = table, ledger, max_rows, check
        self.waiting: list[Writer] = []
        self.reserved: dict[int, Reservation] = {}
        self.granted: dict[int, str] = {}
        """Files without a put yet, oldest first: the node whose writer has it"""
        self.sealed = False

    def join(self, writer: Writer) -> None:
        insort(self.waiting, writer, key=lambda other: other.number)

    def leave(self, writer: Writer) -> None:
        """This writer waits no more."""
        if writer in self.waiting:
            self.waiting.remove(writer)

    def serve(self, now_s: float) -> None:
        """Answers every writer for whom there is room."""
        self._give_up(now_s)
        full = ""
        for writer in list(self.waiting):
            try:
                found = self._reserve(writer, now_s, full)
            except ValueError as error:
                self.leave(writer)
                writer.answer(error)
                continue
            if isinstance(found, Segment):
                self.leave(writer)
                writer.answer(found)
            else:
                writer.full = full = found

    def find(self, number: int, path: str) -> Reservation:
        """What was reserved. LookupError: it was given up, or never was."""
        segment = self._ledger.segments.get(number)
        if number not in self.reserved or segment is None or segment.path != path:
            raise LookupError(f"segment {number} at {path}: not reserved, or given up")
        return self.reserved[number]

    def grant(self, node: str, nbytes: int, now_s: float) -> Segment | None:
        """A file for what a writer of this node may put next, unless room is short."""
        shard = self._ledger.shard_for(node)
        if shard is None or self.waiting or self.sealed or nbytes > shard.max_bytes:
            return None
        segment = self._ledger.reserve(shard.name, nbytes, now_s + self._table.lease_s)
        if segment is not None:
            self.granted[segment.number] = node
        return segment

    def declare(self, number: int, path: str, put: Put, nbytes: int, now_s: float) -> None:
        """What was granted holds this put. LookupError: it was taken back, or there is no room for the rows.
        ValueError: the put is wrong. Then the file is given back."""
        segment = self._ledger.segments.get(number)
        if number not in self.granted or segment is None or segment.path != path:
            raise LookupError(f"segment {number} at {path}: not granted, or taken back")
        node, new = self.granted[number], 0
        try:
            if self.waiting or self.sealed or self._max_rows is not None:  # else to store it is the check
                new = self._check_new(put)
                if new and (self.waiting or self._full_of_rows(new, now_s)):
                    raise LookupError(f"segment {number}: no room for {new} new samples yet")
        except (LookupError, ValueError):
            self.cancel(number)
            raise
        del self.granted[number]
        segment.nbytes = nbytes
        self.reserved[number] = Reservation(put, new, node)

    def revoke(self, shard: str) -> bool:
        """Takes back the oldest grant of a shard; whether there was one."""
        for number in self.granted:
            if self._ledger.segments[number].shard == shard:
                return self.cancel(number)
        return False

    def cancel(self, number: int) -> bool:
        """Gives a reservation or a grant back; whether there was one."""
        if self.reserved.pop(number, None) is None and self.granted.pop(number, None) is None:
            return False
        self._ledger.free([number])
        return True

    @property
    def bring_new_rows(self) -> bool:
        """Whether samples are being written that nobody has seen yet."""
        return any(reservation.new_rows for reservation in self.reserved.values())

    def _give_up(self, now_s: float) -> None:
        """Ends reservations whose writers have not come back."""
        for number in self._ledger.expired(now_s):
            self.cancel(number)

    def _reserve(self, writer: Writer, now_s: float, full: str) -> Segment | str:
        """A file, or why there is none; `full`: why one who came before waits."""
        put = writer.put
        new = self._check_new(put)
        if new and full:
            return full
        if new and (rows := self._full_of_rows(new, now_s)):
            return rows
        shard = self._ledger.shard_for(writer.node)
        if shard is None:
            return "every shard is leaving"
        while True:
            segment = self._ledger.reserve(shard.name, writer.nbytes, now_s + self._table.lease_s, beyond=not new)
            if segment is not None or not self.revoke(shard.name):
                break
        if segment is None:
            return f"shard {shard.name!r} holds {shard.held:,} of max_bytes={shard.max_bytes:,}{self._held_up(now_s)}"
        self.reserved[segment.number] = Reservation(put, new, writer.node)
        return segment

    def _check_new(self, put: Put) -> int:
        """How many samples of it are new."""
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
        return f"the queue holds {held:,} samples of max_rows={self._max_rows:,}{self._held_up(now_s)}"

    def _held_up(self, now_s: float) -> str:
        """Who has not taken what the queue is full of."""
        tasks = self._table.stats(now_s)["tasks"]
        slowest = min(tasks, key=lambda task: tasks[task]["acked"])
        left = tasks[slowest]
        return f"; task {slowest!r} has {left['open']:,} to get and {left['leased']:,} to acknowledge"

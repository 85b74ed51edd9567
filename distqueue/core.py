"""What the queue decides, all of it: who may put, who gets which samples, which file is written next. No process, no
payload, no clock of its own: `LocalQueue` and the queue's actor drive the same core.

    put     reserve(what, where) ──► a file to write ──► commit ──► rows, served to whoever waits for them
    get     ask(want) ──► a Waiter: served at once, or when a put, an ended lease or a drop makes it possible
    ack, drop, renew, seal

Waiting costs nothing: a waiter is an entry under what it wants, looked at when something changed that could serve it,
once for all who want the same. Whoever can be served is served, the longest waiting first.

Invariants: what changes the state durably is told to `record` in the order in which it happened, and `recover` from
that makes the same state but for leases (nobody holds any) and reservations; a call that raises has changed
nothing.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from distqueue.balance import split_by_tokens
from distqueue.column import Layout
from distqueue.config import LEASE_S
from distqueue.messages import (
    Delivery,
    Part,
    Place,
    Put,
    array_to_names,
    layout_fields,
    layout_of,
    names_to_array,
    pack,
    runs_of,
    unpack,
)
from distqueue.samples import Ended, SampleTable, Taken, Want
from distqueue.segments import Segment, SegmentLedger

REMEMBERED_PUTS = 4096
"""Committed puts that are recognised when their writer, who did not hear of it, commits again"""


class QueueClosed(RuntimeError):
    """The queue was closed, or what held it has died."""


class QueueDrained(QueueClosed):
    """The queue is sealed and this task has had everything."""


@dataclass(frozen=True)
class Share:
    """One of `readers` who get parts of the same batch, balanced by tokens."""

    rank: int
    readers: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.readers:
            raise ValueError(f"share=({self.rank}, {self.readers}): expected (rank, readers) with 0 <= rank < readers")


@dataclass(eq=False)
class Waiter:
    """A get that is not served yet. `answer` is called once, with a Delivery or an exception."""

    want: Want
    share: Share | None
    number: int
    since_s: float
    answer: Callable[[Delivery | Exception], None]


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


Key = tuple[Want, int | None]
"""What waiters have in common: the want, and among how many readers a batch is dealt out"""


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
        if max_rows is not None and max_rows < 1:
            raise ValueError(f"max_rows={max_rows}: expected a positive number or None")
        self.table = table
        self.ledger = SegmentLedger(epoch)
        self.layouts: dict[str, Layout] = {}
        self.max_rows = max_rows
        self.record = record
        self.sealed = self.closed = False
        self.recovered = False
        """Who held what before is not known: an ack of a sample that was never handed out here counts"""
        self.late = 0
        self.waiting: dict[Key, list[Waiter]] = {}
        self.writers: list[Writer] = []
        self._numbers = count()
        self._reserved: dict[int, Reservation] = {}
        self._committed: OrderedDict[tuple[int, str], tuple[str, ...]] = OrderedDict()
        self._shares: dict[Key, list[deque[tuple[float, Delivery]]]] = {}

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
        """A file for the payload of a put, now or once there is room: first come, first served. What only adds columns
        to samples that are here passes by those who wait, and by the bounds: it is what lets samples end.

        ValueError: the put is wrong, or larger than a shard.
        """
        self._check_open()
        writer = Writer(put, node, nbytes, next(self._numbers) if number is None else number, answer)
        insort(self.writers, writer, key=lambda other: other.number)
        self.serve_writers(now_s)
        return writer

    def leave_room(self, writer: Writer) -> None:
        """This writer waits no more."""
        if writer in self.writers:
            self.writers.remove(writer)

    def serve_writers(self, now_s: float) -> None:
        """Answers every writer for whom there is room."""
        self._give_up(now_s)
        full = ""
        for writer in list(self.writers):
            try:
                found = self._reserve(writer, now_s, full)
            except ValueError as error:
                self.leave_room(writer)
                writer.answer(error)
                continue
            if isinstance(found, Segment):
                self.leave_room(writer)
                writer.answer(found)
            else:
                writer.full = full = found

    def _reserve(self, writer: Writer, now_s: float, full: str) -> Segment | str:
        """A file, or why there is none; `full`: why one who came before waits."""
        put = writer.put
        new = self._check_put(put)
        if new and full:
            return full
        if new and self.sealed:
            raise ValueError(f"sample {put.ids[0]!r}: the queue is sealed; no new sample can be put")
        if new and (rows := self._full_of_rows(new, now_s)):
            return rows
        shard = self.ledger.shard_for(writer.node)
        if shard is None:
            return "every shard is leaving"
        segment = self.ledger.reserve(shard.name, writer.nbytes, now_s + self.table.lease_s, beyond=not new)
        if segment is None:
            return f"shard {shard.name!r} holds {shard.held:,} of max_bytes={shard.max_bytes:,}{self._held_up(now_s)}"
        self._reserved[segment.number] = Reservation(put, new)
        return segment

    def commit(self, number: int, path: str, now_s: float) -> tuple[str, ...]:
        """The payload is written: its samples are there from now on. Returns the ids that came too late. To repeat it
        does no harm. LookupError: no such reservation (any more); reserve again."""
        self._check_open()
        if (number, path) in self._committed:
            return self._committed[number, path]
        segment = self.ledger.segments.get(number)
        if number not in self._reserved or segment is None or segment.path != path:
            raise LookupError(f"segment {number} at {path}: not reserved, or given up")
        put = self._reserved[number].put
        late = self._apply_put(put, number, path, now_s)
        del self._reserved[number]
        if self.record:
            names = "number", "shard", "path", "nbytes", "size"
            where = {name: getattr(segment, name) for name in names}
            self.record("put", pack(where | {"now_s": now_s}, {"put": np.frombuffer(put.to_bytes(), np.uint8)}))
        self.serve(now_s)
        return late

    def cancel(self, number: int, now_s: float) -> None:
        """A writer that cannot write gives its reservation back."""
        if self._reserved.pop(number, None):
            self.ledger.free([number])
            self.serve_writers(now_s)

    def _give_up(self, now_s: float) -> None:
        """Ends reservations whose writers have not come back."""
        for number in self.ledger.expired(now_s):
            self._reserved.pop(number, None)
            self.ledger.free([number])

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
        insort(self.waiting.setdefault(self._key(waiter), []), waiter, key=lambda other: other.number)
        self.tick(now_s)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Nobody waits there any more."""
        waiters = self.waiting.get(self._key(waiter))
        if waiters and waiter in waiters:
            waiters.remove(waiter)
            if not waiters:
                del self.waiting[self._key(waiter)]

    def explain(self, want: Want) -> str:
        """Why `want` is not served."""
        return self.table.explain(want)

    def locate(self, ids: Sequence[str], columns: Sequence[str], skip_ended: bool = False) -> Delivery:
        """Where columns of live samples lie, without a lease. ValueError names the sample and the column it lacks.
        `skip_ended` leaves out samples that have ended."""
        self._check_open()
        if skip_ended:
            ids = [id for id, live in zip(ids, self.table.are_live(ids).tolist(), strict=True) if live]
            if not ids:
                return self._delivery((), (), np.empty((0, 2)), np.empty(0), columns)
        if not ids or not columns:
            raise ValueError(f"read of {len(ids)} ids and columns={columns}: expected at least one of each")
        self.table.check_columns(ids, columns)
        rows = self.table.find(ids)
        groups, versions = self.table.describe(rows)
        return self._delivery(tuple(ids), groups, versions, rows, columns)

    def tick(self, now_s: float) -> float | None:
        """Ends leases and reservations that have run out, and serves; returns when to come again."""
        self.table.expire(now_s)
        self.serve(now_s)
        if self.writers:
            self.serve_writers(now_s)
        ends = [self.table.next_expiry_s(), self.ledger.next_expiry_s() if self.writers else None]
        return min((end for end in ends if end is not None), default=None)

    def serve(self, now_s: float) -> None:
        """Answers every waiter that can be answered."""
        for key in sorted(self.waiting, key=lambda key: self.waiting[key][0].number):
            while key in self.waiting and self._serve_first(key, now_s):
                pass

    # ---- ending

    def ack(self, task: str, ids: Sequence[str], now_s: float) -> None:
        self._check_open()
        ended = self.table.ack(task, ids, replayed=self.recovered)
        self._tell("ack", {"task": task, "count": len(ids)}, ids)
        self._end(ended, now_s)

    def drop(self, ids: Sequence[str], reason: str, now_s: float) -> None:
        self._check_open()
        ended = self.table.drop(ids, reason)
        self._tell("drop", {"reason": reason, "count": len(ids)}, ids)
        self._end(ended, now_s)

    def lose(self, numbers: Sequence[int], reason: str, now_s: float) -> tuple[str, ...]:
        """Segments are gone: their samples end as `lost:<reason>`. Returns them."""
        self._tell("lose", {"numbers": list(numbers), "reason": reason})
        return self._apply_lose(numbers, reason, now_s)

    def renew(self, task: str, ids: Sequence[str], now_s: float) -> None:
        self._check_open()
        self.table.check_task(task)
        self.table.renew(task, ids, now_s)

    def give_back(self, task: str, ids: Sequence[str], now_s: float) -> None:
        """What a reader got and will not use is open again at once."""
        self._check_open()
        self.table.check_task(task)
        self.table.release_lease(task, ids)
        self.serve(now_s)

    def seal(self, now_s: float) -> None:
        """No new sample comes: gets are served what is left, then QueueDrained."""
        self._check_open()
        if not self.sealed:
            self._tell("seal", {})
            self.sealed = True
            self.serve(now_s)

    def close(self) -> None:
        """Whoever waits, and every later call, gets QueueClosed."""
        self.closed = True
        waiting = [waiter for waiters in self.waiting.values() for waiter in waiters]
        self.waiting.clear()
        writers, self.writers = self.writers, []
        for waiter in waiting:
            waiter.answer(self._closed(waiter.want))
        for writer in writers:
            writer.answer(self._closed())

    def moved(self, number: int, shard: str, path: str, spilled: bool = False) -> None:
        self._tell("move", {"number": number, "shard": shard, "path": path, "spilled": spilled})
        self.ledger.moved(number, shard, path, spilled)

    # ---- looking

    def stats(self, now_s: float) -> dict[str, float]:
        """Metrics; `LocalQueue.stats` says which."""
        table = self.table.stats(now_s)
        waiters = dict.fromkeys(self.table.tasks, 0)
        for (want, _), waiting in self.waiting.items():
            waiters[want.task] += len(waiting)
        stats: dict[str, float] = {
            "distqueue/rows": len(self.table),
            "distqueue/bytes": self.ledger.nbytes,
            "distqueue/spilled_bytes": sum(s.nbytes for s in self.ledger.segments.values() if s.spilled),
            "distqueue/late": self.late,
        }
        stats |= {f"distqueue/ended/{name}": ended for name, ended in table["ended"].items()}
        for task, figures in table["tasks"].items():
            stats |= {
                f"distqueue/{task}/depth": figures["open"],
                f"distqueue/{task}/leased": figures["leased"],
                f"distqueue/{task}/waiters": waiters[task],
                f"distqueue/{task}/redelivered": figures["redelivered"],
                f"distqueue/{task}/age_s": figures["age_s"],
            }
        return stats

    def state(self, now_s: float) -> dict[str, Any]:
        """What `python -m distqueue` prints: stats, shards, and who waits for what, for how long, and why."""
        waiting = [
            {
                "task": want.task,
                "columns": want.columns,
                "waiters": len(waiters),
                "longest_s": now_s - waiters[0].since_s,
                "why": self.explain(want),
            }
            for (want, _), waiters in self.waiting.items()
        ]
        shards = [
            {
                "name": shard.name,
                "segments": len(self.ledger.of_shard(shard.name)),
                "bytes": shard.held,
                "max_bytes": shard.max_bytes,
                "leaving": shard.leaving,
            }
            for shard in self.ledger.shards.values()
        ]
        columns = {name: list(layout_fields(layout)) for name, layout in self.layouts.items()}
        return {
            "stats": self.stats(now_s),
            "waiting": waiting,
            "shards": shards,
            "columns": columns,
            "writing": len(self._reserved),
            "waiting_writers": [writer.full for writer in self.writers],
            "sealed": self.sealed,
            "tasks": self.table.tasks,
        }

    # ---- going on

    def snapshot(self) -> bytes:
        """All that is durable; leases and reservations are not."""
        live = [segment for segment in self.ledger.segments.values() if segment.live and not segment.dead]
        fields = {
            "segments": [(s.number, s.shard, s.path, s.nbytes, s.size, s.spilled) for s in live],
            "layouts": {name: layout_fields(layout) for name, layout in self.layouts.items()},
            "sealed": self.sealed,
            "late": self.late,
            "committed": list(self._committed.items()),
        }
        arrays = {f"table.{name}": value for name, value in self.table.snapshot().items()}
        texts = {name: value for name, value in arrays.items() if isinstance(value, str)}
        return pack(fields | {"texts": texts}, {name: a for name, a in arrays.items() if not isinstance(a, str)})

    @classmethod
    def recover(
        cls, snapshot: bytes, events: Iterable[tuple[str, bytes]], lease_s: float = LEASE_S, **options: Any
    ) -> QueueCore:
        """The core that made the snapshot, after the events; `options` as for a new one."""
        fields, arrays = unpack(snapshot)
        table = {name.removeprefix("table."): value for name, value in (arrays | fields["texts"]).items()}
        core = cls(SampleTable.restore(table, lease_s), **options)
        for number, shard, path, nbytes, size, spilled in fields["segments"]:
            core.ledger.adopt(Segment(number, shard, path, nbytes, size, live=True, spilled=spilled))
        core.layouts = {name: layout_of(*layout) for name, layout in fields["layouts"].items()}
        core.sealed, core.late = fields["sealed"], fields["late"]
        core._committed.update(((number, path), tuple(late)) for (number, path), late in fields["committed"])
        core.recovered = True
        record, core.record = core.record, None
        for kind, body in events:
            core._replay(kind, body)
        core.ledger.discards.clear()
        core.record = record
        return core

    def _replay(self, kind: str, body: bytes) -> None:
        """Does again what was told to `record`."""
        fields, arrays = unpack(body)
        match kind:
            case "put":
                names = "number", "shard", "path", "nbytes", "size"
                self.ledger.adopt(Segment(**{name: fields[name] for name in names}, live=True))
                put = Put.from_bytes(arrays["put"].tobytes())
                self._apply_put(put, fields["number"], fields["path"], fields["now_s"])
            case "ack":
                ids = array_to_names(arrays["ids"], fields["count"])
                self._end(self.table.ack(fields["task"], ids, replayed=True), 0.0)
            case "drop":
                self._end(self.table.drop(array_to_names(arrays["ids"], fields["count"]), fields["reason"]), 0.0)
            case "move":
                self.ledger.moved(fields["number"], fields["shard"], fields["path"], fields["spilled"])
            case "lose":
                self._apply_lose(fields["numbers"], fields["reason"], 0.0)
            case "seal":
                self.sealed = True
            case _:
                raise AssertionError(f"a journal of another version: {kind!r}")

    # ---- parts of the above

    def _apply_put(self, put: Put, number: int, path: str, now_s: float) -> tuple[str, ...]:
        self._check_layouts(put)
        late = self.table.put(put.ids, put.tokens, number, put.groups, put.versions, now_s)
        self.ledger.commit(number)
        for name, info in put.columns.items():
            self.layouts.setdefault(name, info.layout)
        self.late += len(late)
        if len(late) == len(put.ids) or not put.columns:
            self.ledger.free([number])
        self._committed[number, path] = late
        if len(self._committed) > REMEMBERED_PUTS:
            self._committed.popitem(last=False)
        return late

    def _apply_lose(self, numbers: Sequence[int], reason: str, now_s: float) -> tuple[str, ...]:
        ended = self.table.lose(numbers, f"lost:{reason}")
        self._end(ended, now_s)
        return ended.ids

    def _end(self, ended: Ended, now_s: float) -> None:
        self.ledger.free(ended.segments)
        self.serve(now_s)
        if self.writers:
            self.serve_writers(now_s)

    def _serve_first(self, key: Key, now_s: float) -> bool:
        """Answers the longest waiting of those who want the same, if it can be answered."""
        want, readers = key
        waiters = self.waiting[key]
        if readers is not None:
            return self._serve_shares(key, now_s)
        if (taken := self._take(want, now_s)) is not None:
            self._answer(key, waiters[0], self._delivered(taken, want.columns))
            return True
        return self._drain_first(key)

    def _serve_shares(self, key: Key, now_s: float) -> bool:
        want, readers = key
        assert readers is not None
        shares = self._shares.setdefault(key, [deque() for _ in range(readers)])
        for waiter in list(self.waiting[key]):
            assert waiter.share is not None
            mine = shares[waiter.share.rank]
            while mine and mine[0][0] <= now_s:  # its lease has run out: others have it by now
                mine.popleft()
            if mine:
                self._answer(key, waiter, mine.popleft()[1])
                return True
        if (taken := self._take(want, now_s)) is not None:
            units = taken.groups if want.whole_groups else ()
            for rank, rows in enumerate(split_by_tokens(taken.tokens.tolist(), readers, units)):
                shares[rank].append((now_s + self.table.lease_s, self._delivered(taken.select(rows), want.columns)))
            return True
        return self._drain_first(key)

    def _drain_first(self, key: Key) -> bool:
        """Tells one of those who want the same that nothing will come any more, if so."""
        want = key[0]
        if not (self.sealed and self.table.is_settled(want)) or self.table.leased(want.task):
            return False
        left = f"; {left:,} samples that it may not have are left" if (left := self.table.open(want.task)) else ""
        error = QueueDrained(f"the queue is sealed and task {want.task!r} has had everything{left}")
        self._answer(key, self.waiting[key][0], error)
        return True

    def _take(self, want: Want, now_s: float) -> Taken | None:
        """Once the queue is sealed and no open sample lacks a column any more, the rest, even if it is less."""
        if self.sealed and self.table.is_settled(want):
            want = replace(want, partial=True)
        return self.table.take(want, now_s) if self.table.can_serve(want) else None

    def _answer(self, key: Key, waiter: Waiter, answer: Delivery | Exception) -> None:
        self.leave(waiter)
        waiter.answer(answer)

    def _delivered(self, taken: Taken, columns: Sequence[str]) -> Delivery:
        delivery = self._delivery(taken.ids, taken.groups, taken.versions, taken.rows, columns)
        return replace(delivery, too_old=taken.too_old)

    def _delivery(
        self,
        ids: tuple[str, ...],
        groups: tuple[str, ...],
        versions: np.ndarray,
        rows: np.ndarray,
        columns: Sequence[str],
    ) -> Delivery:
        if not len(ids):
            return Delivery((), (), (), (), ())
        parts: list[tuple[list[str], np.ndarray, np.ndarray]] = []
        for name in columns:
            segments, inside = self.table.places(rows, name)
            for names, known, at in parts:
                if np.array_equal(known, segments) and np.array_equal(at, inside):
                    names.append(name)
                    break
            else:
                parts.append(([name], segments, inside))
        numbers = np.unique(np.concatenate([segments for _, segments, _ in parts]))
        places = tuple(
            Place(number, self.ledger.segments[number].shard, self.ledger.segments[number].path)
            for number in numbers.tolist()
        )
        return Delivery(
            ids=ids,
            groups=groups if any(groups) else (),
            versions=() if (versions < 0).any() else tuple(map(tuple, versions.tolist())),
            places=places,
            parts=tuple(
                Part(tuple(names), runs_of(np.searchsorted(numbers, segments), inside))
                for names, segments, inside in parts
            ),
        )

    def _tell(self, kind: str, fields: dict[str, Any], ids: Sequence[str] | None = None) -> None:
        if self.record:
            self.record(kind, pack(fields, {} if ids is None else {"ids": names_to_array(ids)}))

    def _key(self, waiter: Waiter) -> Key:
        return waiter.want, None if waiter.share is None else waiter.share.readers

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

    def _full_of_rows(self, new: int, now_s: float) -> str | None:
        if self.max_rows is None:
            return None
        if new > self.max_rows:
            raise ValueError(f"a put of {new:,} new samples; this queue holds max_rows={self.max_rows:,}")
        held = len(self.table) + sum(reservation.new_rows for reservation in self._reserved.values())
        if held + new <= self.max_rows:
            return None
        return f"the queue holds {held:,} samples of max_rows={self.max_rows:,}{self._held_up(now_s)}"

    def _held_up(self, now_s: float) -> str:
        """Who has not taken what the queue is full of."""
        tasks = self.table.stats(now_s)["tasks"]
        slowest = min(tasks, key=lambda task: tasks[task]["acked"])
        left = tasks[slowest]
        return f"; task {slowest!r} has {left['open']:,} to get and {left['leased']:,} to acknowledge"

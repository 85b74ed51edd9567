"""The queue's actor: drives `QueueCore` for clients of all nodes, keeps the journal, and starts a shard on every node.

A call that waits is a suspended coroutine and delays nobody. Calls that may wait long are cut in turns (`TURN_S`): the
client calls again and keeps its place in line, so that a dead client's place is soon given up.

The order that makes the journal safe: payload on disk ─► put in the journal ─► acknowledged; the end of samples in the
journal ─► their segments unlinked.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from distqueue import checkpoint
from distqueue.config import QueueOptions
from distqueue.core import QueueClosed, QueueCore, Share
from distqueue.fleet import Fleet
from distqueue.journal import Journal
from distqueue.messages import File, Put, pack, smallest
from distqueue.samples import SampleTable, Want
from distqueue.segments import Segment
from distqueue.steps import GONE

log = logging.getLogger(__name__)

NAMESPACE = "distqueue"

TURN_S = 20.0
"""A call that waits answers after at most this long, so that the client, if it lives, calls again"""

MAX_CALLS = 10_000
"""Calls the actor holds at once, nearly all of them waiting; Ray's own default is 1,000"""


@dataclass(frozen=True)
class Turn:
    """Not yet: call again, with this place in line. `why` is for the log."""

    number: int
    since_s: float
    why: str


class QueueActor:
    """Runs inside Ray. Metadata only: what is put and got travels through the shards' files."""

    def __init__(
        self, name: str, tasks: tuple[str, ...], options: QueueOptions, node: str, checkpoint: str | None = None
    ) -> None:
        """`checkpoint`: what a queue without a journal, or whose journal is new, goes on from."""
        self.name, self.options, self.node = name, options, node
        self.checkpoint_folder = checkpoint
        self.epoch = uuid.uuid4().hex[:12]
        self.tasks = tasks
        self.journal: Journal | None = None
        self.core: QueueCore
        self.fleet: Fleet
        self._started: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_s = 0.0

    # ---- beginning and end

    async def start(self) -> str:
        """Returns when shards run on every node and what a journal holds is back."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        await self._started
        return self.name

    async def _start(self) -> None:
        self.core, recovered = self._make_core(self.tasks)
        self.fleet = Fleet(self.core, self.options, self.epoch)
        await self._start_shards()
        if recovered:
            await self.fleet.adopt()
        elif self.checkpoint_folder is not None:
            await self.fleet.copy_in(Path(self.checkpoint_folder))
        if self.journal is not None and not recovered:
            self.journal.begin(self.core.snapshot())
            self.core.record = self.journal.append

    async def _start_shards(self) -> None:
        for node in _alive_nodes():
            try:
                await self.fleet.add(node)
            except GONE as error:  # it died meanwhile
                log.warning("node %s gets no shard: %s", node, error)
        if not self.fleet.shards:
            raise QueueClosed("no node of the cluster took a shard")

    def _make_core(self, tasks: tuple[str, ...]) -> tuple[QueueCore, bool]:
        """(the core that a journal holds, True), or (that of a checkpoint or a new one, False)."""
        given = self.options
        options: dict[str, Any] = {"max_rows": given.max_rows, "epoch": self.epoch}
        new = QueueCore(SampleTable(tasks, given.lease_s, given.group_size), **options)
        if given.journal is not None:
            self.journal = Journal(given.journal, lambda: self.core.snapshot())
            snapshot, events = self.journal.read()
            if snapshot is not None:
                core = QueueCore.recover(snapshot, events, given.lease_s, **options)
                for key in ("tasks", "group_size"):
                    has, asked = getattr(core.table, key), getattr(new.table, key)
                    if has != asked:
                        raise ValueError(f"{key}={asked}: journal {given.journal} has {key}={has}")
                core.record = self.journal.append
                return core, True
        if self.checkpoint_folder is not None:
            return QueueCore.recover(checkpoint.load(self.checkpoint_folder), (), given.lease_s, **options), False
        return new, False

    async def close(self) -> None:
        """Ends waiting calls with QueueClosed, and the shards; without a journal their folders, too."""
        await self.start()
        self.core.close()
        if self.journal is not None:
            await self.journal.flushed()
            self.journal.close()
        else:
            await self.fleet.end()

    # ---- shards

    async def add_shard(self, node: str) -> str:
        async with self._call():
            return await self.fleet.add(node)

    async def remove_shard(self, node: str) -> None:
        async with self._call():
            await self.fleet.remove(node, self._settle)

    async def shard_lost(self, name: str) -> None:
        async with self._call():
            await self.fleet.find_dead(name)

    async def find_lost(self, numbers: Sequence[int]) -> None:
        async with self._call():
            await self.fleet.find_lost(numbers)

    # ---- checkpoints

    async def checkpoint(self, folder: str, cut: str) -> None:
        """Writes the state of this moment and copies of its segments to `folder`. A call made again with its `cut` does
        no harm."""
        async with self._call():
            if checkpoint.is_whole(folder, cut):
                return
            snapshot, numbers = self.core.snapshot(checkpoint.segment_path), [s.number for s in self.core.ledger.live]
            with self.core.ledger.pinned(*numbers):
                unfinished = checkpoint.Unfinished(folder, cut)
                try:
                    partial = unfinished.partial
                    await self.fleet.copy_out(numbers, lambda number: str(partial / checkpoint.segment_path(number)))
                    await asyncio.to_thread(unfinished.finish, snapshot, numbers)
                except BaseException:
                    unfinished.give_up()
                    raise

    # ---- calls of clients

    async def where(self) -> dict[str, tuple[str, Any]]:
        """Shards: name → (node, actor)."""
        await self.start()
        return dict(self.fleet.shards)

    async def reserve(self, message: bytes, node: str, nbytes: int, place: int | None) -> File | Turn:
        """The file to write, or Turn: the queue is full."""
        async with self._call():
            found, answer = _question()
            writer = self.core.ask_room(Put.from_bytes(message), node, nbytes, time.time(), answer, place)
            try:
                if not found.done() and await self.fleet.spill(node, nbytes):
                    self.core.writers.serve(time.time())
                if place is not None:
                    await self._turn(found, TURN_S)
                if not found.done():
                    return Turn(writer.number, 0.0, writer.full)
                return self._file(found.result())
            except asyncio.CancelledError:
                if found.done() and not found.exception():
                    self.core.cancel(found.result().number, time.time())
                raise
            finally:
                self.core.writers.leave(writer)

    async def commit(
        self, number: int, path: str, node: str, nbytes: int, message: bytes | None = None
    ) -> tuple[tuple[str, ...], File | None]:
        """(ids that came too late, a file for the next put). `message`: the put, where the file was granted before it.
        LookupError: reserve."""
        async with self._call():
            now_s = time.time()
            if message is None:
                late = self.core.commit(number, path, now_s)
            else:
                late = self.core.put(Put.from_bytes(message), nbytes, number, path, now_s)
            granted = self.core.grant(node, nbytes + nbytes // 4, now_s)
            return late, None if granted is None else self._file(granted)

    async def cancel(self, number: int) -> None:
        async with self._call():
            self.core.cancel(number, time.time())

    async def get(
        self, want: Want, share: Share | None, wait_s: float, place: tuple[int, float] | None
    ) -> bytes | Turn:
        """A Delivery, or Turn after `wait_s` (at most TURN_S)."""
        async with self._call():
            found, answer = _question()
            waiter = self.core.ask(want, share, time.time(), answer, place)
            try:
                await self._turn(found, min(wait_s, TURN_S))
                if not found.done():
                    return Turn(waiter.number, waiter.since_s, self.core.explain(want))
                return found.result().to_bytes()
            except asyncio.CancelledError:  # the client is gone or has changed its mind
                if found.done() and not found.exception():
                    self.core.give_back(want.task, found.result().ids, time.time())
                raise
            finally:
                self.core.readers.leave(waiter)

    async def locate(self, ids: Sequence[str], columns: Sequence[str], skip_ended: bool = False) -> bytes:
        async with self._call():
            return self.core.locate(ids, columns, skip_ended).to_bytes()

    async def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> bytes:
        """`lengths` (columns, B): see `LocalQueue.lengths`."""
        async with self._call():
            return pack({}, {"lengths": smallest(self.core.lengths(ids, columns))})

    async def call(self, method: str, *args: Any) -> Any:
        """claim, ack, drop, renew, give_back, seal: what changes the state without a payload."""
        async with self._call():
            return getattr(self.core, method)(*args, time.time())

    async def stats(self) -> dict[str, float]:
        async with self._call():
            return self.core.stats(time.time())

    async def state(self) -> str:
        async with self._call():
            return json.dumps(self.core.state(time.time()) | {"name": self.name, "journal": self.options.journal})

    # ---- parts of the above

    def _file(self, segment: Segment) -> File:
        home, durable = self.fleet.shards[segment.shard], self.journal is not None
        return File(
            segment.number, segment.path, segment.size, segment.shard, home.node, durable, self.core.table.lease_s
        )

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Around every call: the queue has started, and what the call has changed is on disk before it is answered."""
        await self.start()
        yield
        await self._settle()

    async def _settle(self) -> None:
        """What was changed is on disk; then what was freed by it is unlinked."""
        self._set_alarm()
        discards, self.core.ledger.discards = self.core.ledger.discards, []
        if self.journal is not None:
            try:
                await self.journal.flushed()
            except Exception as error:  # what is in memory is not on disk: nothing more may be answered
                self.core.close()
                log.exception("the journal cannot be written")
                raise QueueClosed(f"journal {self.options.journal}: {error}") from None
        self.fleet.discard(discards)

    async def _turn(self, found: asyncio.Future[Any], wait_s: float) -> None:
        """Waits for an answer; leases that end meanwhile are seen to."""
        if not found.done():
            self._set_alarm()
            await asyncio.wait([found], timeout=wait_s)

    def _set_alarm(self) -> None:
        """While someone waits, has the core look again when the next lease ends."""
        if self.core.closed or not self.core.awaited:
            return
        next_s = self.core.tick(time.time())
        if next_s is not None and (self._alarm is None or self._alarm_s > next_s):
            if self._alarm is not None:
                self._alarm.cancel()
            delay_s = max(0.0, next_s - time.time())
            self._alarm, self._alarm_s = asyncio.get_running_loop().call_later(delay_s, self._ring), next_s

    def _ring(self) -> None:
        self._alarm = None
        self._set_alarm()


def _question() -> tuple[asyncio.Future[Any], Callable[[Any], None]]:
    """(what will be answered, what the core calls to answer)."""
    found: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def answer(value: Any) -> None:
        if isinstance(value, Exception):
            found.set_exception(value)
        else:
            found.set_result(value)

    return found, answer


def _alive_nodes() -> list[str]:
    return sorted(node["NodeID"] for node in ray.nodes() if node["Alive"])

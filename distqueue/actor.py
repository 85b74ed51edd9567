"""The queue's actor: drives `QueueCore` for clients on all nodes, writes the journal, and starts a shard on every node.

A waiting call is a suspended coroutine and delays no other. Calls that may wait long return a `PlaceInLine` after
`TURN_S`: the client calls again and keeps it, so the place of a dead client is soon released.

The order that makes the journal safe: payload on disk ─► put in the journal ─► acknowledged; the end of samples in the
journal ─► their segments unlinked.
"""

import asyncio
import json
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from distqueue import checkpoint
from distqueue.actor_calls import GONE
from distqueue.clock import epoch_s
from distqueue.config import QueueOptions
from distqueue.core import QueueCore
from distqueue.errors import JournalFull, QueueClosed, StorageFull
from distqueue.fleet import Fleet
from distqueue.journal import Journal
from distqueue.messages import File, Put
from distqueue.request import resolving
from distqueue.samples import SampleTable, Selection
from distqueue.segments import Segment

log = logging.getLogger(__name__)

NAMESPACE = "distqueue"

TURN_S = 20.0
"""A waiting call answers after at most this long, so that its client, if it is alive, calls again"""
MAX_CALLS = 10_000
"""Concurrent calls, nearly all of them waiting; Ray's own default is 1,000"""


@dataclass(frozen=True)
class PlaceInLine:
    """Not served yet: call again with this place in line. `why` is for the log."""

    number: int
    since_s: float
    why: str


class QueueActor:
    """Run inside Ray. Handle metadata only: payload travels through the shards' files."""

    def __init__(
        self, *, name: str, tasks: tuple[str, ...], options: QueueOptions, node: str, checkpoint: str | None = None
    ) -> None:
        """`checkpoint`: the folder that a queue without a journal, or with a new one, resumes."""
        self.name, self.options, self.node = name, options, node
        self.checkpoint_folder = checkpoint
        self.epoch = uuid.uuid4().hex[:12]
        self.tasks = tasks
        self.journal: Journal | None = None
        self.core: QueueCore
        self.fleet: Fleet
        self._started: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0

    # ---- start and end

    async def start(self) -> str:
        """Return once a shard runs on every node and the journal or checkpoint is recovered."""
        if self._started is None:
            self._started = asyncio.ensure_future(self._start())
        await self._started
        return self.name

    async def _start(self) -> None:
        self.core, recovered = self._make_core(self.tasks)
        self.fleet = Fleet(self.core, self.options, epoch=self.epoch, queue=self.name, settle=self._settle)
        await self._start_shards()
        if recovered:
            await self.fleet.adopt()
        elif self.checkpoint_folder is not None:
            await self.fleet.copy_in(Path(self.checkpoint_folder))
        if self.journal is not None:  # what was recovered, too: a file that is whole, and short to read
            self.journal.begin(self.core.snapshot())
            self.core.record = self.journal.append

    async def _start_shards(self) -> None:
        try:
            await self._start_on(sorted(node["NodeID"] for node in ray.nodes() if node["Alive"]))
        except BaseException:
            if self.journal is None:
                await self.fleet.end()
            raise

    async def _start_on(self, nodes: Sequence[str]) -> None:
        errors = []
        for node in nodes:
            try:
                await self.fleet.add(node)
            except GONE as error:  # the node died meanwhile
                log.warning("no shard on node %s: %s", node, str(error))
                errors.append(str(error).strip().splitlines()[0])
        if not self.fleet.shards:
            reasons = "; ".join(dict.fromkeys(errors))
            raise QueueClosed(f"no shard could be started on any node of the cluster: {reasons}")

    def _make_core(self, tasks: tuple[str, ...]) -> tuple[QueueCore, bool]:
        """Return (the core recovered from the journal, True), or (that of the checkpoint or a new one, False)."""
        options = self.options
        bounds: dict[str, Any] = {"max_rows": options.max_rows, "epoch": self.epoch}
        new = QueueCore(SampleTable(tasks, options.lease_s), **bounds)
        if options.journal is not None:
            self.journal = Journal(options.journal, lambda: self.core.snapshot())
            stored = self.journal.read()
            for line in stored.damage:
                log.error("%s", line)
            # Restarted by Ray, or begun anew: only in the first case clients go on.
            if stored.missing and ray.is_initialized() and ray.get_runtime_context().was_current_actor_reconstructed:
                raise QueueClosed(f"{stored.damage[-1]}; its clients may wait for samples that nobody knows any more")
            if stored.snapshot is not None:
                has_gaps = bool(stored.missing)
                core = QueueCore.recover(stored.snapshot, stored.events, options.lease_s, has_gaps=has_gaps, **bounds)
                if core.table.tasks != tasks:
                    raise ValueError(f"tasks={tasks}: journal {options.journal} has tasks={core.table.tasks}")
                return core, True
        if self.checkpoint_folder is not None:
            return QueueCore.recover(checkpoint.load(self.checkpoint_folder), (), options.lease_s, **bounds), False
        return new, False

    async def close(self) -> None:
        """End waiting calls with QueueClosed and stop the shards; without a journal, remove their folders."""
        await self.start()
        self.core.close()
        if self.journal is not None:
            try:
                await self.journal.flushed()
            except StorageFull as error:  # what could not be written was never acknowledged
                log.error("the last changes are not in the journal: %s", str(error))
            self.journal.close()
        else:
            await self.fleet.end()

    async def ask_fleet(self, method: str, *args: Any) -> Any:
        """Call a method of the fleet: add, remove, find_dead, find_lost or find_damaged."""
        async with self._call():
            return await getattr(self.fleet, method)(*args)

    # ---- checkpoints

    async def checkpoint(self, folder: str, cut: str) -> None:
        """Write the state of this moment and copies of its segments to `folder`. Idempotent for a call retried with
        the same `cut`."""
        async with self._call():
            await self._checkpoint(folder, cut)
        await asyncio.to_thread(checkpoint.release_freed)

    async def _checkpoint(self, folder: str, cut: str) -> None:
        if checkpoint.is_whole(folder, cut):
            return
        snapshot, numbers = self.core.snapshot(checkpoint.segment_path), [s.number for s in self.core.ledger.live]
        with self.core.ledger.pinned(*numbers), checkpoint.Unfinished(folder, cut) as unfinished:
            partial = unfinished.partial
            await self.fleet.copy_out(numbers, lambda number: str(partial / checkpoint.segment_path(number)))
            await asyncio.to_thread(unfinished.finish, snapshot, numbers)

    # ---- calls of clients

    async def where(self) -> dict[str, tuple[str, Any]]:
        """Return the shards: name → (node, actor)."""
        await self.start()
        return dict(self.fleet.shards)

    async def reserve(self, *, message: bytes, node: str, nbytes: int, number: int | None) -> File | PlaceInLine:
        """Reserve a file to write, or return a PlaceInLine: the queue is full. `number`: of the place before."""
        async with self._call():
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            put, resolve = Put.from_bytes(message), resolving(answer)
            writer = self.core.ask_room(put, node=node, nbytes=nbytes, now_s=epoch_s(), answer=resolve, number=number)
            try:
                if not answer.done() and await self.fleet.spill(node, nbytes):
                    self.core.writers.serve(epoch_s())
                if number is not None:
                    await self._wait(answer, TURN_S)
                if not answer.done():
                    return PlaceInLine(writer.number, 0.0, writer.full)
                return self._file(answer.result())
            except asyncio.CancelledError:
                if answer.done() and not answer.exception():
                    self.core.cancel(answer.result().number, epoch_s())
                raise
            finally:
                self.core.writers.leave(writer)

    async def commit(
        self, *, number: int, path: str, node: str, nbytes: int, message: bytes | None
    ) -> tuple[tuple[str, ...], File | None]:
        """Commit a put. Return (ids that were dropped before, a file granted for the next put).

        `message`: the put's metadata if its file was granted, None if it was reserved. LookupError: the file is no
        longer reserved or granted; reserve again."""
        async with self._call():
            now_s = epoch_s()
            if message is None:
                late = self.core.commit(number, path, now_s)
            else:
                late = self.core.put(Put.from_bytes(message), nbytes=nbytes, number=number, path=path, now_s=now_s)
            granted = self.core.grant(node, nbytes + nbytes // 4, now_s)
            return late, None if granted is None else self._file(granted)

    async def get(self, *, selection: Selection, wait_s: float, turn: PlaceInLine | None) -> bytes | PlaceInLine:
        """Return a Delivery, or a PlaceInLine after `wait_s` (at most TURN_S). `turn`: the one returned before."""
        async with self._call():
            answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            place = None if turn is None else (turn.number, turn.since_s)
            waiter = self.core.ask(selection, now_s=epoch_s(), answer=resolving(answer), place=place)
            try:
                await self._wait(answer, min(wait_s, TURN_S))
                if not answer.done():
                    return PlaceInLine(waiter.number, waiter.since_s, self.core.table.explain(selection))
                return answer.result().to_bytes()
            except asyncio.CancelledError:  # the client has ended or has cancelled
                if answer.done() and not answer.exception():
                    self.core.give_back(selection.task, answer.result().ids, epoch_s())
                raise
            finally:
                self.core.readers.leave(waiter)

    async def locate(
        self, ids: Sequence[str], columns: Sequence[str], *, lengths: Sequence[str] = (), skip_ended: bool = False
    ) -> bytes:
        async with self._call():
            return self.core.locate(ids, columns, lengths=lengths, skip_ended=skip_ended).to_bytes()

    async def look(self, method: str, *args: Any) -> Any:
        """Call a method of the core that changes nothing: lengths, holding or lost_since."""
        async with self._call():
            return getattr(self.core, method)(*args)

    async def change(self, method: str, *args: Any) -> Any:
        """Call a method of the core that depends on the time and has no payload: ack, stats, seal, …"""
        async with self._call():
            return getattr(self.core, method)(*args, epoch_s())

    async def state(self) -> str:
        async with self._call():
            return json.dumps(self.core.state(epoch_s()) | {"name": self.name, "journal": self.options.journal})

    def _file(self, segment: Segment) -> File:
        return File(
            number=segment.number,
            path=segment.path,
            size=segment.size,
            shard=segment.shard,
            node=self.fleet.shards[segment.shard].node,
            durable=self.journal is not None,
            lease_s=self.core.table.lease_s,
        )

    @asynccontextmanager
    async def _call(self) -> AsyncIterator[None]:
        """Surround every call: the queue has started, and the call's changes are on disk before it is answered."""
        await self.start()
        yield
        await self._settle()

    async def _settle(self) -> None:
        """Wait until every change is on disk, then unlink the files it freed."""
        self._set_timer()
        discards, self.core.ledger.discards = self.core.ledger.discards, []
        if self.journal is not None:
            try:
                await self.journal.flushed()
            except Exception as error:  # memory is ahead of the disk: nothing more may be answered
                kind = JournalFull if isinstance(error, StorageFull) else QueueClosed
                failure = kind(f"journal {self.options.journal}: {error}")
                self.core.close(failure)
                log.exception("writing the journal failed")
                raise failure from None
        self.fleet.discard(discards)

    async def _wait(self, answer: asyncio.Future[Any], wait_s: float) -> None:
        """Wait for an answer; leases that expire meanwhile are handled."""
        if not answer.done():
            self._set_timer()
            await asyncio.wait([answer], timeout=wait_s)

    def _set_timer(self) -> None:
        """While a client waits, call the core again when the next lease expires."""
        if self.core.closed or not self.core.awaited:
            return
        next_s = self.core.tick(epoch_s())
        if next_s is not None and (self._timer is None or self._timer_s > next_s):
            if self._timer is not None:
                self._timer.cancel()
            delay_s = max(0.0, next_s - epoch_s())
            self._timer, self._timer_s = asyncio.get_running_loop().call_later(delay_s, self._expire), next_s

    def _expire(self) -> None:
        self._timer = None
        self._set_timer()

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

from distqueue.config import QueueOptions
from distqueue.core import QueueClosed, QueueCore, Share
from distqueue.journal import Journal
from distqueue.messages import Put
from distqueue.samples import SampleTable, Want
from distqueue.segments import Segment
from distqueue.segments import Shard as ShardEntry
from distqueue.shard import Shard, memory_folder

log = logging.getLogger(__name__)

NAMESPACE = "distqueue"

GONE = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
"""An actor has ended for good, or its node has"""

UNAVAILABLE = ray.exceptions.ActorUnavailableError
"""… or, a kind of the former, it is being started anew"""

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

    def __init__(self, name: str, tasks: tuple[str, ...], options: QueueOptions, node: str) -> None:
        self.name, self.options, self.node = name, options, node
        self.epoch = uuid.uuid4().hex[:12]
        self.tasks = tasks
        self.journal: Journal | None = None
        self.core: QueueCore
        self.shards: dict[str, Any] = {}
        """Actors by name"""
        self.nodes: dict[str, str] = {}
        """Node by shard"""
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
        self.core = self._make_core(self.tasks)
        for node in _alive_nodes():
            try:
                await self._add_shard(node)
            except GONE as error:  # it died meanwhile
                log.warning("node %s gets no shard: %s", node, error)
        if not self.shards:
            raise QueueClosed("no node of the cluster took a shard")
        await self._adopt()

    def _make_core(self, tasks: tuple[str, ...]) -> QueueCore:
        """A new core, or the one that a journal holds."""
        given = self.options
        options: dict[str, Any] = {"max_rows": given.max_rows, "epoch": self.epoch}
        new = QueueCore(SampleTable(tasks, given.lease_s, given.group_size), **options)
        if given.journal is None:
            return new
        self.journal = Journal(given.journal, lambda: self.core.snapshot())
        snapshot, events = self.journal.read()
        if snapshot is None:
            self.journal.begin(new.snapshot())
            core = new
        else:
            core = QueueCore.recover(snapshot, events, given.lease_s, **options)
            found, asked = ((of.table.tasks, of.table.group_size) for of in (core, new))
            if found != asked:
                raise ValueError(f"journal {given.journal}: its (tasks, group_size) are {found}; asked for {asked}")
        core.record = self.journal.append
        return core

    async def _adopt(self) -> None:
        """Gives every segment that was found in the journal to a shard that sees its file."""
        if self.journal is None:
            return
        segments = list(self.core.ledger.segments.values())
        missing = {segment.path for segment in segments}
        for name, shard in self.shards.items():
            found = missing - set(await shard.missing.remote(sorted(missing)))
            for segment in segments:
                if segment.path in found:
                    self.core.ledger.adopted_by(segment.number, name)
            missing -= found
        if missing:
            lost = self.core.lose([s.number for s in segments if s.path in missing], "not found", time.time())
            log.error("%d segments of the journal are not on any node; %d samples are lost", len(missing), len(lost))
        kept = [segment.path for segment in self.core.ledger.segments.values()]
        for shard in self.shards.values():
            await shard.keep_only.remote(kept)

    async def close(self) -> None:
        """Ends waiting calls with QueueClosed, and the shards; without a journal their folders, too."""
        await self.start()
        self.core.close()
        if self.journal is not None:
            await self.journal.flushed()
            self.journal.close()
        else:
            await asyncio.gather(*(shard.end.remote() for shard in self.shards.values()), return_exceptions=True)

    # ---- shards

    async def add_shard(self, node: str) -> str:
        """Starts a shard on a node that has none yet; returns its name."""
        await self.start()
        for name, home in self.nodes.items():
            if home == node and not self.core.ledger.shards[name].leaving:
                return name
        return await self._add_shard(node)

    async def _add_shard(self, node: str) -> str:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        name = f"shard-{node[:8]}"
        while name in self.core.ledger.shards:
            name += "+"
        if self.options.journal is not None:
            folder = Path(self.options.journal) / "segments" / name
        else:
            folder = memory_folder(self.epoch, name)
        spill = None if self.options.spill is None else str(Path(self.options.spill) / self.epoch / name)
        actor = ray.remote(Shard).options(
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        shard: Any = actor.remote(str(folder), spill)
        space = await shard.space.remote()  # and it has made its folder
        most = self.options.max_bytes or space // 2
        recycles = self.journal is None
        self.core.ledger.add_shard(ShardEntry(name, node, str(folder), most, recycles, spill))
        self.shards[name], self.nodes[name] = shard, node
        self.core.serve_writers(time.time())
        return name

    async def remove_shard(self, node: str) -> None:
        """Drains a node's shard to the others and ends it. ValueError if there is no other."""
        await self.start()
        names = [name for name, home in self.nodes.items() if home == node]
        if not names:
            raise ValueError(f"node {node!r}: it has no shard; shards are on {sorted(set(self.nodes.values()))}")
        for name in names:
            entry = self.core.ledger.shards[name]
            entry.leaving = True
            if self.core.ledger.shard_for(node) is None:
                entry.leaving = False
                raise ValueError(f"node {node!r} has the last shard of this queue")
        for name in names:
            await self._drain(name)
            shard = self.shards.pop(name)
            self.core.ledger.remove_shard(name)
            del self.nodes[name]
            await shard.end.remote()
            ray.kill(shard)

    async def shard_lost(self, name: str) -> None:
        """A client could not reach a shard: if its process is gone for good, so is what it held."""
        await self.start()
        if name not in self.shards:
            return
        try:
            await self.shards[name].space.remote()
            return
        except UNAVAILABLE:
            return
        except GONE:
            numbers = [segment.number for segment in self.core.ledger.of_shard(name)]
        self.core.ledger.shards[name].leaving = True
        lost = self.core.lose(numbers, name, time.time())
        log.error("%s is gone with its node; %d samples are lost with it: %s …", name, len(lost), lost[:3])
        del self.shards[name]
        await self._settle()

    async def _drain(self, name: str) -> None:
        """Moves every segment of a leaving shard; writers that have reserved there come to their end first."""
        ledger = self.core.ledger
        while segments := ledger.of_shard(name):
            live = [segment for segment in segments if segment.live and not segment.dead]
            if not live:  # what is left is still being written, or read for a checkpoint
                await asyncio.sleep(0.05)
                self.core.tick(time.time())
                continue
            for segment in live:
                if segment.number in ledger.segments:
                    await self._move(segment)

    async def _move(self, segment: Segment) -> None:
        target = self.core.ledger.shard_for("")
        assert target is not None
        with self.core.ledger.pinned(segment.number):
            path = f"{target.folder}/{self.epoch}-{segment.number}-moved"
            contents = self.shards[segment.shard].export.remote(segment.number, segment.path)
            await self.shards[target.name].take_over.remote(path, contents, self.journal is not None)
            self.core.moved(segment.number, target.name, path)
        await self._settle()

    async def _spill(self, node: str, nbytes: int) -> bool:
        """Brings segments of a writer's full shard to disk, enough for a put of `nbytes`; whether that was possible."""
        entry = self.core.ledger.shard_for(node)
        if entry is None:
            return False
        shard = entry.name
        numbers = self.core.ledger.to_spill(shard, nbytes) if entry.spill else []
        for number in numbers:
            with self.core.ledger.pinned(number):
                segment = self.core.ledger.segments[number]
                target = f"{entry.spill}/{number}"
                await self.shards[shard].spill.remote(number, segment.path, target)
                self.core.moved(number, shard, target, spilled=True)
        if numbers:
            log.warning("shard %s was full: %d segments went to %s", shard, len(numbers), entry.spill)
        return bool(numbers)

    # ---- calls of clients

    async def where(self) -> dict[str, tuple[str, Any]]:
        """Shards: name → (node, actor)."""
        await self.start()
        return {name: (self.nodes[name], shard) for name, shard in self.shards.items()}

    async def reserve(self, message: bytes, node: str, nbytes: int, place: int | None) -> tuple[Any, ...] | Turn:
        """(number, path, bytes, shard, node, whether to sync) of the file to write, or Turn: the queue is full."""
        async with self._call():
            found, answer = _question()
            writer = self.core.ask_room(Put.from_bytes(message), node, nbytes, time.time(), answer, place)
            try:
                if not found.done() and await self._spill(node, nbytes):
                    self.core.serve_writers(time.time())
                if place is not None:
                    await self._turn(found, TURN_S)
                if not found.done():
                    return Turn(writer.number, 0.0, writer.full)
                segment = found.result()
                where = segment.number, segment.path, segment.size, segment.shard, self.nodes[segment.shard]
                return *where, self.journal is not None
            except asyncio.CancelledError:
                if found.done() and not found.exception():
                    self.core.cancel(found.result().number, time.time())
                raise
            finally:
                self.core.leave_room(writer)

    async def commit(self, number: int, path: str) -> tuple[str, ...]:
        """LookupError: reserve again."""
        async with self._call():
            return self.core.commit(number, path, time.time())

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
                self.core.leave(waiter)

    async def locate(self, ids: Sequence[str], columns: Sequence[str], skip_ended: bool = False) -> bytes:
        async with self._call():
            return self.core.locate(ids, columns, skip_ended).to_bytes()

    async def call(self, method: str, *args: Any) -> Any:
        """ack, drop, renew, give_back, seal: what changes the state without a payload."""
        async with self._call():
            return getattr(self.core, method)(*args, time.time())

    async def stats(self) -> dict[str, float]:
        async with self._call():
            return self.core.stats(time.time())

    async def state(self) -> str:
        async with self._call():
            return json.dumps(self.core.state(time.time()) | {"name": self.name, "journal": self.options.journal})

    # ---- parts of the above

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
            await self.journal.flushed()
        by_shard: dict[str, list[str]] = {}
        for shard, path in discards:
            by_shard.setdefault(shard, []).append(path)
        for shard, paths in by_shard.items():
            if shard in self.shards:
                self.shards[shard].discard.remote(paths)

    async def _turn(self, found: asyncio.Future[Any], wait_s: float) -> None:
        """Waits for an answer; leases that end meanwhile are seen to."""
        if not found.done():
            self._set_alarm()
            await asyncio.wait([found], timeout=wait_s)

    def _set_alarm(self) -> None:
        """While someone waits, has the core look again when the next lease ends."""
        if self.core.closed or not (self.core.waiting or self.core.writers):
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

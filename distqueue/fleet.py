"""The shards of a queue, one per node: started, monitored, drained and ended.

The ledger (`segments.py`) decides which segment lies where and the shards copy files; this class keeps both consistent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import ray

from distqueue.actor_calls import GONE, RETRY_S, UNAVAILABLE
from distqueue.clock import epoch_s
from distqueue.config import QueueOptions
from distqueue.core import QueueCore
from distqueue.errors import DAMAGED, LOST, Damage, StorageFull
from distqueue.payload.shard import Shard, folder_in
from distqueue.payload.sweep import memory
from distqueue.segments import Segment, ShardState

log = logging.getLogger(__name__)

Answer = TypeVar("Answer")

MIN_FREE_BYTES = 1 << 20
"""A shard does not start with less than this"""


class ShardHandle(NamedTuple):
    node: str
    actor: Any


class Fleet:
    """Run in the queue's actor. `epoch` is part of the names of folders and files, and differs between restarts;
    `queue` is the queue's name, for messages; `settle` makes changes durable."""

    def __init__(
        self, core: QueueCore, options: QueueOptions, *, epoch: str, queue: str, settle: Callable[[], Awaitable[None]]
    ) -> None:
        self.core, self.options, self.epoch, self._queue, self._settle = core, options, epoch, queue, settle
        self.shards: dict[str, ShardHandle] = {}

    async def add(self, node: str) -> str:
        """Start a shard on a node that has none. Return the name of the node's shard."""
        for name, handle in self.shards.items():
            if handle.node == node and not self.core.ledger.shards[name].leaving:
                return name
        name = f"shard-{node[:8]}"
        while name in self.core.ledger.shards:
            name += "+"
        folder, spill = self._folders(name)
        shard = _start(node, folder, spill)
        try:
            free_bytes = await shard.free_bytes.remote()  # answers once the shard has made its folder
            max_bytes = self.options.max_bytes or half_of(free_bytes, folder)
        except StorageFull:
            if self.options.journal is None:
                await shard.end.remote()
            ray.kill(shard)
            raise
        recycles = self.options.journal is None
        state = ShardState(name, node=node, folder=folder, max_bytes=max_bytes, recycles=recycles, spill=spill)
        self.core.ledger.add_shard(state)
        self.shards[name] = ShardHandle(node, shard)
        self.core.writers.serve(epoch_s())
        return name

    async def adopt(self) -> None:
        """Assign every segment of the journal to a shard that sees its file; the samples of the others are lost."""
        segments = list(self.core.ledger.segments.values())
        missing = {segment.path for segment in segments}
        for name, handle in self.shards.items():
            visible = missing - set(await handle.actor.missing.remote(sorted(missing)))
            for segment in segments:
                if segment.path in visible:
                    self.core.ledger.assign(segment.number, name)
            missing -= visible
        if missing:
            lost = self.core.lose([s.number for s in segments if s.path in missing], "not found", epoch_s())
            log.error("%d segments of the journal are not on any node; %d samples are lost", len(missing), len(lost))
        kept = [segment.path for segment in self.core.ledger.segments.values()]
        for handle in self.shards.values():
            await handle.actor.keep_only.remote(kept, list(self.shards))

    async def copy_out(self, numbers: Iterable[int], target: Callable[[int], str]) -> None:
        """Copy pinned segments to `target(number)`; returns when they are on disk. RuntimeError: one is lost."""
        places = {number: self._place(number) for number in numbers}
        while places:
            missing = await self._copy({number: (*place, target(number)) for number, place in places.items()})
            places_now = {number: self._place(number) for number in missing}
            lost = [number for number, place in places_now.items() if place == places[number]]
            if lost:
                raise RuntimeError(f"segment {lost[0]} was lost from {places[lost[0]]} while it was copied")
            places = places_now  # these were moved meanwhile

    async def copy_in(self, folder: Path) -> None:
        """Copy all segments of a checkpoint to the shards, each to the emptiest one. ValueError: one is missing."""
        ledger = self.core.ledger
        copies = {}
        for segment in ledger.live:
            shard, source = ledger.shard_for(""), str(folder / segment.path)
            assert shard is not None
            ledger.moved(segment.number, shard.name, f"{shard.folder}/{self.epoch}-{segment.number}-restored")
            copies[segment.number] = shard.name, source, segment.path
        if missing := await self._copy(copies):
            raise ValueError(f"checkpoint={str(folder)!r}: segments {missing[:3]} are missing or have other contents")

    async def _copy(self, copies: Mapping[int, tuple[str, str, str]]) -> list[int]:
        """Copy segments: by number, (a shard that sees the source, source, target). Return the numbers of those that
        their shard did not find."""
        by_shard: dict[str, list[tuple[int, str, str]]] = {}
        for number, (shard, source, target) in copies.items():
            by_shard.setdefault(shard, []).append((number, source, target))
        missing = await asyncio.gather(*(self._copy_at(name, files) for name, files in by_shard.items()))
        return [number for numbers in missing for number in numbers]

    async def _copy_at(self, name: str, files: list[tuple[int, str, str]]) -> list[int]:
        while name in self.shards:
            try:
                return await self.shards[name].actor.copy.remote(files)
            except UNAVAILABLE:  # it is restarting, and its files remain
                await asyncio.sleep(RETRY_S)
            except GONE:
                break
        return [number for number, _, _ in files]

    def _place(self, number: int) -> tuple[str, str]:
        segment = self.core.ledger.segments[number]
        return segment.shard, segment.path

    async def remove(self, node: str) -> None:
        """Drain a node's shard to the others and end it."""
        ledger = self.core.ledger
        names = [name for name, handle in self.shards.items() if handle.node == node]
        if not names:
            nodes = sorted({handle.node for handle in self.shards.values()})
            raise ValueError(f"node {node!r}: it has no shard; shards are on {nodes}")
        for name in names:
            ledger.shards[name].leaving = True
            if ledger.shard_for(node) is None:
                ledger.shards[name].leaving = False
                raise ValueError(f"node {node!r} has the last shard of this queue")
        for name in names:
            while self.core.writers.revoke(name):
                pass
            await self._drain(name)
            ledger.remove_shard(name)
            shard = self.shards.pop(name).actor
            await shard.end.remote()
            ray.kill(shard)

    async def find_dead(self, name: str) -> None:
        """Check a shard that a client could not reach: if it has ended for good, its samples end as lost."""
        if name not in self.shards:
            return
        try:
            await self.shards[name].actor.free_bytes.remote()
            return
        except UNAVAILABLE:  # it is restarting, and its files remain
            return
        except GONE:
            pass
        numbers = [segment.number for segment in self.core.ledger.of_shard(name)]
        self.core.ledger.shards[name].leaving = True
        self.shards.pop(name, None)
        lost = self.core.lose(numbers, name, epoch_s())
        log.error("%s has ended with its node; %d samples are lost with it: %s", name, len(lost), lost[:3])

    async def find_lost(self, numbers: Sequence[int]) -> None:
        """Check segments that a client did not find where they should lie: samples whose files are gone end as lost."""
        known = self.core.ledger.segments
        for number in [number for number in numbers if number in known]:
            segment = known[number]
            handle = self.shards.get(segment.shard)
            if handle is None:
                continue
            held = await self._ask(segment.shard, handle.actor.holds.remote(number, segment.path))
            if held is None or held or number not in known:
                continue
            lost = self.core.lose([number], "not found", epoch_s())
            log.error("%s is missing or was overwritten; %d samples are lost", segment.path, len(lost))

    async def find_damaged(self, number: int) -> list[Damage]:
        """Verify a segment in which a client found damage: samples whose bytes differ from their checksums end as lost.
        Return what is damaged."""
        segment = self.core.ledger.segments.get(number)
        handle = None if segment is None else self.shards.get(segment.shard)
        if segment is None or handle is None:
            return []
        path = segment.path
        rows = await self._ask(segment.shard, handle.actor.damaged.remote(number, path))
        if not rows or number not in self.core.ledger.segments:
            return []
        damages = []
        for column, first, last in rows:
            ids = self.core.table.at([number], *((first, last) if column else ()))
            if ids:
                damages.append(Damage(self._queue, ids, column, path))
        for one in damages:
            log.error("%s; these samples end as %s%s", one, LOST, DAMAGED)
        self.core.lose_samples(list(dict.fromkeys(id for damage in damages for id in damage.ids)), DAMAGED, epoch_s())
        return damages

    async def _ask(self, shard: str, answer: Awaitable[Answer]) -> Answer | None:
        """Return a shard's answer; None: it is restarting, or has ended, which is then settled."""
        try:
            return await answer
        except UNAVAILABLE:
            return None
        except GONE:
            await self.find_dead(shard)
            return None

    async def spill(self, node: str, nbytes: int) -> bool:
        """Spill segments of a full shard to disk, enough for a put of `nbytes`. Return whether that was possible."""
        ledger = self.core.ledger
        entry = ledger.shard_for(node)
        numbers = ledger.to_spill(entry.name, nbytes) if entry is not None and entry.spill else []
        if entry is None or not numbers:
            return False
        log.warning("shard %s is full: spilling %d segments to %s", entry.name, len(numbers), entry.spill)
        for number in numbers:
            segment = ledger.segments.get(number)
            if segment is None or segment.spilled:  # its samples have ended, or another put spilled it
                continue
            with ledger.pinned(number):
                target = f"{entry.spill}/{number}"
                await self.shards[entry.name].actor.spill.remote(number, segment.path, target)
                self.core.moved(number, entry.name, target, spilled=True)
        return True

    def discard(self, files: Iterable[tuple[str, str]]) -> None:
        """Have the shards unlink (shard, path), without waiting for them."""
        by_shard: dict[str, list[str]] = {}
        for shard, path in files:
            by_shard.setdefault(shard, []).append(path)
        for shard, paths in by_shard.items():
            if shard in self.shards:
                self.shards[shard].actor.discard.remote(paths)

    async def end(self) -> None:
        """End all shards and remove their folders."""
        await asyncio.gather(*(shard.actor.end.remote() for shard in self.shards.values()), return_exceptions=True)

    async def _drain(self, name: str) -> None:
        """Move every segment off a leaving shard, once the writers that hold reservations there have finished."""
        ledger = self.core.ledger
        while segments := ledger.of_shard(name):
            live = [segment for segment in segments if segment.live and not segment.dead]
            if not live:  # the rest is still being written, or copied for a checkpoint
                await asyncio.sleep(0.05)
                self.core.tick(epoch_s())
            for segment in live:
                if segment.number in ledger.segments:
                    await self._move(segment)
                    await self._settle()

    async def _move(self, segment: Segment) -> None:
        target = self.core.ledger.shard_for("")
        assert target is not None
        with self.core.ledger.pinned(segment.number):
            path = f"{target.folder}/{self.epoch}-{segment.number}-moved"
            contents = self.shards[segment.shard].actor.export_segment.remote(segment.number, segment.path)
            durable = self.options.journal is not None
            await self.shards[target.name].actor.import_segment.remote(path, contents, durable)
            self.core.moved(segment.number, target.name, path)

    def _folders(self, name: str) -> tuple[str, str | None]:
        spill = None if self.options.spill is None else str(folder_in(Path(self.options.spill), self.epoch, name))
        if self.options.journal is not None:
            return str(Path(self.options.journal) / "segments" / name), spill
        return str(folder_in(memory(), self.epoch, name)), spill


def half_of(free_bytes: int, folder: str) -> int:
    """The bytes that a shard may hold in its folder, of the free ones. StorageFull: there is hardly any."""
    if free_bytes < MIN_FREE_BYTES:
        where = "shared memory" if folder.startswith("/dev/shm/") else "the disk"
        raise StorageFull(f"{where} is full: {folder}: {free_bytes:,} bytes are free; free space there")
    return free_bytes // 2


def _start(node: str, folder: str, spill: str | None) -> Any:
    """Start a shard's actor, which Ray restarts on its node if it is killed."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(node, soft=False)
    actor = ray.remote(Shard).options(num_cpus=0, max_restarts=-1, max_concurrency=8, scheduling_strategy=here)
    return actor.remote(folder, spill)

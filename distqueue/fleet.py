"""The shards of a queue, one a node: started, looked after, drained and ended. The ledger decides what lies where, the
shards copy; here one is told of the other."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ray

from distqueue.config import QueueOptions
from distqueue.core import QueueCore
from distqueue.payload.shard import Shard, memory_folder
from distqueue.segments import Segment
from distqueue.segments import Shard as ShardEntry
from distqueue.steps import GONE, RETRY_S, UNAVAILABLE

log = logging.getLogger(__name__)


class Home(NamedTuple):
    """Where a shard runs."""

    node: str
    actor: Any


class Fleet:
    """Runs in the queue's actor. `epoch` is in the names of this life's folders and files."""

    def __init__(self, core: QueueCore, options: QueueOptions, epoch: str) -> None:
        self.core, self.options, self.epoch = core, options, epoch
        self.shards: dict[str, Home] = {}

    async def add(self, node: str) -> str:
        """Starts a shard on a node, unless it has one; returns its name."""
        for name, home in self.shards.items():
            if home.node == node and not self.core.ledger.shards[name].leaving:
                return name
        name = f"shard-{node[:8]}"
        while name in self.core.ledger.shards:
            name += "+"
        folder, spill = self._folders(name)
        shard = _start(node, folder, spill)
        space = await shard.space.remote()  # and it has made its folder
        most = self.options.max_bytes or space // 2
        recycles = self.options.journal is None
        self.core.ledger.add_shard(ShardEntry(name, node, folder, most, recycles, spill))
        self.shards[name] = Home(node, shard)
        self.core.writers.serve(time.time())
        return name

    async def adopt(self) -> None:
        """Gives every segment that was found in the journal to a shard that sees its file."""
        segments = list(self.core.ledger.segments.values())
        missing = {segment.path for segment in segments}
        for name, home in self.shards.items():
            found = missing - set(await home.actor.missing.remote(sorted(missing)))
            for segment in segments:
                if segment.path in found:
                    self.core.ledger.adopted_by(segment.number, name)
            missing -= found
        if missing:
            lost = self.core.lose([s.number for s in segments if s.path in missing], "not found", time.time())
            log.error("%d segments of the journal are not on any node; %d samples are lost", len(missing), len(lost))
        kept = [segment.path for segment in self.core.ledger.segments.values()]
        for home in self.shards.values():
            await home.actor.keep_only.remote(kept, list(self.shards))

    async def copy_out(self, numbers: Iterable[int], target: Callable[[int], str]) -> None:
        """Copies segments, which are pinned, on disk by the end. RuntimeError: one is lost."""
        places = {number: self._place(number) for number in numbers}
        while places:
            gone = await self._copy([(number, *place, target(number)) for number, place in places.items()])
            now = {number: self._place(number) for number in gone}
            lost = [number for number, place in now.items() if place == places[number]]
            if lost:
                raise RuntimeError(f"segment {lost[0]} was lost from {places[lost[0]]} while it was copied")
            places = now  # these were moved meanwhile

    async def copy_in(self, folder: Path) -> None:
        """Copies all segments from a checkpoint to the shards, each to the emptiest. ValueError: one is not there."""
        ledger = self.core.ledger
        copies = []
        for segment in ledger.live:
            shard, source = ledger.shard_for(""), str(folder / segment.path)
            assert shard is not None
            ledger.moved(segment.number, shard.name, f"{shard.folder}/{self.epoch}-{segment.number}-restored")
            copies.append((segment.number, shard.name, source, segment.path))
        if missing := await self._copy(copies):
            raise ValueError(f"checkpoint={str(folder)!r}: segments {missing[:3]} are not there, or are others")

    async def _copy(self, copies: Sequence[tuple[int, str, str, str]]) -> list[int]:
        """Has (number, shard, path, target) copied by their shards; the numbers of those that are not there."""
        by_shard: dict[str, list[tuple[int, str, str]]] = {}
        for number, name, path, target in copies:
            by_shard.setdefault(name, []).append((number, path, target))
        found = await asyncio.gather(*(self._copy_at(name, files) for name, files in by_shard.items()))
        return [number for gone in found for number in gone]

    async def _copy_at(self, name: str, files: list[tuple[int, str, str]]) -> list[int]:
        while name in self.shards:
            try:
                return await self.shards[name].actor.copy.remote(files)
            except UNAVAILABLE:  # it is being started anew, and its files are there
                await asyncio.sleep(RETRY_S)
            except GONE:
                break
        return [number for number, _, _ in files]

    def _place(self, number: int) -> tuple[str, str]:
        segment = self.core.ledger.segments[number]
        return segment.shard, segment.path

    async def remove(self, node: str, settle: Callable[[], Awaitable[None]]) -> None:
        """Drains a node's shard to the others and ends it. `settle` makes each move durable."""
        ledger = self.core.ledger
        names = [name for name, home in self.shards.items() if home.node == node]
        if not names:
            nodes = sorted({home.node for home in self.shards.values()})
            raise ValueError(f"node {node!r}: it has no shard; shards are on {nodes}")
        for name in names:
            ledger.shards[name].leaving = True
            if ledger.shard_for(node) is None:
                ledger.shards[name].leaving = False
                raise ValueError(f"node {node!r} has the last shard of this queue")
        for name in names:
            while self.core.writers.revoke(name):
                pass
            await self._drain(name, settle)
            ledger.remove_shard(name)
            shard = self.shards.pop(name).actor
            await shard.end.remote()
            ray.kill(shard)

    async def find_dead(self, name: str) -> None:
        """A client could not reach a shard: if its process is gone for good, so is what it held."""
        if name not in self.shards:
            return
        try:
            await self.shards[name].actor.space.remote()
            return
        except UNAVAILABLE:  # it is being started anew, and its files are there
            return
        except GONE:
            pass
        numbers = [segment.number for segment in self.core.ledger.of_shard(name)]
        self.core.ledger.shards[name].leaving = True
        self.shards.pop(name, None)
        lost = self.core.lose(numbers, name, time.time())
        log.error("%s is gone with its node; %d samples are lost with it: %s", name, len(lost), lost[:3])

    async def find_lost(self, numbers: Sequence[int]) -> None:
        """A client did not find these segments where they are said to lie: those whose files are gone are lost."""
        known = self.core.ledger.segments
        for number in [number for number in numbers if number in known]:
            segment = known[number]
            home = self.shards.get(segment.shard)
            if home is None or await home.actor.holds.remote(number, segment.path) or number not in known:
                continue
            lost = self.core.lose([number], "not found", time.time())
            log.error("%s is gone or not what was written; %d samples are lost", segment.path, len(lost))

    async def spill(self, node: str, nbytes: int) -> bool:
        """Brings segments of a writer's full shard to disk, enough for a put of `nbytes`; whether that was possible."""
        ledger = self.core.ledger
        entry = ledger.shard_for(node)
        numbers = ledger.to_spill(entry.name, nbytes) if entry is not None and entry.spill else []
        if entry is None or not numbers:
            return False
        log.warning("shard %s is full: %d segments go to %s", entry.name, len(numbers), entry.spill)
        for number in numbers:
            segment = ledger.segments.get(number)
            if segment is None or segment.spilled:  # nobody wants it any more, or another put brought it there
                continue
            with ledger.pinned(number):
                target = f"{entry.spill}/{number}"
                await self.shards[entry.name].actor.spill.remote(number, segment.path, target)
                self.core.moved(number, entry.name, target, spilled=True)
        return True

    def discard(self, files: Iterable[tuple[str, str]]) -> None:
        """Has (shard, path) unlinked; nobody waits for it."""
        by_shard: dict[str, list[str]] = {}
        for shard, path in files:
            by_shard.setdefault(shard, []).append(path)
        for shard, paths in by_shard.items():
            if shard in self.shards:
                self.shards[shard].actor.discard.remote(paths)

    async def end(self) -> None:
        """Ends all shards, and their folders with them."""
        await asyncio.gather(*(home.actor.end.remote() for home in self.shards.values()), return_exceptions=True)

    async def _drain(self, name: str, settle: Callable[[], Awaitable[None]]) -> None:
        """Moves every segment of a leaving shard; writers that have reserved there come to their end first."""
        ledger = self.core.ledger
        while segments := ledger.of_shard(name):
            live = [segment for segment in segments if segment.live and not segment.dead]
            if not live:  # what is left is still being written, or copied for a checkpoint
                await asyncio.sleep(0.05)
                self.core.tick(time.time())
            for segment in live:
                if segment.number in ledger.segments:
                    await self._move(segment)
                    await settle()

    async def _move(self, segment: Segment) -> None:
        target = self.core.ledger.shard_for("")
        assert target is not None
        with self.core.ledger.pinned(segment.number):
            path = f"{target.folder}/{self.epoch}-{segment.number}-moved"
            contents = self.shards[segment.shard].actor.export.remote(segment.number, segment.path)
            await self.shards[target.name].actor.take_over.remote(path, contents, self.options.journal is not None)
            self.core.moved(segment.number, target.name, path)

    def _folders(self, name: str) -> tuple[str, str | None]:
        spill = None if self.options.spill is None else str(Path(self.options.spill) / self.epoch / name)
        if self.options.journal is not None:
            return str(Path(self.options.journal) / "segments" / name), spill
        return str(memory_folder(self.epoch, name)), spill


def _start(node: str, folder: str, spill: str | None) -> Any:
    """A shard's actor: killed, it is started anew on its node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        ray.remote(Shard)
        .options(
            num_cpus=0,
            max_restarts=-1,
            max_concurrency=8,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        )
        .remote(folder, spill)
    )

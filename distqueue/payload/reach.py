"""Payload as one process reaches it: files of its own node are mapped, what lies elsewhere is asked of its shard."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import ray

from distqueue.column import Column
from distqueue.messages import Delivery, File, Part, Place
from distqueue.packed import PackedBatch
from distqueue.payload.buffers import WarmBuffers
from distqueue.payload.gather import gather_columns
from distqueue.payload.mapped import Mapped
from distqueue.payload.segment_file import Contents, SegmentGone, Stretch
from distqueue.payload.wire import from_wire, to_wire
from distqueue.steps import ActorGone, Steps


class Payloads:
    """`ask(method, *args)`: steps that call the queue's actor. Thread-safe."""

    def __init__(self, ask: Callable[..., Steps[Any]]) -> None:
        self._ask = ask
        self._mapped, self._buffers = Mapped(), WarmBuffers()
        self._shards: dict[str, tuple[str, Any]] = {}
        """(node, actor) by name"""
        self._node = ""

    def here(self) -> str:
        """This process's node."""
        if not self._node:
            self._node = ray.get_runtime_context().get_node_id()
        return self._node

    def write(self, where: File, batch: PackedBatch, contents: Contents) -> Steps[None]:
        """Writes a batch where the queue says; on disk by the end where it says that, too. SegmentGone: the shard has
        left or is lost."""
        if where.node == self.here():
            file = self._mapped.writable(where.path, where.size)
            file.write(where.number, contents)
            if where.durable:
                file.sync()
            return
        header, frames = to_wire(batch.columns)
        actor = yield from self._shard(where.shard)
        try:
            yield partial(actor.write.remote, where.number, where.path, where.size, where.durable, header, *frames)
        except ActorGone:
            yield from self._lost(where.shard)

    def gather(self, delivery: Delivery) -> Steps[dict[str, Column]]:
        """The columns of a delivery in memory of this process's own. SegmentGone where something moved or ended."""
        sources, parts = yield from self._sources(delivery)
        found = gather_columns(parts, sources, self._buffers)
        self._mapped.check(place for place in delivery.places if self._is_here(place))
        return found

    def _sources(self, delivery: Delivery) -> Steps[tuple[list[dict[str, Stretch]], list[Part]]]:
        """Where the columns lie in this process, and the delivery's parts as runs of that. What lies on other nodes is
        asked for first, each shard once."""
        for place in delivery.places:
            yield from self._shard(place.shard)
        sources: list[dict[str, Stretch]] = [
            self._mapped.columns(place) if self._is_here(place) else {} for place in delivery.places
        ]
        parts = list(delivery.parts)
        elsewhere = sorted({place.shard for place in delivery.places if not self._is_here(place)})
        for shard in elsewhere:
            ours = np.array([place.shard == shard for place in delivery.places])
            asked = [Part(part.columns, part.runs[ours[part.runs[:, 0]]]) for part in delivery.parts]
            asked = [part for part in asked if len(part.runs)]
            actor = yield from self._shard(shard)
            places = [place for place, here in zip(delivery.places, ours.tolist(), strict=True) if here]
            try:
                answers = yield partial(actor.read.remote, places, [_renumbered(part, ours) for part in asked])
            except ActorGone:
                yield from self._lost(shard)
            by_columns = {part.columns: from_wire(*answer) for part, answer in zip(asked, answers, strict=True)}
            for i, part in enumerate(parts):
                if part.columns in by_columns:
                    parts[i] = Part(part.columns, _rerun(part.runs, ours, len(sources)))
                    sources.append(by_columns[part.columns])
        return sources, parts

    def _shard(self, name: str) -> Steps[Any]:
        if name not in self._shards:
            self._shards = yield from self._ask("where")
        if name not in self._shards:
            raise SegmentGone(f"shard {name!r} has left")
        return self._shards[name][1]

    def _lost(self, shard: str) -> Steps[Any]:
        self._shards = {}  # one that has left may have come back under its name
        yield from self._ask("shard_lost", shard)
        raise SegmentGone(f"shard {shard!r} is lost")

    def _is_here(self, place: Place) -> bool:
        return self._shards[place.shard][0] == self.here()


def _renumbered(part: Part, kept: np.ndarray) -> Part:
    """The part, its runs' sources numbered among those that are kept."""
    runs = part.runs.copy()
    runs[:, 0] = (np.cumsum(kept) - 1)[runs[:, 0]]
    return Part(part.columns, runs)


def _rerun(runs: np.ndarray, moved: np.ndarray, source: int) -> np.ndarray:
    """The same runs, where those of `moved` sources lie one after the other in a new one."""
    runs = runs.copy()
    here = moved[runs[:, 0]]
    sizes = runs[here, 2] - runs[here, 1]
    stops = np.cumsum(sizes)
    runs[here] = np.stack([np.full(len(sizes), source), stops - sizes, stops], axis=1)
    return runs

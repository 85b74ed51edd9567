"""A process's access to payload: files of its own node are mapped, those of other nodes are requested from a shard."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import ray

from distqueue.actor_calls import ActorGone, call
from distqueue.column import Column
from distqueue.messages import Delivery, DeliveryPart, File, SegmentPlace
from distqueue.payload.buffers import BufferPool
from distqueue.payload.columns import gather_columns
from distqueue.payload.gather import SourcesDamaged
from distqueue.payload.segment_file import Contents, Mapped, SegmentDamaged, SegmentGone, Stretch
from distqueue.payload.wire import DamagedInTransit, from_wire, to_wire


class PayloadAccess:
    """Read and write payload. `call(method, *args)` calls the queue's actor. Thread-safe."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._mapped, self._buffers = Mapped(), BufferPool()
        self._shards: dict[str, tuple[str, Any]] = {}
        """(node, actor) by name"""
        self._node = ""

    def here(self) -> str:
        """The node of this process."""
        if not self._node:
            self._node = ray.get_runtime_context().get_node_id()
        return self._node

    def write(self, file: File, columns: Mapping[str, Stretch], contents: Contents) -> None:
        """Write a put to a reserved or granted file; if that is durable, until it is on disk. `contents`: its columns
        laid out. SegmentGone: the shard was removed or is lost. StorageFull: there is no space for the file."""
        if file.node == self.here():
            self._mapped.write(file, contents)
            return
        header, frames = to_wire(columns)
        self._call_shard(file.shard, "write", file, header, *frames)

    def gather(self, delivery: Delivery) -> dict[str, Column]:
        """Copy the columns of a delivery into this process's memory. SegmentGone: a segment has moved or ended.
        SegmentDamaged: a checksum differs."""
        sources, parts = self._sources(delivery)
        try:
            columns = gather_columns(parts, sources, self._buffers)
        except SourcesDamaged as error:
            self._check(delivery)  # overwritten, not damaged
            raise SegmentDamaged([delivery.places[source].number for source in error.sources]) from None
        self._check(delivery)
        return columns

    def _check(self, delivery: Delivery) -> None:
        self._mapped.check(place for place in delivery.places if self._is_here(place))

    def _sources(self, delivery: Delivery) -> tuple[list[dict[str, Stretch]], list[DeliveryPart]]:
        """Map the columns of a delivery, after requesting those of other nodes, once per shard. Return the sources and
        the delivery's parts as runs of them."""
        for place in delivery.places:
            self._shard(place.shard)
        sources: list[dict[str, Stretch]] = [
            self._mapped.columns(place) if self._is_here(place) else {} for place in delivery.places
        ]
        parts = list(delivery.parts)
        elsewhere = sorted({place.shard for place in delivery.places if not self._is_here(place)})
        for shard in elsewhere:
            in_shard = np.array([place.shard == shard for place in delivery.places])
            remote = [DeliveryPart(part.columns, part.runs[in_shard[part.runs[:, 0]]]) for part in delivery.parts]
            remote = [part for part in remote if len(part.runs)]
            places = [place for place, inside in zip(delivery.places, in_shard.tolist(), strict=True) if inside]
            answers = self._call_shard(shard, "read", places, [_renumber(part, in_shard) for part in remote])
            try:
                by_columns = {
                    part.columns: from_wire(header, frames)
                    for part, (header, frames) in zip(remote, answers, strict=True)
                }
            except DamagedInTransit as error:
                raise SegmentGone(f"shard {shard!r}: {error}") from None
            for i, part in enumerate(parts):
                if part.columns in by_columns:
                    parts[i] = DeliveryPart(part.columns, _redirect(part.runs, in_shard, len(sources)))
                    sources.append(by_columns[part.columns])
        return sources, parts

    def _shard(self, name: str) -> Any:
        if name not in self._shards:
            self._shards = self._call("where")
        if name not in self._shards:
            raise SegmentGone(f"shard {name!r} was removed")
        return self._shards[name][1]

    def _call_shard(self, name: str, method: str, *args: Any) -> Any:
        actor = self._shard(name)
        try:
            return call(partial(getattr(actor, method).remote, *args))
        except ActorGone:
            self._shards = {}  # a removed shard may have been added again under its name
            self._call("ask_fleet", "find_dead", name)
            raise SegmentGone(f"shard {name!r} is lost") from None

    def _is_here(self, place: SegmentPlace) -> bool:
        return self._shards[place.shard][0] == self.here()


def _renumber(part: DeliveryPart, kept: np.ndarray) -> DeliveryPart:
    """Number the sources of a part's runs among those that are kept."""
    runs = part.runs.copy()
    runs[:, 0] = (np.cumsum(kept) - 1)[runs[:, 0]]
    return DeliveryPart(part.columns, runs)


def _redirect(runs: np.ndarray, moved: np.ndarray, source: int) -> np.ndarray:
    """Redirect the runs of `moved` sources to a new source, in which they lie one after the other."""
    runs = runs.copy()
    here = moved[runs[:, 0]]
    sizes = runs[here, 2] - runs[here, 1]
    stops = np.cumsum(sizes)
    runs[here] = np.stack([np.full(len(sizes), source), stops - sizes, stops], axis=1)
    return runs

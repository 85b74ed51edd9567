"""Keep the KV of suspended requests in pinned host memory until they are resumed.

    running ─ end of chunk, turn ─►┐
            ─ suspend, release_kv ─┴► park ─► host ─ claim ─► waiting ─ admitted: blocks taken ─► restore ─► running
              (`settle`, then the KV          │
              memory is released)             └─ forget: ended, resumed elsewhere, or resumed with other tokens

This is a cache, not state: no checkpoint contains it, and a request whose KV is missing is recomputed. Every rank parks
the whole blocks of its layers and heads; the rank that records routing also parks the routing.

Invariants (tests/inference/test_parked.py): ranks with the same schedule hold the same entries, as these depend only on
requests, tokens and block counts; an entry is restored at most once, and only for the tokens that it was parked with,
behind which there may be others; a host region is freed once, when no copy reads or writes it any more; KV is complete
on the host before its device memory is released."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fusion.inference import scheduler
from fusion.inference.blocks import BlockName
from fusion.inference.config import KVPoolConfig
from fusion.inference.kv_cache import KVCache
from fusion.inference.routing import RoutingCache


class HostMemory(Protocol):
    """A pool of host memory, pinned if the card supports it; implemented by `fusion.offload.HostPool`."""

    def take(self, sizes: Sequence[int]) -> list[torch.Tensor]: ...

    def give(self, regions: Iterable[torch.Tensor]) -> None: ...


@dataclass(eq=False)
class ParkedEntry:
    """KV of the first ``computed`` of a request's ``tokens``. ``names``: of its leading blocks, whose KV is all of
    policy version ``since``; ``copied``: the event after the last copy out of or into ``region``."""

    tokens: list[int]
    computed: int
    since: int
    names: list[BlockName]
    blocks: int
    region: torch.Tensor
    routing: torch.Tensor | None
    copied: Any


class ParkedKV:
    """Park the KV of one rank. ``memory``: where KV is parked; None: nothing is parked. ``routing``: the recorded
    routing of this rank, if any. ``max_blocks``: bound on the parked blocks, the same on all ranks of an attention
    rank; None: no bound."""

    def __init__(
        self,
        memory: HostMemory | None,
        cache: KVCache,
        routing: RoutingCache | None = None,
        max_blocks: int | None = None,
    ):
        self._cache, self._routing = cache, routing
        self._memory = memory
        self._max_blocks = 0 if memory is None else max_blocks
        self._entries: dict[str, ParkedEntry] = {}
        self._returning: list[ParkedEntry] = []
        """Restored entries whose regions are still being read"""
        self.blocks_copied_out = 0
        """Blocks copied to the host since construction"""

    def park(self, sequences: Iterable[scheduler.Sequence]) -> None:
        """Start copying the KV of running sequences to the host, in order up to the bound; set their `parked`. Their
        blocks may be released, but not written by another stream before `settle`.
        Raise RuntimeError: the host has no more memory to pin (`HostPool.take`); nothing was parked."""
        self._free_restored()
        chosen, blocks = [], self.blocks
        for seq in sequences:
            count = self._count(seq)
            if count and (self._max_blocks is None or blocks + count <= self._max_blocks):
                chosen.append(seq)
                blocks += count
        if not chosen:
            return
        regions = self._host.take([self._count(seq) * self._cache.block_bytes for seq in chosen])
        for seq, region in zip(chosen, regions, strict=True):
            assert seq.request.id not in self._entries, f"KV of request {seq.request.id!r} is parked already"
            self._entries[seq.request.id] = self._copy_out(seq, region)
            seq.parked = seq.computed

    def claim(self, seq: scheduler.Sequence) -> None:
        """Assign a submitted request's parked KV to its sequence if that begins with the same tokens; free it
        otherwise."""
        entry = self._entries.get(seq.request.id)
        if entry is None:
            return
        if entry.tokens == seq.tokens[: len(entry.tokens)]:
            seq.parked, seq.since, seq.names = entry.computed, entry.since, list(entry.names)
        else:
            self.forget([seq.request.id])

    def restore(self, restored: Iterable[tuple[scheduler.Sequence, int, int]]) -> None:
        """Queue the copies of a step's `EngineStep.restored` on the current stream, before its KV is read."""
        for seq, first, end in restored:
            entry = self._entries.pop(seq.request.id)
            assert end == entry.blocks and entry.computed <= len(seq.tokens)
            self._returning.append(entry)
            if first == end:
                continue  # all blocks are still in the cache
            self._cache.copy_in(self._on_host(entry), first, seq.blocks[first:end])
            entry.copied = self._event()
            if self._routing is not None and entry.routing is not None:
                self._routing.fill(seq.blocks, first, entry.routing)

    def forget(self, ids: Iterable[str]) -> None:
        """Free the parked KV of these requests; ids without any are ignored."""
        self.abandon(ids)

    def abandon(self, ids: Iterable[str]) -> None:
        """Free the KV on the host of requests that have ended; ids without any are ignored."""
        for id in ids:
            entry = self._entries.pop(id, None)
            if entry is not None:
                entry.copied.synchronize()
                self._host.give([entry.region])

    def settle(self) -> None:
        """Wait for all copies: afterwards the memory of the KV cache may be released."""
        for entry in (*self._entries.values(), *self._returning):
            entry.copied.synchronize()
        self._free_restored()

    @property
    def blocks(self) -> int:
        """Number of blocks parked now."""
        return sum(entry.blocks for entry in self._entries.values())

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory used by this rank's parked KV."""
        return self.blocks * self._cache.block_bytes

    def __contains__(self, id: str) -> bool:
        return id in self._entries

    def _count(self, seq: scheduler.Sequence) -> int:
        return -(-seq.computed // self._cache.block_size)

    def _copy_out(self, seq: scheduler.Sequence, region: torch.Tensor) -> ParkedEntry:
        count = self._count(seq)
        routing = self._routing.read(seq.blocks, 0, seq.computed) if self._routing is not None else None
        entry = ParkedEntry(
            tokens=list(seq.tokens),
            computed=seq.computed,
            since=seq.since,
            names=seq.names[: seq.named],
            blocks=count,
            region=region,
            routing=routing,
            copied=None,
        )
        self._cache.copy_out(seq.blocks[:count], self._on_host(entry))
        self.blocks_copied_out += count
        entry.copied = self._event()
        return entry

    def _on_host(self, entry: ParkedEntry) -> torch.Tensor:
        return entry.region.view(self._cache.dtype).view(self._cache.host_shape(entry.blocks))

    def _event(self) -> Any:
        device = self._cache.device
        event = device.event()
        event.record(device.current_stream())
        return event

    def _free_restored(self) -> None:
        done = [entry for entry in self._returning if entry.copied.query()]
        self._returning = [entry for entry in self._returning if entry not in done]
        for entry in done:
            self._host.give([entry.region])

    @property
    def _host(self) -> HostMemory:
        assert self._memory is not None
        return self._memory


def max_parked_blocks(config: KVPoolConfig, cache: KVCache, max_layers: int) -> int | None:
    """Return the number of blocks that a rank may park (None: no bound); the same on every stage, computed for a stage
    with ``max_layers``."""
    parks = config.suspended != "recompute"
    if not parks or config.max_parked_mib is None:
        return None if parks else 0
    return (config.max_parked_mib << 20) // (cache.block_bytes // cache.layers * max_layers)

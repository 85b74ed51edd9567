"""Keep the KV of requests that leave the engine where any engine of the machine continues them: in a pool of files.

    rank of engine A:  end of a chunk, suspend ─► park: card ─► host ─► file of this rank     KVStore: names, formats,
    rank of engine B:  submit ─► fetch: file ─► host, verified ─┐                             limits, and removes files
    all ranks of B:         agree: each has its own ────────────┴► parked ─► restored, as `parked.py` does
                                   one has not ─────────────────► recomputed

Each rank writes the heads and layers that it holds, and the rank that records routing the routing, too. When a request
is placed whose KV is in the pool (`Request.kv_tokens`), all ranks of its attention rank look for their files; they
agree in one exchange, so that all continue behind the KV or all compute it again. A file is used once: its reader
removes it, and the next chunk of the request has another. A file that is not on this machine is fetched from that of
the engine that has parked it (`Request.kv_engine`), where KV travels between machines (`KVPeers`).

Invariants (tests/inference/test_pooled.py): KV is used only for exactly the tokens and the policy version that it was
computed for, behind which there may be an observation (`Request.observation`); a file that is missing, damaged, or
another's is counted, and its request is recomputed on all ranks; new weights free all that a rank has parked and
fetched."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

import torch

from fusion.inference import scheduler
from fusion.inference.blocks import BlockName, extend_names, next_name, root_name
from fusion.inference.counters import Counters
from fusion.inference.kv_cache import KVCache
from fusion.inference.parked import HostMemory, ParkedEntry, ParkedKV
from fusion.inference.request import Request
from fusion.inference.routing import RoutingCache
from fusion.model import Mesh

log = logging.getLogger(__name__)

DAMAGED, MISSING, REMOTE, PULLED, HIT = range(5)
"""What a rank has found: the last three are KV that a rank of another machine has parked, another one of this machine,
or itself. Ranks agree on the smallest"""

PREFILL_SHARE = 0.5
"""Minimum prefill share of a step's tokens for the step to count as prefill"""


class KVDamaged(RuntimeError):
    """A file is not what was written for its request; the message names what differs."""


@dataclass(frozen=True)
class KVKey:
    """What a file of the pool holds. ``shard``: which part of which layers; ``request``: "" if any request may read it,
    any number of times; ``prefix``: name of the chain of all tokens under the policy version, in hexadecimal;
    ``num_tokens``: of them, the last one not computed yet included."""

    shard: str
    request: str
    version: int
    prefix: str
    num_tokens: int


class FoundKV(Protocol):
    """An open file of the pool, whose header is verified. ``routing``: shape of the routing in it, with the bytes of an
    element behind, () for none; ``own``: whether this rank wrote it."""

    computed: int
    kv_bytes: int
    routing: tuple[int, ...]
    own: bool

    def read(self, kv: torch.Tensor, routing: torch.Tensor | None) -> None:
        """Read the payload into contiguous tensors of its sizes, and verify it there.
        Raise KVDamaged: the checksum differs, or the file has ended."""

    def close(self) -> None: ...


class KVSource(Protocol):
    """Where KV is found: the files of this machine, or the pool of another one."""

    def find(self, key: KVKey) -> FoundKV | None:
        """Open the KV of this rank's part, of any writer; None: there is none, or it is not worth fetching.
        Raise KVDamaged: it is not of this user, or its header is not what was asked for."""


class KVPeers(Protocol):
    """The pools of other machines; implemented by `fusion.rollout.kv_pool.remote.RemotePools`."""

    def of(self, engine: int) -> Sequence[KVSource]:
        """Return those of the machines of an engine, which is numbered as in the run; each gives a file once."""

    def observe_prefill(self, tokens: int, seconds: float) -> None:
        """Record what a prefill has taken: KV that would take longer to fetch is not fetched."""


class KVStore(KVSource, Protocol):
    """The pool of one machine, as one rank sees it; implemented by `fusion.rollout.kv_pool.KVFiles`."""

    peers: KVPeers | None
    """Other machines; None: KV does not travel between machines"""
    takes_suspended: bool
    """Whether what a suspended engine had is continued elsewhere before the weights change; if not, its KV would be
    copied for nothing"""
    writer: Executor
    """A thread that may call `park`, too"""
    evictions: int
    """Files removed to make room, or for lack of space, since construction"""

    @property
    def nbytes(self) -> int:
        """Bytes in memory that this rank has parked."""

    def park(
        self, key: KVKey, *, computed: int, kv: torch.Tensor, routing: torch.Tensor | None, charged_bytes: int
    ) -> bool:
        """Write KV; return False if there is no place. ``charged_bytes``: counts against the limits."""

    def __contains__(self, key: KVKey) -> bool:
        """Return whether there is a file, of any writer."""

    def discard(self, key: KVKey) -> None:
        """Remove a file of any writer."""

    def forget(self, ids: Iterable[str]) -> None:
        """Remove what this rank has parked of these requests; ids without any are ignored."""

    def clear(self) -> None:
        """Remove all that this rank has parked."""

    def computed(self, id: str) -> int:
        """Return the number of tokens of the KV that this rank has parked of a request; 0: none."""


class PooledKV(ParkedKV):
    """Park the KV of one rank in the pool, and fetch it from there.
    ``memory``: host memory through which KV is copied.
    ``store``: None: this rank has no pool; it parks and finds nothing, and agrees with the others.
    ``max_blocks``: bound on the blocks fetched and not restored yet, the same on all ranks; None: no bound.
    ``charged_block_bytes``: of a block against the limits of the store, the same on all ranks.
    ``names_blocks``: whether restored blocks are shared by name.
    ``counters``: of this rank; `kv_pool_…` are counted here."""

    def __init__(
        self,
        memory: HostMemory,
        cache: KVCache,
        mesh: Mesh,
        *,
        store: KVStore | None,
        routing: RoutingCache | None,
        max_blocks: int | None,
        charged_block_bytes: int,
        names_blocks: bool,
        counters: Counters,
    ):
        super().__init__(memory, cache, routing, max_blocks)
        self.store, self._counters = store, counters
        self._peers = None if store is None else store.peers
        layout, axes = mesh.parallel, f"tp {mesh.tp_rank}/{mesh.parallel.tp}, dcp {mesh.parallel.dcp}"
        self._shard = f"{axes}, pp {mesh.pp_rank}/{layout.pp}, {cache.dtype}, {list(cache.host_shape(1))}"
        """Which part of which layers the KV is: the same on corresponding ranks of engines in one layout"""
        self._charged_block_bytes, self._names_blocks = charged_block_bytes, names_blocks

    def park(self, sequences: Iterable[scheduler.Sequence]) -> None:
        """Write the KV of running sequences to files. Their blocks may be released and written afterwards."""
        self._free_restored()
        for seq in sequences:
            count = self._count(seq)
            if count and self.store is not None:
                (region,) = self._host.take([count * self._cache.block_bytes])
                entry = self._copy_out(seq, region)
                entry.copied.synchronize()
                self._write(seq.request.id, entry)

    def suspend(self, running: Iterable[scheduler.Sequence], waiting: Iterable[scheduler.Sequence]) -> None:
        """Park what the running sequences have, and what was fetched for waiting ones, unless that would be of no
        use."""
        if self.store is None or not self.store.takes_suspended:
            self.abandon(list(self._entries))
            return
        self.park(running)
        for seq in waiting:
            if entry := self._entries.pop(seq.request.id, None):
                entry.copied.synchronize()
                self._write(seq.request.id, entry)

    def fetch(
        self,
        requests: Sequence[Request],
        sequences: Mapping[str, scheduler.Sequence],
        *,
        version: int,
        agree: Callable[[list[int]], list[int]],
    ) -> None:
        """Fetch the KV of a step's new requests that have some in the pool, for those that all ranks find; set their
        `parked`. Collective over the engine.
        ``requests``: the new ones of the whole engine.
        ``sequences``: by id, those that were placed on this attention rank.
        ``version``: the policy version of the weights.
        ``agree``: returns the smallest value over all ranks, of each place."""
        began = time.perf_counter()
        wanted = [request.id for request in requests if request.kv_tokens]
        if not wanted:
            return
        self._free_restored()
        fetched = [self._fetch(sequences[id], version) if id in sequences else HIT for id in wanted]
        for id, result in zip(wanted, agree(fetched), strict=True):
            if id in sequences:
                self._settle_fetch(sequences[id], result)
        if self.store is not None:
            self.store.forget(wanted)  # another attention rank has it now, or it is of no use
        self._counters.kv_pool_s += time.perf_counter() - began

    def observe_step(self, step: scheduler.EngineStep, seconds: float) -> None:
        """Record the seconds of a step, of which most is prefill."""
        prefill = sum(count for _, count in step.chunks)
        if (
            self._peers is not None
            and prefill >= PREFILL_SHARE * (prefill + len(step.decodes) + len(step.verified)) > 0
        ):
            self._peers.observe_prefill(prefill, seconds)

    def claim(self, seq: scheduler.Sequence) -> None:
        """Do nothing: KV is fetched, by all ranks at once."""

    def forget(self, ids: Iterable[str]) -> None:
        """Remove what this rank has written of these requests. What it has fetched stays: calls to forget come
        from the controller, which knows where files are left, and may be later than the request itself."""
        if self.store is not None:
            self.store.forget(ids)

    def clear(self) -> None:
        """Free everything: the weights are others."""
        self.abandon(list(self._entries))
        if self.store is not None:
            self.store.clear()

    @property
    def host_bytes(self) -> int:
        return super().host_bytes + (0 if self.store is None else self.store.nbytes)

    def computed(self, id: str) -> int:
        """Return the number of tokens of a request whose KV this rank has in the pool."""
        return 0 if self.store is None else self.store.computed(id)

    def __contains__(self, id: str) -> bool:
        return self.computed(id) > 0

    def _write(self, id: str, entry: ParkedEntry) -> None:
        """Write an entry to a file, and give its region back."""
        assert self.store is not None
        began = time.perf_counter()
        key, _ = self._key(id, entry.since, entry.tokens, entry.names)
        charged = entry.blocks * self._charged_block_bytes
        self.store.park(key, computed=entry.computed, kv=entry.region, routing=entry.routing, charged_bytes=charged)
        self._counters.kv_pool_evictions = self.store.evictions
        self._host.give([entry.region])
        self._counters.kv_pool_s += time.perf_counter() - began

    def _fetch(self, seq: scheduler.Sequence, version: int) -> int:
        """Read the KV of a sequence into an entry, verified; return what was found."""
        if self.store is None:
            return MISSING
        length, observation = len(seq.tokens), seq.request.observation
        # Until it has sampled behind an observation, it may be suspended with a part of that.
        for end in (length - observation, length) if observation else (length,):
            result = self._fetch_of(seq, seq.tokens[:end], version)
            if result != MISSING:
                return result
        return MISSING

    def _fetch_of(self, seq: scheduler.Sequence, tokens: list[int], version: int) -> int:
        """Read the KV of a sequence that was parked with these tokens."""
        assert self.store is not None
        key, names = self._key(seq.request.id, version, tokens, [])
        try:
            for source in self._sources(seq.request):
                if (entry := source.find(key)) is not None:
                    with closing(entry):
                        read = self._read(seq, tokens, entry, version=version, names=names)
                    return read if source is self.store or read < PULLED else REMOTE
            return MISSING
        except KVDamaged as error:
            log.warning(
                "KV of request %r is computed again: its file in the pool is damaged: %s", key.request, str(error)
            )
            return DAMAGED
        finally:
            self.store.discard(key)

    def _sources(self, request: Request) -> Iterator[KVSource]:
        """Yield where the KV of a request may be. Other machines are not asked for what there is no room for."""
        assert self.store is not None
        yield self.store
        if self._peers is None or request.kv_engine is None:
            return
        if (
            self._max_blocks is None
            or self.blocks + -(-request.kv_tokens // self._cache.block_size) <= self._max_blocks
        ):
            yield from self._peers.of(request.kv_engine)

    def _read(
        self, seq: scheduler.Sequence, tokens: list[int], entry: FoundKV, *, version: int, names: list[BlockName]
    ) -> int:
        self._check(entry, entry.computed)
        count = -(-entry.computed // self._cache.block_size)
        if self._max_blocks is not None and self.blocks + count > self._max_blocks:
            return MISSING
        routing = self._empty_routing(entry.computed)
        (region,) = self._host.take([entry.kv_bytes])
        try:
            entry.read(region, routing)
        except BaseException:
            self._host.give([region])
            raise
        self._entries[seq.request.id] = ParkedEntry(
            tokens=tokens,
            computed=entry.computed,
            since=version,
            names=names[: entry.computed // self._cache.block_size] if self._names_blocks else [],
            blocks=count,
            region=region,
            routing=routing,
            copied=self._event(),
        )
        return HIT if entry.own else PULLED

    def _check(self, entry: FoundKV, computed: int) -> None:
        """Raise KVDamaged: it is not KV of so many tokens on this rank, with routing where this rank records it."""
        cache, kv_bytes = self._routing, -(-computed // self._cache.block_size) * self._cache.block_bytes
        routing = () if cache is None else (computed, *cache.cell[1:], cache.dtype.itemsize)
        if (entry.computed, entry.kv_bytes, entry.routing) != (computed, kv_bytes, routing):
            had = f"{entry.computed} tokens, {entry.kv_bytes} bytes of KV, routing {entry.routing}"
            raise KVDamaged(f"it has {had}; expected {computed}, {kv_bytes}, {routing}")

    def _empty_routing(self, computed: int) -> torch.Tensor | None:
        """Return a tensor for the routing of so many tokens, None where this rank records none."""
        cache = self._routing
        return None if cache is None else torch.empty(computed, *cache.cell[1:], dtype=cache.dtype)

    def _settle_fetch(self, seq: scheduler.Sequence, result: int) -> None:
        entry, counters = self._entries.get(seq.request.id), self._counters
        if result >= REMOTE:
            assert entry is not None
            seq.parked, seq.since = entry.computed, entry.since
            seq.names = list(entry.names)
            counters.kv_pool_hits += result == HIT
            counters.kv_pool_pulls += result in (PULLED, REMOTE)
            counters.kv_pool_remote += result == REMOTE
            counters.kv_pool_bytes += entry.region.numel()
            return
        self.abandon([seq.request.id])
        counters.kv_pool_damaged += result == DAMAGED
        counters.kv_pool_misses += result == MISSING

    def _key(
        self, id: str, version: int, tokens: Sequence[int], names: Sequence[BlockName]
    ) -> tuple[KVKey, list[BlockName]]:
        """Return the key of a request's KV, and the names of its full blocks; ``names``: those known already."""
        size = self._cache.block_size
        chain = list(names)
        extend_names(chain, len(tokens) // size, version=version, tokens=tokens, size=size)
        tail = next_name(chain[-1] if chain else root_name(version), tokens[len(chain) * size :])
        return KVKey(self._shard, id, version, tail.hex(), len(tokens)), chain

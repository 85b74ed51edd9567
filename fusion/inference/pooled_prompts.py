"""Share the KV of prompts between the engines of a machine: files of its pool that are named by their content.

    rank of engine A:  prompt computed ─ offer ─► card ─► host ─ writer thread ─► file
    rank of engine B:  submit ─ pull: is there a file? ─ reader thread ─► host, verified ─┐
                                │                  others decode       all have read it ──┴► release: one sibling is
                                └ one rank has none, or a damaged one ─► computed          restored, the rest share it

The name is that of the prompt's last whole block under the policy version (`blocks.py`), so all siblings have it in
common. They wait beside the line (`WaitingLine.held`). The first one is then restored as if it had parked the prompt,
and the others find its blocks by name. A prompt of which fewer than ``pull_tokens`` are missing is computed, as that
costs less.

Invariants (tests/inference/test_pooled_prompts.py): responses are those of an engine that computes every prompt; blocks
are restored only where all ranks of the engine have read and verified theirs; new weights end all that is under way; a
request waits only for a file that was there when it came."""

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent import futures
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from fusion.inference.blocks import BlockName, extend_names
from fusion.inference.parked import ParkedEntry
from fusion.inference.pooled import KVDamaged, KVKey, KVStore, PooledKV
from fusion.inference.request import Request
from fusion.inference.scheduler import Scheduler
from fusion.inference.sequence import EngineStep, Sequence
from fusion.inference.waiting import WaitingLine

log = logging.getLogger(__name__)

DAMAGED, ABSENT, PENDING, READ = range(4)
"""How far a rank is with a prompt; ranks agree on the smallest"""

MAX_UNWRITTEN_BYTES = 256 << 20
"""Bound on the prompts that a rank has copied to the host and not written yet; further ones are not shared"""


@dataclass
class PromptWrite:
    """A prompt that is copied to ``region`` on the host, and then written by ``write`` in a thread."""

    region: torch.Tensor
    copied: Any
    write: Callable[[], bool]
    written: futures.Future[bool] | None = None


class PooledPrompts(PooledKV):
    """A `PooledKV` that shares prompts, too. ``pull_tokens``: minimum number of tokens that are shared."""

    def __init__(self, *args: Any, pull_tokens: int, **settings: Any):
        super().__init__(*args, **settings)
        self._pull_tokens = pull_tokens
        self._reader = futures.ThreadPoolExecutor(1, "kv-reader")
        self._writes: dict[KVKey, PromptWrite] = {}
        self._reads: dict[BlockName, tuple[ParkedEntry, futures.Future[int]]] = {}
        """Place to which a prompt is read, and the state of that, by its last block"""
        self._pulls: dict[str, list[BlockName]] = {}
        """Request → blocks of its prompt, the same requests on all ranks of the engine; []: this rank reads nothing"""

    def offer(self, step: EngineStep) -> None:
        """Begin to write the prompts of which a step has computed the last whole block, before its sequences end."""
        self._advance_writes()
        for seq, count in step.chunks:
            tokens = self._shared_tokens(seq.request)
            if self.store is None or not seq.computed < tokens <= seq.computed + count:
                continue
            key, names = self._key_of_prompt(seq, seq.since)
            nbytes, blocks = len(names) * self._cache.block_bytes, seq.blocks[: len(names)]
            unwritten = sum(write.region.numel() for write in self._writes.values())
            if key in self._writes or key in self.store or unwritten + nbytes > MAX_UNWRITTEN_BYTES:
                continue
            (region,) = self._host.take([nbytes])
            self._cache.copy_out(blocks, region.view(self._cache.dtype).view(self._cache.host_shape(len(names))))
            routing = None if self._routing is None else self._routing.read(blocks, 0, tokens)
            charged = len(names) * self._charged_block_bytes
            write = partial(self.store.park, key, computed=tokens, kv=region, routing=routing, charged_bytes=charged)
            self._writes[key] = PromptWrite(region, self._event(), write)

    def pull(self, requests: Iterable[Request], sequences: Mapping[str, Sequence], into: Scheduler) -> set[str]:
        """Begin to read the prompts of a step's new requests whose blocks the prefix cache does not have; return the
        requests that are held until `release`. ``requests``, ``sequences``: as of `fetch`."""
        self._free_restored()
        for request in requests:
            if not self._shared_tokens(request):
                continue
            seq, self._pulls[request.id] = sequences.get(request.id), []
            if seq is None or seq.parked:
                continue
            key, names = self._key_of_prompt(seq, into.version)
            if (len(names) - len(into.blocks.find(names))) * self._cache.block_size >= self._pull_tokens:
                self._pulls[request.id] = names
                if names[-1] not in self._reads and self.store is not None and key in self.store:
                    self._begin_read(self.store, key, names)
        return {id for id, names in self._pulls.items() if names}

    def release(self, line: WaitingLine[Sequence], agree: Callable[[list[int]], list[int]]) -> None:
        """Let the requests go that wait for a prompt no more: all ranks have read theirs, or one cannot. Collective
        over the engine."""
        if not self._pulls:
            return
        began, names_by_id = time.perf_counter(), dict[str, BlockName]()
        states = [self._state(names) for names in self._pulls.values()]
        for (id, names), own, state in zip([*self._pulls.items()], states, agree(states), strict=True):
            if state != PENDING:
                del self._pulls[id]
                self._counters.kv_pool_damaged += own == DAMAGED
                if state == READ and names:
                    names_by_id[id] = names[-1]
        for seq in line.release(lambda seq: not self._pulls.get(seq.request.id)):
            if read := self._reads.pop(names_by_id.get(seq.request.id, b""), None):
                entry = self._entries[seq.request.id] = read[0]
                entry.tokens, seq.parked, seq.since = [*seq.tokens], entry.computed, entry.since
                self._counters.kv_pool_prompts += 1
                self._counters.kv_pool_bytes += entry.region.numel()
        self._end_reads()
        self._counters.kv_pool_s += time.perf_counter() - began

    def wait(self) -> None:
        """Wait for a file, but briefly: other ranks may want to step with this one, which has nothing else to do."""
        futures.wait([state for _, state in self._reads.values()], 0.002, futures.FIRST_COMPLETED)

    def suspend(self, running: Iterable[Sequence], waiting: Iterable[Sequence]) -> None:
        self._pulls.clear()
        self._end_reads()
        super().suspend(running, waiting)

    def settle(self) -> None:
        for one in self._writes.values():
            one.copied.synchronize()
        super().settle()
        self._advance_writes()

    def clear(self) -> None:
        self._pulls.clear()
        self._end_reads()
        for one in self._writes.values():
            one.copied.synchronize()
            if one.written is not None and not one.written.cancel():
                one.written.result()
            self._host.give([one.region])
        self._writes.clear()
        super().clear()

    @property
    def blocks(self) -> int:
        return super().blocks + sum(entry.blocks for entry, _ in self._reads.values())

    def _begin_read(self, store: KVStore, key: KVKey, names: list[BlockName]) -> None:
        count, tokens = len(names), key.num_tokens - 1
        if self._max_blocks is None or self.blocks + count <= self._max_blocks:
            (region,), routing = self._host.take([count * self._cache.block_bytes]), self._empty_routing(tokens)
            entry = ParkedEntry([], tokens, key.version, names, count, region, routing, self._event())
            read = partial(self._read_prompt, store, key, region, routing)
            self._reads[names[-1]] = entry, self._reader.submit(read)

    def _read_prompt(self, store: KVStore, key: KVKey, kv: torch.Tensor, routing: torch.Tensor | None) -> int:
        """Read a file and verify it, in a thread."""
        try:
            if (entry := store.find(key)) is None:
                return ABSENT
            with closing(entry):
                self._check(entry, key.num_tokens - 1)
                entry.read(kv, routing)
            return READ
        except KVDamaged as error:
            log.warning("A prompt is computed again: its file in the pool is damaged: %s", str(error))
            return DAMAGED

    def _state(self, names: list[BlockName]) -> int:
        if not names:
            return READ
        _, state = self._reads.get(names[-1], (None, None))
        return ABSENT if state is None else state.result() if state.done() else PENDING

    def _end_reads(self) -> None:
        """Return the host memory of prompts that no request waits for. Of a damaged file nothing is left, so that it
        is written again, instead of being read for each request."""
        for name in self._reads.keys() - {names[-1] for names in self._pulls.values() if names}:
            entry, state = self._reads.pop(name)
            if not state.cancel() and state.result() == DAMAGED and self.store is not None:
                self.store.discard(KVKey(self._shard, "", entry.since, name.hex(), entry.computed + 1))
            self._host.give([entry.region])

    def _advance_writes(self) -> None:
        """Give what has been copied to the writer, and return the host memory of what has been written."""
        for key, one in [*self._writes.items()]:
            if one.written is None and one.copied.query():
                assert self.store is not None
                one.written = self.store.writer.submit(one.write)
            elif one.written is not None and one.written.done():
                del self._writes[key]
                self._host.give([one.region])
                one.written.result()

    def _shared_tokens(self, request: Request) -> int:
        """Return the number of tokens in a prompt's whole blocks, 0: too few. The last token is always computed."""
        tokens = (len(request.prompt) - 1) // self._cache.block_size * self._cache.block_size
        return tokens if self._names_blocks and tokens >= self._pull_tokens else 0

    def _key_of_prompt(self, seq: Sequence, version: int) -> tuple[KVKey, list[BlockName]]:
        """Return the key of a prompt's file, and the names of its whole blocks."""
        size, tokens = self._cache.block_size, self._shared_tokens(seq.request)
        extend_names(seq.names, tokens // size, version=version, tokens=seq.tokens, size=size)
        names = seq.names[: tokens // size]
        return KVKey(self._shard, "", version, names[-1].hex(), tokens + 1), names

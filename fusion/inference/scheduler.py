"""Which tokens the next step of one attention rank computes. Pure state transitions: no tensor, no clock, no process.

    add ──► waiting ──admit──► running: prefill in chunks ──► decode one token a step, ──► finished
               ▲                  │                           or verify a draft
               └──── preempt ─────┘   newest first; its blocks are released, its tokens stay and are computed again

A sequence whose KV is parked on the host (`parked.py`) is admitted with all its blocks at once; the step lists which of
them to fill, and the sequence continues behind them.

Policy: decodes first, then prefills that have begun, then waiting requests in order (`waiting.py`: by priority, of one
priority first come, first served) as far as tokens and sequences allow, and blocks for all of their tokens. Where a
running sequence finds no block, the newest is preempted. Siblings that are admitted in one step compute their prompt
once: full blocks are found by name, and the rows behind them also fill the last block of those that share their
prefill.

Invariants: a step computes at most ``max_batch_tokens`` tokens of at most ``max_seqs`` sequences; a sequence's blocks
cover its computed tokens; the oldest running sequence always makes progress, so every request that fits the cache alone
finishes; every added request ends exactly once; a block is named only by a sequence all of whose KV is of the version
in the name, so KV of older weights is never found under a newer version."""

from array import array
from collections.abc import Callable
from typing import Any

from fusion.inference.blocks import BlockManager, extend_names
from fusion.inference.counters import Counters
from fusion.inference.request import CONTINUED, FinishReason, Output, Request
from fusion.inference.sequence import EngineStep, RecordedRouting, Sequence
from fusion.inference.stop_strings import StopStrings
from fusion.inference.verification import Drafter, Verification, plan_verifications
from fusion.inference.waiting import WaitingLine


class Scheduler:
    """Schedule the requests of one attention rank."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_seqs: int,
        max_batch_tokens: int,
        prefix_cache: bool = True,
        counters: Counters | None = None,
    ):
        self.blocks, self.max_seqs, self.max_batch_tokens = blocks, max_seqs, max_batch_tokens
        self.prefix_cache = prefix_cache
        self.version = 0
        self.waiting: WaitingLine[Sequence] = WaitingLine()
        self.running: list[Sequence] = []
        self.counters = counters or Counters()
        self.routing: RecordedRouting | None = None
        """None: routing is not recorded"""
        self.stop_strings: StopStrings | None = None
        """Strings that end a response, unless its length is exact"""
        self.drafter: Drafter | None = None
        """Proposes what running sequences continue with; None: each decodes one token a step"""
        self.on_chunk_end: Callable[[Sequence], None] = lambda seq: None
        """Called with a sequence whose chunk or turn ends, before its blocks are released"""

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def schedule(self) -> EngineStep:
        """Return the next step and allocate its blocks; `commit` must follow."""
        budget, preemptions = self.max_batch_tokens, self.counters.preemptions
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        restored: list[tuple[Sequence, int, int]] = []
        shared_prefill: list[tuple[Sequence, Sequence]] = []
        size = self.blocks.block_size
        for seq in list(self.running):
            blocks, length = seq.blocks, len(seq.tokens)
            if not blocks:
                continue  # preempted by an earlier sequence of this loop
            if seq.computed + 1 < length:
                prefills.append(seq)
            elif length <= len(blocks) * size or self._may_grow(seq, 1):  # the former is most often so, and cheaper
                decodes.append(seq)
        budget -= len(decodes)
        for seq in prefills:
            count = min(len(seq.tokens) - seq.computed, budget)
            if count > 0 and seq.blocks and self._may_grow(seq, count):
                chunks.append((seq, count))
                budget -= count
        if self.counters.preemptions == preemptions:
            shared_prefill = self._admit(chunks, budget, restored)
        else:
            decodes = [seq for seq in decodes if seq.blocks]
        verified: list[Verification] = []
        if self.drafter is not None and decodes:
            room = self.max_batch_tokens - len(decodes) - sum(count for _, count in chunks)
            verified = plan_verifications(decodes, self.drafter, self.blocks, max_tokens=room)
            if verified:
                with_draft = {id(draft.seq) for draft in verified}
                decodes = [seq for seq in decodes if id(seq) not in with_draft]
        return EngineStep(
            decodes=decodes,
            chunks=chunks,
            sampled=[
                *decodes,
                *(seq for seq, n in chunks if seq.computed + n == len(seq.tokens)),
                *(seq for seq, _ in shared_prefill),
            ],
            restored=restored,
            verified=verified,
            copied=[pair for draft in verified for pair in draft.copies(size)],
            shared_prefill=shared_prefill,
        )

    def commit(
        self, step: EngineStep, tokens: list[int], logprobs: list[float], kept: list[bytes] | None = None
    ) -> list[Output]:
        """Append the sampled tokens, one for each of ``step.drawn``, with what `Sampled` records of them; return the
        outputs of requests that ended."""
        size = self.blocks.block_size
        for seq, count in step.chunks:
            seq.computed += count
        for seq, _ in step.shared_prefill:
            seq.computed = len(seq.tokens)
        for seq in step.decodes:
            computed = seq.computed = seq.computed + 1
            if computed % size == 0 and self.prefix_cache:
                self._name_full(seq, computed)
        outputs = []
        single = len(step.sampled)
        kept = [b""] * len(tokens) if kept is None else kept
        columns = tokens[:single], logprobs[:single], kept[:single]
        for seq, token, logprob, ids in zip(step.sampled, *columns, strict=True):
            if reason := seq.append(token, logprob, self.version, kept=ids, stop_strings=self.stop_strings):
                outputs.append(self._end(seq, reason))
        self.counters.generated_tokens += single
        self.counters.decoded_sequences += len(step.decodes) + len(step.verified)
        verified: list[tuple[Verification, list[int]]] = []
        for one in step.verified:
            rows = slice(single, single := single + len(one))
            kept_rows, reason = self._keep(one, tokens[rows], logprobs[rows], kept[rows])
            verified.append((one, kept_rows))
            if reason:
                outputs.append(self._end(one.seq, reason))
        if self.drafter is not None and verified:
            self.drafter.observe(verified)
        if outputs:
            self.running = [seq for seq in self.running if seq.blocks]
        return outputs

    def _keep(
        self, one: Verification, sampled: list[int], logprobs: list[float], kept_ids: list[bytes]
    ) -> tuple[list[int], FinishReason | None]:
        """Append the tokens of a draft's path as far as they were sampled, and the one behind them; the sequence takes
        over the blocks of that path. Return the rows that were kept, and why the sequence ends, or None."""
        seq, kept, reason = one.seq, one.follow(sampled), None
        if len(one.paths) > 1:
            path = one.path_of(kept[-1])
            seq.blocks = one.table(path)
            self.blocks.release([block for tail in one.tails[:path] + one.tails[path + 1 :] for block in tail])
        for row in kept:
            ids, stops = kept_ids[row], self.stop_strings
            reason = seq.append(sampled[row], logprobs[row], self.version, kept=ids, stop_strings=stops)
            if reason:
                break
        before, seq.computed = seq.computed, len(seq.tokens) - 1
        used = -(-seq.computed // self.blocks.block_size)
        self.blocks.release(seq.blocks[used:])
        del seq.blocks[used:]
        # Only now: what was not kept must not be found by name.
        if self.prefix_cache:
            self._name_full(seq, seq.computed)
        seq.noise = []
        self.counters.generated_tokens += seq.computed - before
        self.counters.drafted_tokens += len(one) - 1
        self.counters.accepted_tokens += seq.computed - before - 1
        return kept[: seq.computed - before], reason

    def abort(self, chosen: Callable[[Request], bool]) -> list[Output]:
        """End the requests for which ``chosen`` holds; return their outputs, tokens included."""
        ended = [seq for seq in self.running if chosen(seq.request)]
        gone = set(map(id, ended))
        self.running = [seq for seq in self.running if id(seq) not in gone]
        ended += self.waiting.remove(lambda seq: chosen(seq.request))
        return [self._end(seq, "abort") for seq in ended]

    def restart(self, blocks: BlockManager | None = None, version: int | None = None) -> None:
        """Drop all KV (new weights, memory released): running sequences wait again, in front, with their tokens. With
        new weights, KV on the host is dropped, too; the caller frees it."""
        for seq in reversed(self.running):
            self._withdraw(seq)
        self.running = []
        if version is not None:
            self.version = version
            self.waiting.release(lambda seq: True)
            for seq in self.waiting:
                seq.parked = 0
        self.blocks.forget()
        self.blocks = blocks or self.blocks
        self._forget_names()

    def change_version(self, version: int) -> None:
        """Keep the KV over new weights: running sequences continue on it, and no other finds any of it by name."""
        self.version = version
        self.blocks.forget()
        self._forget_names()

    def _forget_names(self) -> None:
        for seq in self.waiting:
            if not seq.parked:
                seq.names.clear()

    def _admit(
        self, chunks: list[tuple[Sequence, int]], budget: int, restored: list[tuple[Sequence, int, int]]
    ) -> list[tuple[Sequence, Sequence]]:
        """Admit waiting requests; return those whose tokens another computes in this step, and the other."""
        size = self.blocks.block_size
        shared_prefill: list[tuple[Sequence, Sequence]] = []
        complete: dict[tuple[Any, ...], Sequence] = {}
        while self.waiting and budget > 0 and len(self.running) < self.max_seqs:
            seq = self.waiting.first
            hits = self.blocks.find(seq.names) if seq.parked else self._find_prefix(seq)
            start = seq.parked or len(hits) * size
            computing = None if seq.parked or not complete else complete.get(_end_behind(seq, len(hits), size))
            count = len(seq.tokens) - start if computing else min(len(seq.tokens) - start, budget)
            # All of it must fit: a prefill that ends in mid-way for want of blocks would begin again. One block is
            # reserved for each running sequence, so that the new one is not preempted at once.
            wanted = -(-len(seq.tokens) // size) - len(hits)
            if wanted + self.blocks.idle(hits) + len(self.running) > self.blocks.available and self.running:
                return shared_prefill
            self.waiting.popleft()
            self.running.append(seq)
            self.blocks.share(hits)
            seq.blocks = array("q", hits)
            seq.computed = start
            seq.named = len(hits)
            if seq.parked:
                restored.append(self._take_back(seq))
            else:
                seq.since = self.version
                self.counters.prefix_hit_tokens += start
                self.counters.recomputed_tokens += 0 if computing else max(0, seq.known - start)
            grown = self._may_grow(seq, count)
            assert grown
            if computing:
                self.counters.prefix_hit_tokens += count
                shared_prefill.append((seq, computing))
                continue
            chunks.append((seq, count))
            budget -= count
            whole = (len(seq.tokens) - 1) // size
            computes_end = start <= whole * size and start + count == len(seq.tokens)  # parked KV may end behind it
            if self.prefix_cache and seq.since == self.version and computes_end:
                self._extend_names(seq, whole)
                complete[_end_behind(seq, whole, size)] = seq
        return shared_prefill

    def _take_back(self, seq: Sequence) -> tuple[Sequence, int, int]:
        """Allocate the blocks of parked KV that no sibling has restored before; return which are to be filled."""
        first, end = len(seq.blocks), -(-seq.parked // self.blocks.block_size)
        seq.blocks.extend(self.blocks.take(end - first))
        for block, name in zip(seq.blocks[first:], seq.names[first:], strict=False):
            self.blocks.name(block, name)
        seq.named = len(seq.names)
        self.counters.kv_restored_tokens += seq.parked
        seq.parked = 0
        return seq, first, end

    def _find_prefix(self, seq: Sequence) -> list[int]:
        """Find cached blocks of the sequence's beginning. The last token is always computed: its logits are needed."""
        if not self.prefix_cache:
            return []
        whole = (len(seq.tokens) - 1) // self.blocks.block_size
        self._extend_names(seq, whole)
        return self.blocks.find(seq.names[:whole])

    def _may_grow(self, seq: Sequence, count: int) -> bool:
        """Allocate blocks for ``count`` more tokens, preempting the newest sequences, in the end this one itself."""
        end = seq.computed + count
        wanted = -(-end // self.blocks.block_size) - len(seq.blocks)
        if wanted > 0:
            while wanted > self.blocks.available:
                victim = self.running.pop()
                self._withdraw(victim)
                self.counters.preemptions += 1
                if victim is seq:
                    assert self.running, "a sequence that fits the cache alone finds no block in it"
                    return False
            seq.blocks.extend(self.blocks.take(wanted))
        if self.prefix_cache:
            self._name_full(seq, end)
        return True

    def _name_full(self, seq: Sequence, end: int) -> None:
        """Name the blocks that are full once ``end`` tokens are computed. For a chunk that is when it is scheduled, so
        that siblings in the same step share them: a layer writes all KV of a step before it reads any."""
        size = self.blocks.block_size
        if seq.since != self.version or end // size <= seq.named:
            return
        self._extend_names(seq, end // size)
        for i in range(seq.named, end // size):
            self.blocks.name(seq.blocks[i], seq.names[i])
        seq.named = end // size

    def _extend_names(self, seq: Sequence, count: int) -> None:
        extend_names(seq.names, count, version=self.version, tokens=seq.tokens, size=self.blocks.block_size)

    def _withdraw(self, seq: Sequence) -> None:
        if seq.logprobs:
            seq.keep_routing(self.routing)
        self.blocks.release(seq.blocks)
        seq.known = max(seq.known, seq.computed)
        if seq.parked:
            del seq.names[seq.named :]  # of blocks that are not full, or hold KV of newer weights, too
        elif seq.since != self.version:
            seq.names.clear()
        seq.blocks, seq.computed, seq.named = array("q"), 0, 0
        self.waiting.appendleft(seq)

    def _end(self, seq: Sequence, reason: FinishReason) -> Output:
        output = seq.output(reason, self.routing)
        if self.drafter is not None:
            self.drafter.end(seq)
        if reason in CONTINUED:
            self.on_chunk_end(seq)
        self.blocks.release(seq.blocks)
        seq.blocks = array("q")
        return output


def _end_behind(seq: Sequence, whole: int, size: int) -> tuple[Any, ...]:
    """Return the name of a sequence's first ``whole`` blocks and the tokens behind them: equal keys mean equal
    tokens."""
    return (*seq.names[:whole][-1:], *seq.tokens[whole * size :])

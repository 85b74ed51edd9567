"""Schedule the requests of one attention rank in virtual time, by the rules of `fusion/inference/scheduler.py`.

    submit ──► waiting ──plan──► running: prefill in chunks ──join──► decode one token a step ──leave──► ended
                  ▲                 │
                  └─────preempt─────┘   newest first; its tokens stay and are computed again

A step is numbered by the steps of the engine before it. Between two changes of the running sequences those that decode
advance by a constant number of tokens a step (`Decoding`), so nothing here visits them.

As in the scheduler: decodes first, then prefills that have begun, then waiting requests while tokens, sequences and KV
blocks allow; a request admitted beside a sibling that computes the same prompt computes nothing itself.

Not modelled: which block is evicted. A prompt or a suspended request counts as cached until as many tokens have been
computed as were free when the last holder left it.

Cost, for w waiting requests: O(log w) for each request that begins, O(1) for each that ends."""

from collections.abc import Iterator
from math import inf

from fusion.costmodel.pace import StepSums
from fusion.costmodel.roofline import attention_pairs
from fusion.inference.config import EngineConfig
from fusion.inference.waiting import WaitingLine
from stalesync.simulator.decoding import Decoding
from stalesync.simulator.sequence import Cached, PrefillPlan, SimulatedSequence


class Rank:
    """One attention rank. ``orders``: numbers the sequences of all ranks as they begin to decode."""

    def __init__(self, limits: EngineConfig, orders: Iterator[int]) -> None:
        self.limits, self._orders = limits, orders
        self.waiting: WaitingLine[SimulatedSequence] = WaitingLine()
        self.running: dict[SimulatedSequence, None] = {}
        """Sequences in order of admission"""
        self.prefilling: dict[SimulatedSequence, None] = {}
        self.decodes = Decoding(limits.block_size)
        self.prefilled_tokens = self.preemptions = 0
        self._other_blocks = 0
        """Blocks of prefilling sequences, minus those counted more than once"""
        self._reserved_tokens = 0
        """Tokens of the running sequences at their ends, in whole blocks"""
        self._cached: dict[str, Cached] = {}

    @property
    def unfinished(self) -> int:
        return len(self.waiting) + len(self.running)

    def plan(self, step: int) -> PrefillPlan:
        """Begin prefills and waiting requests as far as there is room; return what step number ``step`` computes
        beside its decodes. `finish` must follow."""
        plan = PrefillPlan(preempted=self._make_room(step))
        budget = self.limits.max_batch_tokens - self.decodes.num
        for seq in list(self.prefilling):
            count = min(seq.length - seq.computed, budget)
            if count <= 0:
                continue
            if self._used(step) + self._blocks(seq.computed + count) - self._blocks(seq.computed) > self._capacity:
                self._preempt(seq, step)
                plan.preempted = True
                continue
            if seq.computed + 1 == seq.length:
                plan.last.append(seq)
            else:
                plan.chunks.append((seq, count))
            self._grow(seq, count)
            budget -= count
        if not plan.preempted:
            self._admit(plan, budget, step)
        return plan

    def sums(self, plan: PrefillPlan, step: int) -> StepSums:
        """Return what the cost of the planned step depends on."""
        ending = [seq for seq, count in plan.chunks if seq.computed + count == seq.length] + plan.shared_prefill
        contexts, drafted = self.decodes.contexts(step), self.decodes.drafted
        return StepSums(
            decodes=self.decodes.num + len(plan.last),
            contexts=contexts + sum(seq.length for seq in plan.last),
            first_tokens=len(ending),
            first_contexts=sum(seq.length for seq in ending),
            prefill_tokens=sum(count for _, count in plan.chunks) + drafted * self.decodes.num,
            attended=sum(attention_pairs(count, seq.computed) for seq, count in plan.chunks)
            + drafted * contexts
            + self.decodes.num * attention_pairs(drafted),
        )

    def finish(self, plan: PrefillPlan, step: int, version: int) -> list[SimulatedSequence]:
        """End the planned step, after which there were ``step``; return the sequences that have their first token:
        each decodes from now on."""
        for seq, count in [*((seq, 1) for seq in plan.last), *plan.chunks]:
            seq.computed += count
            self.prefilled_tokens += count
        joined = [*plan.last, *(seq for seq, _ in plan.chunks if seq.computed == seq.length), *plan.shared_prefill]
        for seq in joined:
            self._join(seq, step, version)
        return joined

    def leave(self, seq: SimulatedSequence, step: int) -> None:
        """Remove a running sequence after ``step`` steps."""
        del self.running[seq]
        if seq.decoding:
            seq.length = self.decodes.remove(seq, step)
            seq.computed = seq.length - 1
        else:
            self.prefilling.pop(seq, None)
            self._other_blocks -= self._blocks(seq.computed)
        self._reserved_tokens -= self._blocks(seq.limit) * self.limits.block_size
        self._release(seq, step)

    def keep_cached(self, seq: SimulatedSequence, step: int) -> None:
        """Record that the blocks of a sequence that has left stay in the cache, until they are evicted."""
        self._cached[seq.request.id] = Cached(seq.computed // self.limits.block_size, expires=self._expiry(step))

    def withdraw(self, seq: SimulatedSequence, step: int) -> None:
        """Return a running sequence to the front of the waiting ones, with its tokens and without KV."""
        self.leave(seq, step)
        seq.computed = seq.parked = 0
        self.waiting.appendleft(seq)

    def restart(self, step: int) -> None:
        """Drop all KV, as the weights are new: running sequences wait again, in front."""
        for seq in reversed(list(self.running)):
            self.withdraw(seq, step)
        for seq in self.waiting:
            seq.parked = 0
        self.forget_prefixes()

    def forget_prefixes(self) -> None:
        """Forget what is cached, as new weights were adopted. What running sequences share stays theirs, and count
        once for each from now on."""
        for seq in self.running:
            self._other_blocks += seq.shared
            seq.shared = 0
        self._cached.clear()

    def _make_room(self, step: int) -> bool:
        """Withdraw the newest sequences until the decodes of the step find blocks. Return whether there were any."""
        before = self.preemptions
        while self._used(step) > self._capacity and len(self.running) > 1:
            self._preempt(next(reversed(self.running)), step)
        return self.preemptions > before

    def _preempt(self, seq: SimulatedSequence, step: int) -> None:
        self.withdraw(seq, step)
        self.preemptions += 1

    @property
    def overcommitted(self) -> bool:
        """Whether the running sequences do not all fit the KV cache at their ends."""
        tokens = self.limits.max_kv_tokens
        return tokens is not None and self._reserved_tokens > tokens

    def steps_until_full(self, step: int, most: int) -> int:
        """Return the number of steps from number ``step`` on, at most ``most``, for which decodes find blocks."""
        capacity = self._capacity
        if self._used(step + most - 1) <= capacity:
            return most
        low, high = 0, most  # it holds for `low` steps, and not for `high`
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self._used(step + middle - 1) <= capacity else (low, middle)
        return low

    @property
    def _capacity(self) -> float:
        tokens = self.limits.max_kv_tokens
        return inf if tokens is None else tokens // self.limits.block_size

    def _used(self, step: int) -> int:
        """Count the blocks held in step number ``step``."""
        return self.decodes.used(step) + self._other_blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.limits.block_size)

    def _grow(self, seq: SimulatedSequence, count: int) -> None:
        end = seq.computed + count
        self._other_blocks += self._blocks(end) - self._blocks(seq.computed)
        self._name(seq, end)

    def _admit(self, plan: PrefillPlan, budget: int, step: int) -> None:
        computing: set[tuple[str, int]] = set()
        decoding = self.decodes.used(step)  # none joins or leaves
        while self.waiting and budget > 0 and len(self.running) < self.limits.max_seqs:
            seq = self.waiting.first
            start = seq.parked or self._find(seq)
            twin = not seq.parked and (seq.request.group, seq.length) in computing
            count = seq.length - start if twin else min(seq.length - start, budget)
            wanted = self._blocks(seq.length) - self._held(seq, start)
            if wanted + len(self.running) > self._capacity - decoding - self._other_blocks and self.running:
                return
            self.waiting.popleft()
            self.running[seq] = None
            plan.restored += self._blocks(seq.parked)
            seq.computed, seq.parked = start, 0
            self._other_blocks += self._blocks(start + count)
            self._reserved_tokens += self._blocks(seq.limit) * self.limits.block_size
            self._hold(seq, start)
            self._name(seq, start + count)
            if twin:
                plan.shared_prefill.append(seq)
                seq.computed = seq.length
                continue
            self.prefilling[seq] = None
            plan.chunks.append((seq, count))
            budget -= count
            if self.limits.prefix_cache and start + count == seq.length == seq.prompt_tokens:
                computing.add((seq.request.group, seq.length))

    def _join(self, seq: SimulatedSequence, step: int, version: int) -> None:
        self.prefilling.pop(seq, None)
        self._other_blocks -= self._blocks(seq.length)
        seq.length += 1
        seq.first_version = version if seq.first_version is None else seq.first_version
        seq.order = next(self._orders)
        self.decodes.add(seq, step)

    # The prefix cache

    def _find(self, seq: SimulatedSequence) -> int:
        """Return the number of cached tokens of a sequence's beginning; the last token is always computed."""
        if not self.limits.prefix_cache:
            return 0
        whole = (seq.length - 1) // self.limits.block_size
        valid = [self._valid(key) for key in (seq.request.group, seq.request.id)]
        return min(whole, max(valid)) * self.limits.block_size

    def _valid(self, key: str) -> int:
        """Return the number of cached blocks under a key."""
        cached = self._cached.get(key)
        if cached is None:
            return 0
        if not cached.holders and cached.expires <= self.decodes.decoded_tokens + self.prefilled_tokens:
            del self._cached[key]
            return 0
        return cached.blocks

    def _held(self, seq: SimulatedSequence, start: int) -> int:
        """Return the number of blocks of its first ``start`` tokens that siblings hold."""
        cached = self._cached.get(seq.request.group)
        return min(start // self.limits.block_size, cached.blocks) if cached is not None and cached.holders else 0

    def _hold(self, seq: SimulatedSequence, start: int) -> None:
        """Share the blocks of the prompt with the siblings, now and when they come."""
        if not self.limits.prefix_cache:
            return
        held = self._held(seq, start)
        self._cached.pop(seq.request.id, None)
        cached = self._cached.setdefault(seq.request.group, Cached(0))
        seq.shared = held
        self._other_blocks -= held
        cached.holders[seq] = None

    def _name(self, seq: SimulatedSequence, end: int) -> None:
        """Record that the first ``end`` tokens of a sequence are computed in this step: siblings find the whole blocks
        of their prompt."""
        cached = self._cached.get(seq.request.group)
        if cached is not None and seq in cached.holders:
            cached.blocks = max(cached.blocks, min(end, seq.prompt_tokens) // self.limits.block_size)

    def _release(self, seq: SimulatedSequence, step: int) -> None:
        self._other_blocks += seq.shared
        counted, seq.shared = not seq.shared, 0
        cached = self._cached.get(seq.request.group)
        if cached is None or seq not in cached.holders:
            return
        del cached.holders[seq]
        if not cached.holders:
            cached.expires = self._expiry(step)
        elif counted:
            other = next(iter(cached.holders))
            self._other_blocks += other.shared
            other.shared = 0

    def _expiry(self, step: int) -> float:
        free_tokens = (self._capacity - self._used(step)) * self.limits.block_size
        return self.decodes.decoded_tokens + self.prefilled_tokens + free_tokens

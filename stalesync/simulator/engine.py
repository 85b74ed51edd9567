"""Simulate one engine: attention ranks that step together, in virtual time.

    orders (submit, adopt, pause) ─► between two steps ─┬─► a rank prefills: one step
                                                        ├─► all decode: a jump to the next event ─► ended requests ─┐
                                                        └─► nothing to do: idle, or stopped                         │
    samples (collected as by `EngineStage`), ended chunks, unfinished requests ◄────────────────────────────────────┘

Events are ends of responses and chunks, steps that prefill, orders, and steps for which a rank finds no KV block. An
order that arrives during a jump shortens it to the end of the current step.

Invariants (property-tested): every request ends exactly once, with its length or suspended; times equal those of a loop
over the steps, up to rounding.

Cost, for n requests in the engine and r ranks: O(log n + r) for an event, whatever the number of steps between two.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fusion.inference.placement import place
from fusion.rollout import SuspendedSample
from stalesync.simulator.clock import Clock
from stalesync.simulator.engine_spec import EngineSpec, Listener, RequestSize
from stalesync.simulator.jump import Jump, RankLines
from stalesync.simulator.outbox import Outbox
from stalesync.simulator.rank import Rank
from stalesync.simulator.sequence import Plan, SimulatedRequest
from stalesync.simulator.sequence import Sequence as EngineSequence


@dataclass
class _Orders:
    submit: list[SimulatedRequest] = field(default_factory=list)
    adopt: int | None = None
    pause: bool = False


class SimulatedEngine:
    """Engine ``number``. ``size_of``: of a dispatched request, when it is submitted. ``busy_s``: seconds of its steps;
    the other totals are of all ranks and starts."""

    def __init__(
        self,
        number: int,
        spec: EngineSpec,
        clock: Clock,
        *,
        size_of: Callable[[SimulatedRequest], RequestSize],
        listener: Listener,
    ) -> None:
        self.number, self.spec, self.clock = number, spec, clock
        self._size_of, self._listener = size_of, listener
        self.ranks: list[Rank] = []
        self.step = 0
        """Number of steps since the start"""
        self.version = self._adopted = 0
        self.running = self._idle = False
        self.busy_s = self.kv_copy_s = 0.0
        self.decoded_tokens = self.context_sum = self.prefilled_tokens = 0
        self.recomputed_tokens = self.preemptions = 0
        self.first_tokens = self.adoptions = 0
        """First tokens sampled behind a prefill; new weights adopted"""
        self._stay = True
        self._orders = _Orders()
        self._jump: Jump | None = None
        self._event = 0
        """Number of the event that is due next: earlier ones are void"""
        self._ends: list[tuple[int, int, EngineSequence]] = []
        """(steps, place among equals, sequence), a heap; entries of sequences that have left are void"""
        self._order = 0
        self._num_unfinished = 0
        self._preparing: set[int] = set()
        """Ranks that may have something to prefill"""
        self._overcommitted: set[int] = set()
        """Ranks whose running sequences do not all fit the KV cache at their ends"""
        self._parked: dict[str, tuple[int, int]] = {}
        """Request → rank and tokens of its KV on the host"""
        self._outbox = Outbox(clock, self._end_of_step, lambda samples: listener.samples(number, samples))
        self._lines = RankLines(spec.cost, spec.num_ranks)

    # Orders

    def start(self, requests: Sequence[SimulatedRequest], version: int, *, time: float, stay: bool) -> None:
        """Starts with empty KV caches at ``time``. ``stay``: it runs until `pause`, otherwise until it is idle."""
        assert not self.running
        self.running, self._idle, self._stay = True, False, stay
        self.version = self._adopted = version
        self.ranks = [Rank(self.spec.limits) for _ in range(self.spec.num_ranks)]
        self.step, self._ends, self._num_unfinished = 0, [], 0
        self._preparing, self._overcommitted = set(), set()
        self._lines.clear()
        self._orders = _Orders(submit=list(requests))
        self._outbox.open(max(time, self.clock.now))
        self._schedule(time, self._next)

    def submit(self, requests: Sequence[SimulatedRequest]) -> None:
        """Adds requests at the next step."""
        self._orders.submit += requests
        self._interrupt()

    def forget(self, ids: Iterable[str]) -> None:
        """Frees parked KV."""
        for id in ids:
            self._parked.pop(id, None)

    def adopt(self, version: int) -> None:
        """Adopts new weights at the next step."""
        self._orders.adopt = version
        self._interrupt()

    def pause(self) -> None:
        """Stops after the current step. Nothing happens if it has stopped by itself."""
        if self.running:
            self._orders.pause = True
            self._interrupt()

    def has_adopted(self, version: int) -> bool:
        """Whether it generates with the weights of a version."""
        return self._adopted == version

    # Steps

    def _schedule(self, time: float, action: Callable[[], None]) -> None:
        """Replaces the event that is due next."""
        self._event += 1
        event = self._event
        self.clock.at(time, lambda: action() if event == self._event else None)

    def _interrupt(self) -> None:
        """Shortens a jump to the end of the current step, or ends the wait of an idle engine."""
        if self._idle:
            self._idle = False
            self._schedule(self.clock.now, self._next)
        elif self._jump is not None:
            steps = self._jump.boundary(self.clock.now)
            if steps < self._jump.count:
                jump = self._jump
                self._schedule(jump.time_of(steps), lambda: self._end_jump(jump, steps))

    def _next(self) -> None:
        """Applies orders, and begins the next step or jump."""
        if self._apply_orders():
            return
        if not self._num_unfinished:
            self._outbox.send()
            if self._stay:
                self._idle = True
            else:
                self._stop()
            return
        while True:
            plans = {rank: plan for rank in sorted(self._preparing) if (plan := self.ranks[rank].plan(self.step))}
            self._preparing &= plans.keys()
            if plans:
                self._prefill(plans)
                return
            if count := self._steps_to_event():
                self._decode(count)
                return

    def _apply_orders(self) -> bool:
        """Returns whether that has ended the stage, or takes time."""
        orders, self._orders = self._orders, _Orders()
        if orders.submit:
            self._place(orders.submit)
        if orders.adopt is not None:
            self._adopt(orders.adopt)
            self._orders.pause = orders.pause
            self._schedule(self.clock.now + self.spec.adopt_s, self._end_adoption)
            return True
        if orders.pause:
            self._stop()
            return True
        return False

    def _place(self, requests: Sequence[SimulatedRequest]) -> None:
        self._num_unfinished += len(requests)
        chosen = place([rank.unfinished for rank in self.ranks], requests)
        for request, rank in zip(requests, chosen, strict=True):
            size = self._size_of(request)
            length = size.prompt_tokens + size.generated
            left = size.response_tokens - size.generated
            chunk = left if self.spec.chunk_tokens is None else min(left, self.spec.chunk_tokens)
            seq = EngineSequence(request, rank, size.prompt_tokens, length, length + chunk, complete=chunk == left)
            seq.known = length - 1 if size.generated else 0
            home, tokens = self._parked.pop(request.id, (-1, 0))
            seq.parked = request.kv_tokens if self.spec.pools_kv else tokens if home == rank else 0
            self.ranks[rank].waiting.append(seq)
            self._preparing.add(rank)

    def _adopt(self, version: int) -> None:
        self.version = version
        for number, rank in enumerate(self.ranks):
            if self.spec.keeps_kv:
                rank.forget_prefixes()
            else:
                rank.restart(self.step)
                self._refresh(number)
            if rank.waiting:
                self._preparing.add(number)

    def _end_adoption(self) -> None:
        self._adopted = self.version
        self.adoptions += 1
        self._next()

    def _prefill(self, plans: dict[int, Plan]) -> None:
        """Begins a step in which ranks prefill."""
        seconds = self._lines.seconds(self.step)
        for number, plan in plans.items():
            copy_s = self.spec.cost.back_s(plan.restored * self.spec.limits.block_size) if plan.restored else 0.0
            self.kv_copy_s += copy_s
            sums = self.ranks[number].sums(plan, self.step)
            seconds = max(seconds, self.spec.cost.step_s(sums) + copy_s)
        self._jump = None
        self._schedule(self.clock.now + seconds, lambda: self._end_prefill(plans, seconds))

    def _end_prefill(self, plans: dict[int, Plan], seconds: float) -> None:
        self.busy_s += seconds
        self.step += 1
        for number, plan in plans.items():
            for seq in self.ranks[number].finish(plan, self.step, self.version):
                self._order += 1
                self.first_tokens += 1
                heapq.heappush(self._ends, (seq.ends, self._order, seq))
            self._refresh(number)
        self._end_step()

    def _steps_to_event(self) -> int:
        """Returns the number of steps in which every rank only decodes; 0: one must be planned again."""
        while self._void(self._ends[0]):
            heapq.heappop(self._ends)
        count = self._ends[0][0] - self.step
        for number in sorted(self._overcommitted):
            rank = self.ranks[number]
            steps = rank.steps_until_full(self.step, count)
            if not steps:
                rank.preempt(self.step)
                self._refresh(number)
                self._preparing.add(number)
            count = min(count, steps)
        return count

    def _decode(self, count: int) -> None:
        """Begins a jump over steps in which every rank only decodes."""
        jump = self._jump = self._lines.jump(self.clock.now, self.step, count)
        self._schedule(self.clock.now + jump.seconds, lambda: self._end_jump(jump, count))

    def _end_jump(self, jump: Jump, steps: int) -> None:
        self.busy_s += jump.time_of(steps) - jump.begins_s
        self._jump = None
        self.step += steps
        self._end_step()

    def _end_step(self) -> None:
        """Ends the sequences that have reached their limit, and goes on."""
        chunks: list[SuspendedSample] = []
        while self._ends and self._ends[0][0] <= self.step:
            entry = heapq.heappop(self._ends)
            if self._void(entry):
                continue
            seq, rank = entry[2], self.ranks[entry[2].rank]
            rank.leave(seq, self.step)
            self._num_unfinished -= 1
            if seq.complete:
                self._outbox.add(seq.request.id, seq.limit - seq.prompt_tokens)
            else:
                if not (parked := self._park(seq, pools=self.spec.pools_kv)):
                    rank.keep_cached(seq, self.step)
                chunks.append(self._suspended(seq, kept=parked or self.spec.limits.prefix_cache, tokens=seq.computed))
            self._refresh(seq.rank)
            if rank.waiting:
                self._preparing.add(seq.rank)
        if chunks:
            self._listener.chunks(self.number, chunks)
        self._outbox.send_if_due()
        self._next()

    def _end_of_step(self) -> float:
        """Returns the time at which the current step ends; now, where no step only decodes."""
        jump, now = self._jump, self.clock.now
        return now if jump is None else jump.time_of(jump.boundary(now))

    @staticmethod
    def _void(entry: tuple[int, int, EngineSequence]) -> bool:
        return not entry[2].decoding or entry[2].ends != entry[0]

    def _refresh(self, number: int) -> None:
        """Updates the lines of a rank whose decoding sequences have changed."""
        rank = self.ranks[number]
        self._lines.set(number, decoding=rank.decoding, offset=rank.offset)
        (self._overcommitted.add if rank.overcommitted else self._overcommitted.discard)(number)

    # The end of a stage

    def _stop(self) -> None:
        """Ends the stage: reports samples and unfinished requests."""
        self._outbox.send()
        suspended, copied = [], [0] * len(self.ranks)
        for number, rank in enumerate(self.ranks):
            for seq in list(rank.running):
                rank.leave(seq, self.step)
                if parked := self._park(seq, pools=self.spec.pools_suspended):
                    copied[number] += -(-seq.computed // self.spec.limits.block_size)
                suspended.append(self._suspended(seq, kept=parked, tokens=seq.computed))
            for seq in rank.waiting:
                kept = seq.parked > 0 and (self.spec.keeps_kv or self.spec.pools_suspended)
                if kept and self.spec.keeps_kv:
                    self._parked[seq.request.id] = number, seq.parked
                suspended.append(self._suspended(seq, kept=kept, tokens=seq.parked))
            rank.count(self.step)
            self.decoded_tokens += rank.decoded_tokens
            self.context_sum += rank.context_sum
            self.prefilled_tokens += rank.prefilled_tokens
            self.recomputed_tokens += rank.recomputed_tokens
            self.preemptions += rank.preemptions
        self.ranks, self._jump = [], None
        self._event += 1
        copy_s = self.spec.cost.out_s(max(copied) * self.spec.limits.block_size)
        self.kv_copy_s += copy_s

        def stopped() -> None:
            self.running = False
            self._listener.stopped(self.number, suspended)

        self.clock.at(self.clock.now + copy_s, stopped)

    def _park(self, seq: EngineSequence, *, pools: bool) -> bool:
        """Parks the KV of a sequence that has left on the host, or with ``pools`` in the pool. Returns whether it
        was."""
        if self.spec.keeps_kv and seq.computed:
            self._parked[seq.request.id] = seq.rank, seq.computed
            return True
        return pools and seq.computed > 0

    def _suspended(self, seq: EngineSequence, *, kept: bool, tokens: int) -> SuspendedSample:
        """``tokens``: of its KV, where that is ``kept``."""
        generated = seq.length - seq.prompt_tokens
        versions = None if seq.first_version is None else (seq.first_version, self.version)
        earlier = f"{seq.request.id}~{generated}" if generated else ""
        kv_tokens = tokens if kept and self.spec.pools_kv else 0
        return SuspendedSample(seq.request.id, generated, earlier, versions, seq.rank if kept else None, kv_tokens)

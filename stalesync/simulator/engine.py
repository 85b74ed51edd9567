"""Simulate one engine: attention ranks that step together, in virtual time.

    orders (submit, adopt, pause) ─► between two steps ─┬─► a rank prefills: one step
                                                        ├─► all decode: a jump to the next event ─► ended requests ─┐
                                                        └─► nothing to do: idle, or stopped                         │
    samples (collected as by `EngineStage`), ended chunks, unfinished requests ◄────────────────────────────────────┘

Events are ends of responses and chunks, steps that prefill, orders, and steps for which a rank finds no KV block. An
order that arrives during a jump shortens it to the end of the current step.

Invariants (property-tested): every request ends exactly once, with its length or suspended; times equal those of a loop
over the steps, up to rounding.

Cost, for n requests in the engine and r ranks: O(log n + r) for an event, whatever the number of steps between two."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fusion.inference.placement import place, shares_prompt
from fusion.rollout import SuspendedSample
from stalesync.simulator.clock import Clock
from stalesync.simulator.drafts import DraftGroups
from stalesync.simulator.jump import Jump, RankLines
from stalesync.simulator.outbox import Outbox
from stalesync.simulator.rank import Rank
from stalesync.simulator.sequence import EngineSpec, PrefillPlan, RequestSize, SimulatedRequest, SimulatedSequence


@dataclass
class _Orders:
    submit: list[SimulatedRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    """Groups of which responses have finished"""
    adopt: int | None = None
    pause: bool = False


class SimulatedEngine:
    """Engine ``number``. ``size_of``: of a dispatched request, when it is submitted. It reports, with its number, to
    ``put`` response tokens by id, to ``put_chunks`` requests at the end of a chunk or turn, and to ``note_stopped``
    unfinished requests. ``busy_s``: seconds of its steps; the other totals are of all ranks and starts."""

    def __init__(
        self,
        number: int,
        spec: EngineSpec,
        clock: Clock,
        *,
        size_of: Callable[[SimulatedRequest], RequestSize],
        put: Callable[[int, Mapping[str, int]], None],
        put_chunks: Callable[[int, Sequence[SuspendedSample]], None],
        note_stopped: Callable[[int, Sequence[SuspendedSample]], None],
    ) -> None:
        self.number, self.spec, self.clock = number, spec, clock
        self._size_of, self._put_chunks, self._note_stopped = size_of, put_chunks, note_stopped
        self.ranks: list[Rank] = []
        self.step = 0
        """Number of steps since the start"""
        self.version = self.adopted = 0
        """Versions of the weights from the next step on, and of those whose adoption has ended"""
        self.running = self._idle = False
        self.busy_s = self.kv_copy_s = 0.0
        self.decoded_tokens: float = 0
        self.context_sum: float = 0
        self.preemptions = 0
        self.first_tokens = self.adoptions = 0
        """First tokens sampled behind a prefill; new weights adopted"""
        self._stay = True
        self._orders = _Orders()
        self._jump: Jump | None = None
        self._event = 0
        """Number of the event that is due next: earlier ones are void"""
        self._end_of_rank: dict[int, int] = {}
        """Rank that decodes → steps after which its next sequence has ended"""
        self._num_unfinished = 0
        self._preparing: set[int] = set()
        """Ranks that may have something to prefill"""
        self._overcommitted: set[int] = set()
        """Ranks whose running sequences do not all fit the KV cache at their ends"""
        self._parked: dict[str, tuple[int, int]] = {}
        """Request → rank and tokens of its KV on the host"""
        self._drafts = DraftGroups(spec.drafts)
        self._outbox = Outbox(clock, self._end_of_step, partial(put, number))
        self._lines = RankLines(spec.cost, spec.num_ranks)

    # Orders

    def start(self, requests: Sequence[SimulatedRequest], version: int, *, time: float, stay: bool) -> None:
        """Start with empty KV caches at ``time``. ``stay``: it runs until `pause`, otherwise until it is idle."""
        assert not self.running
        self.running, self._idle, self._stay = True, False, stay
        self.version = self.adopted = version
        orders = itertools.count()
        self.ranks = [Rank(self.spec.limits, orders) for _ in range(self.spec.num_ranks)]
        self.step, self._end_of_rank, self._num_unfinished = 0, {}, 0
        self._drafts.clear()
        self._preparing, self._overcommitted = set(), set()
        self._lines.clear()
        self._orders = _Orders(submit=list(requests))
        self._outbox.open(max(time, self.clock.now))
        self._schedule(time, self._next)

    def submit(self, requests: Sequence[SimulatedRequest]) -> None:
        """Add requests at the next step."""
        self._orders.submit += requests
        self._interrupt()

    def forget(self, ids: Iterable[str]) -> None:
        """Free parked KV."""
        for id in ids:
            self._parked.pop(id, None)

    def adopt(self, version: int) -> None:
        """Adopt new weights at the next step."""
        self._orders.adopt = version
        self._interrupt()

    def pause(self) -> None:
        """Stop after the current step. Nothing happens if it has stopped by itself."""
        if self.running:
            self._orders.pause = True
            self._interrupt()

    # Steps

    def _schedule(self, time: float, action: Callable[[], None]) -> None:
        """Replace the event that is due next."""
        self._event += 1
        event = self._event
        self.clock.at(time, lambda: action() if event == self._event else None)

    def _interrupt(self) -> None:
        """Shorten a jump to the end of the current step, or end the wait of an idle engine."""
        if self._idle:
            self._idle = False
            self._schedule(self.clock.now, self._next)
        elif self._jump is not None:
            steps = self._jump.boundary(self.clock.now)
            if steps < self._jump.count:
                jump = self._jump
                self._schedule(jump.time_of(steps), lambda: self._end_jump(jump, steps))

    def _next(self) -> None:
        """Apply orders, and begin the next step or jump."""
        if self._apply_orders():
            return
        if not self._num_unfinished:
            self._outbox.send()
            if self._stay:
                self._idle = True
            else:
                self._stop()
            return
        full = {number for number in self._overcommitted if not self.ranks[number].steps_until_full(self.step, 1)}
        plans = {number: plan for number in sorted(self._preparing | full) if (plan := self._plan(number))}
        self._preparing = {*plans}
        if plans:
            self._prefill(plans)
        else:
            self._decode(self._steps_to_event())

    def _plan(self, number: int) -> PrefillPlan:
        """Plan what a rank prefills in the next step."""
        plan = self.ranks[number].plan(self.step)
        if plan.preempted:
            self._refresh(number)
        return plan

    def _apply_orders(self) -> bool:
        """Return whether that has ended the stage, or takes time."""
        orders, self._orders = self._orders, _Orders()
        if orders.finished:
            self._draft_from(orders.finished)
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
        sizes, spec = [*map(self._size_of, requests)], self.spec
        shares = [
            shares_prompt(size.prompt_tokens, spec.max_tokens, placed_again=bool(spec.chunk_tokens or size.turn_end))
            for size in sizes
        ]
        chosen = place([rank.unfinished for rank in self.ranks], requests, shares)
        for request, size, rank in zip(requests, sizes, chosen, strict=True):
            seq = SimulatedSequence.of(request, rank, size, self.spec.chunk_tokens)
            home, tokens = self._parked.pop(request.id, (-1, 0))
            seq.parked = request.kv_tokens if self.spec.pools_kv else tokens if home == rank else 0
            self._drafts.join(seq)
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
        self.adopted = self.version
        self.adoptions += 1
        self._next()

    def _prefill(self, plans: dict[int, PrefillPlan]) -> None:
        """Begin a step in which ranks prefill."""
        seconds = self._lines.seconds(self.step)
        for number, plan in plans.items():
            copy_s = self.spec.cost.back_s(plan.restored * self.spec.limits.block_size) if plan.restored else 0.0
            self.kv_copy_s += copy_s
            sums = self.ranks[number].sums(plan, self.step)
            seconds = max(seconds, self.spec.cost.step_s(sums) + copy_s)
        self._jump = None
        self._schedule(self.clock.now + seconds, lambda: self._end_prefill(plans, seconds))

    def _end_prefill(self, plans: dict[int, PrefillPlan], seconds: float) -> None:
        self.busy_s += seconds
        self.step += 1
        for number, plan in plans.items():
            self.first_tokens += len(self.ranks[number].finish(plan, self.step, self.version))
            self._refresh(number)
        self._end_step()

    def _steps_to_event(self) -> int:
        """Return the number of steps in which every rank only decodes, and all find blocks."""
        assert self._end_of_rank, "nothing decodes, and nothing is to be prefilled"
        num_steps = min(self._end_of_rank.values()) - self.step
        for number in self._overcommitted:
            num_steps = self.ranks[number].steps_until_full(self.step, num_steps)
        return num_steps

    def _decode(self, count: int) -> None:
        """Begin a jump over steps in which every rank only decodes."""
        jump = self._jump = self._lines.jump(self.clock.now, self.step, count)
        self._schedule(self.clock.now + jump.seconds, lambda: self._end_jump(jump, count))

    def _end_jump(self, jump: Jump, steps: int) -> None:
        self.busy_s += jump.time_of(steps) - jump.begins_s
        self._jump = None
        self.step += steps
        self._end_step()

    def _end_step(self) -> None:
        """End the sequences that have reached their limit, and goes on."""
        chunks: list[SuspendedSample] = []
        ended: list[SimulatedSequence] = []
        for number in [rank for rank, end in self._end_of_rank.items() if end <= self.step]:
            del self._end_of_rank[number]
            ended += self.ranks[number].decodes.ended(self.step)
        for seq in sorted(ended, key=lambda seq: seq.order):
            rank = self.ranks[seq.rank]
            rank.leave(seq, self.step)
            self._drafts.leave(seq)
            self._num_unfinished -= 1
            if seq.complete:
                self._outbox.add(seq.request.id, seq.limit - seq.prompt_tokens)
            else:
                if not (parked := self._park(seq, pools=self.spec.pools_kv)):
                    rank.keep_cached(seq, self.step)
                kept = parked or self.spec.limits.prefix_cache
                chunks.append(replace(self._suspended(seq, kept=kept, tokens=seq.computed), turn=seq.turn))
            if rank.waiting:
                self._preparing.add(seq.rank)
        for number in {seq.rank: None for seq in ended}:
            self._refresh(number)
        if chunks:
            self._put_chunks(self.number, chunks)
        self._outbox.send_if_due()
        self._next()

    def _end_of_step(self) -> float:
        """Return the time at which the current step ends; now, where no step only decodes."""
        jump, now = self._jump, self.clock.now
        return now if jump is None else jump.time_of(jump.boundary(now))

    def _refresh(self, number: int) -> None:
        """Update what depends on the decoding sequences of a rank, which have changed."""
        rank, decodes = self.ranks[number], self.ranks[number].decodes
        if (drafts := self.spec.drafts) is not None:
            drafted = drafts.choose(self.spec.cost, decodes.num_by_track, decodes.contexts(self.step))
            rates = {track: drafts.tokens_per_step(track, drafted) for track in decodes.tracks}
            decodes.set_drafts(self.step, drafted, rates)
        growth = decodes.growth
        offset = decodes.contexts(self.step) - growth * self.step
        self._lines.set(number, decoding=decodes.num, offset=offset, growth=growth, drafted=decodes.drafted)
        (self._overcommitted.add if rank.overcommitted else self._overcommitted.discard)(number)
        end = decodes.first_end(self.step)
        if end is None:
            self._end_of_rank.pop(number, None)
        else:
            self._end_of_rank[number] = end

    def observe_finished(self, group: str, num_finished: int) -> None:
        """Record the number of finished responses of a group, on any engine: their text is drafted from."""
        if self._drafts.finish(group, num_finished) and self.running:
            self._orders.finished.append(group)
            self._interrupt()

    def _draft_from(self, groups: Iterable[str]) -> None:
        """Move the decoding sequences of groups to the tracks of what they draft from."""
        changed: dict[int, None] = {}
        for seq, track in self._drafts.moves(groups):
            self.ranks[seq.rank].decodes.move(seq, self.step, track)
            changed[seq.rank] = None
        for number in changed:
            self._refresh(number)

    # The end of a stage

    def _stop(self) -> None:
        """End the stage: reports samples and unfinished requests."""
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
            rank.decodes.count(self.step)
            self.decoded_tokens += rank.decodes.decoded_tokens
            self.context_sum += rank.decodes.context_sum
            self.preemptions += rank.preemptions
        self.ranks, self._jump = [], None
        self._event += 1
        copy_s = self.spec.cost.out_s(max(copied) * self.spec.limits.block_size)
        self.kv_copy_s += copy_s

        def stopped() -> None:
            self.running = False
            self._note_stopped(self.number, suspended)

        self.clock.at(self.clock.now + copy_s, stopped)

    def _park(self, seq: SimulatedSequence, *, pools: bool) -> bool:
        """Park the KV of a sequence that has left on the host, or with ``pools`` in the pool. Return whether it was."""
        if self.spec.keeps_kv and seq.computed:
            self._parked[seq.request.id] = seq.rank, seq.computed
            return True
        return pools and seq.computed > 0

    def _suspended(self, seq: SimulatedSequence, *, kept: bool, tokens: int) -> SuspendedSample:
        """``tokens``: of its KV, where that is ``kept``."""
        generated = seq.length - seq.prompt_tokens
        versions = None if seq.first_version is None else (seq.first_version, self.version)
        earlier = f"{seq.request.id}~{generated}" if generated else ""
        kv_tokens = tokens if kept and self.spec.pools_kv else 0
        return SuspendedSample(seq.request.id, generated, earlier, versions, seq.rank if kept else None, kv_tokens)

"""An engine that jumps from event to event does what a loop over its steps does, with the engine's own scheduler.

`LoopedEngine` is that loop: `fusion.inference.scheduler.Scheduler` for each attention rank, every step one by one.
"""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fusion.colocate.paced import observe_load
from fusion.inference import Request, SamplingParams
from fusion.inference.blocks import BlockManager
from fusion.inference.config import EngineConfig
from fusion.inference.placement import place, shares_prompt
from fusion.inference.scheduler import Scheduler
from fusion.inference.sequence import Sequence
from fusion.model import Parallel
from stalesync.simulator.clock import Clock
from stalesync.simulator.engine import SimulatedEngine
from stalesync.simulator.outbox import MAX_PENDING, MAX_PENDING_S
from stalesync.simulator.rank import Rank
from stalesync.simulator.sequence import EngineSpec, RequestSize, SimulatedRequest, SimulatedSequence
from tests.stalesync.simulator.configs import engine_cost

COST = engine_cost(layout=Parallel(4, ep=4), scale=2)
AMPLE = 1 << 20


class LoopedEngine:
    """Computes every step. ``requests``: (time, group, member, prompt, response) in order of time."""

    def __init__(self, ranks, limits, chunk=None):
        blocks = (limits.max_kv_tokens or AMPLE) // limits.block_size
        self.ranks = [
            Scheduler(
                BlockManager(blocks, limits.block_size),
                max_seqs=limits.max_seqs,
                max_batch_tokens=limits.max_batch_tokens,
                prefix_cache=limits.prefix_cache,
            )
            for _ in range(ranks)
        ]
        self.chunk, self.now, self.ended, self.restarts = chunk, 0.0, {}, []

    def run(self, requests, adopt_at=None):
        waiting = list(requests)
        while waiting or any(rank.unfinished for rank in self.ranks):
            if not any(rank.unfinished for rank in self.ranks):
                self.now = max(self.now, waiting[0][0])
            arrived = [one for one in waiting if one[0] <= self.now]
            waiting = waiting[len(arrived) :]
            self._submit(arrived)
            if adopt_at is not None and self.now >= adopt_at:
                adopt_at = None
                for rank in self.ranks:
                    rank.restart(version=1)
            steps = [rank.schedule() for rank in self.ranks]
            self.now += max(sum(COST(observe_load(step))[0].values()) for step in steps)
            for rank, step in zip(self.ranks, steps, strict=True):
                # Responses differ, so that no sibling finds another's.
                tokens = [2000 + seq.noise_key % 1_000_003 for seq in step.drawn]
                for output in rank.commit(step, tokens, [-1.0] * len(tokens)):
                    self.ended[output.request_id] = self.now, len(output.tokens), output.finish_reason
        return self.ended

    def _submit(self, arrived):
        made = [
            Request(
                f"{group}/{member}",
                tuple([1000 + group] * prompt),
                SamplingParams(max_tokens=AMPLE),
                group=str(group),
                chunk_tokens=self.chunk or 0,
                exact_tokens=response,
                priority=int(member > 0),
            )
            for _, group, member, prompt, response in arrived
        ]
        shares = [shares_prompt(len(one.prompt), AMPLE, placed_again=bool(self.chunk)) for one in made]
        for request, rank in zip(made, place([rank.unfinished for rank in self.ranks], made, shares), strict=True):
            self.ranks[rank].add(Sequence.of(request, request.params, ()))


def simulated(ranks, limits, requests, chunk=None, adopt_at=None):
    """Time, tokens and kind of the end of each request in a `SimulatedEngine`."""
    clock, ended, sizes = Clock(), {}, {}

    def samples(_, tokens):
        reported.append(clock.now)
        for id, count in tokens.items():
            assert id not in ended or ended[id][2] != "stop"
            ended[id] = clock.now, count, "stop"

    def chunks(_, suspended):
        for one in suspended:
            assert one.id not in ended
            ended[one.id] = clock.now, one.generated, "chunk"

    reported = []
    spec = EngineSpec(COST, ranks, limits, AMPLE, chunk_tokens=chunk)
    reports = dict(put=samples, put_chunks=chunks, note_stopped=lambda *_: None)
    engine = SimulatedEngine(0, spec, clock, size_of=lambda one: sizes[one.id], **reports)
    engine.start([], 0, time=0.0, stay=True)
    for time, group, member, prompt, response in requests:
        request = SimulatedRequest(f"{group}/{member}", str(group), priority=int(member > 0))
        sizes[request.id] = RequestSize(prompt, 0, response)
        clock.at(time, lambda request=request: engine.submit([request]))
    if adopt_at is not None:
        clock.at(adopt_at, lambda: engine.adopt(1))
    before = 0.0
    while clock.step():
        assert clock.now >= before
        before = clock.now
    return ended, engine, reported


@st.composite
def loads(draw):
    requests, time = [], 0.0
    for group in range(draw(st.integers(1, 5))):
        time += draw(st.sampled_from([0.0, 0.0, 0.35, 3.0]))
        prompt, size = draw(st.integers(1, 70)), draw(st.integers(1, 4))
        requests += [(time, group, member, prompt, draw(st.integers(1, 60))) for member in range(size)]
    return requests


def at_report(times, ended_s):
    """The report that contains a sample: reports of several are late by design."""
    return min(time for time in times if time >= ended_s - 1e-9)


WHILE_ANOTHER_PREFILLS = [
    *[(0.0, 0, member, 66, response) for member, response in enumerate([16, 1, 1, 16])],
    *[(0.0, 1, 0, 34, 1), (0.0, 1, 1, 34, 16), (0.0, 2, 0, 1, 1)],
]
"""A rank finds no block in a step in which another prefills."""
WHILE_IT_PREFILLS = [(0.0, 0, 0, 51, 33), (0.0, 1, 0, 62, 46)]
"""A rank finds no block for the next chunk of a prefill, and begins it again in the next step."""


@st.composite
def limits(draw):
    """With the prefix cache no sequence gives up its blocks: which of them are found again is not modelled."""
    slots, budget, cache = draw(st.integers(1, 8)), draw(st.sampled_from([1, 16, 64, 4096])), draw(st.booleans())
    tokens = None if cache else draw(st.none() | st.integers(9, 20).map(lambda blocks: 16 * blocks))
    return limits_of(slots, budget, tokens, cache)


def limits_of(slots, budget, tokens, cache):
    return EngineConfig(max_seqs=slots, max_batch_tokens=max(budget, slots), max_kv_tokens=tokens, prefix_cache=cache)


@settings(max_examples=80, deadline=None)
@given(loads(), st.integers(1, 3), limits(), st.sampled_from([None, None, 16]), st.sampled_from([None, 0.5, 2.0]))
@example(WHILE_ANOTHER_PREFILLS, 2, limits_of(8, 4096, 16 * 9, False), None, None)
@example(WHILE_IT_PREFILLS, 1, limits_of(8, 16, 16 * 10, False), None, None)
@example([(0.0, 0, 0, 23, 1), (0.0, 0, 1, 23, 1)], 1, limits_of(1, 1, None, True), None, None)
def test_times_and_lengths_are_those_of_a_loop_over_the_steps(requests, ranks, limits, chunk, adopt_at):
    loop = LoopedEngine(ranks, limits, chunk)
    looped = loop.run(requests, adopt_at)
    ended, engine, reported = simulated(ranks, limits, requests, chunk, adopt_at)
    assert ended.keys() == looped.keys(), "every request ends once"
    for id, (ended_s, tokens, kind) in looped.items():
        assert ended[id][1:] == (tokens, kind)
        expected_s = ended_s if kind == "chunk" else at_report(reported, ended_s)
        assert ended[id][0] == pytest.approx(expected_s, rel=1e-9)
        if kind == "stop":
            assert ended[id][0] <= ended_s + MAX_PENDING_S + 1.0
    assert max(time for time, *_ in ended.values()) == pytest.approx(max(time for time, *_ in looped.values()))
    engine.pause()
    engine.clock.wait_for(lambda: not engine.running)
    assert engine.decoded_tokens + engine.first_tokens == sum(tokens for _, tokens, _ in looped.values())
    assert engine.preemptions == sum(rank.counters.preemptions for rank in loop.ranks)


@settings(max_examples=40, deadline=None)
@given(loads(), st.integers(1, 2), st.integers(9, 20))
def test_no_rank_exceeds_a_kv_cache_in_which_prefixes_stay_and_every_request_ends_with_its_length(
    requests, ranks, blocks
):
    limits = limits_of(8, 4096, 16 * blocks, True)
    looped = LoopedEngine(ranks, limits)
    looped.run(requests)
    ended, _, _ = simulated(ranks, limits, requests)
    assert {id: one[1] for id, one in ended.items()} == {f"{g}/{m}": tokens for _, g, m, _, tokens in requests}
    end_s = max(time for time, *_ in ended.values())
    assert end_s == pytest.approx(looped.now, rel=0.25), "which cached block is evicted is not modelled"


def test_a_pause_in_the_middle_of_a_jump_stops_after_the_current_step():
    stopped = {}
    clock, cost = Clock(), COST
    reports = dict(
        put=lambda *_: None, put_chunks=lambda *_: None, note_stopped=lambda n, rest: stopped.update({n: rest})
    )
    size = RequestSize(4, 0, 1000)
    spec = EngineSpec(cost, 1, EngineConfig(max_seqs=4, max_batch_tokens=64), AMPLE)
    engine = SimulatedEngine(3, spec, clock, size_of=lambda one: size, **reports)
    engine.start([SimulatedRequest("a/0", "a"), SimulatedRequest("a/1", "a")], 5, time=0.0, stay=True)
    clock.advance_to(2.0)
    engine.pause()
    clock.advance_to(100.0)
    (first, second) = stopped[3]
    assert first.generated == second.generated < 1000 and first.versions == (5, 5)
    assert engine.busy_s == pytest.approx(2.0, abs=0.2) and engine.busy_s >= 2.0
    looped = LoopedEngine(1, EngineConfig(max_seqs=4, max_batch_tokens=64))
    ends = looped.run([(0.0, 0, member, 4, first.generated) for member in (0, 1)])
    assert ends["0/0"][0] == pytest.approx(engine.busy_s)


@pytest.mark.parametrize("pools_suspended", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_kv_is_pooled_at_the_end_of_a_chunk_and_of_suspended_requests_where_others_continue_them(
    prefix_cache, pools_suspended
):
    """As `fusion.inference.pooled`: with or without the prefix cache; new weights free what waits, too."""
    ended, stopped, clock = [], [], Clock()
    reports = dict(
        put=lambda *_: None,
        put_chunks=lambda _, some: ended.extend(some),
        note_stopped=lambda _, some: stopped.extend(some),
    )
    limits = EngineConfig(max_seqs=2, max_batch_tokens=64, prefix_cache=prefix_cache)
    spec = EngineSpec(COST, 1, limits, AMPLE, chunk_tokens=20, pools_kv=True, pools_suspended=pools_suspended)
    sizes = {"a": RequestSize(4, 0, 1000), "b": RequestSize(4, 0, 20), "c": RequestSize(4, 9, 1000)}
    engine = SimulatedEngine(0, spec, clock, size_of=lambda one: sizes[one.group], **reports)
    requests = [SimulatedRequest("a/0", "a"), SimulatedRequest("b/0", "b"), SimulatedRequest("c/0", "c", kv_tokens=12)]
    engine.start(requests[:1], 0, time=0.0, stay=True)
    while not ended:
        clock.step()
    (chunk,) = ended
    assert (chunk.generated, chunk.kv_tokens, chunk.kv_rank) == (20, 23, 0)
    engine.submit([requests[1], SimulatedRequest("b/1", "b"), requests[2]])
    clock.advance_to(clock.now + 0.5)
    engine.pause()
    clock.advance_to(clock.now + 100.0)
    kept = {one.id: one.kv_tokens for one in stopped}
    assert (kept["c/0"], kept["b/0"] > 0) == ((12, True) if pools_suspended else (0, False))
    assert all((one.kv_rank is None) == (not one.kv_tokens) for one in stopped)
    assert bool(engine.kv_copy_s) == pools_suspended, "nothing is copied that nobody continues"
    rank = Rank(limits, itertools.count())
    rank.waiting.append(SimulatedSequence(requests[2], 0, 4, 13, 1004, complete=True, parked=12))
    rank.restart(0)
    assert rank.waiting.first.parked == 0


def test_reports_are_collected_as_by_the_stage_of_an_engine():
    from fusion.rollout import engine_stage

    assert (MAX_PENDING, MAX_PENDING_S) == (engine_stage.MAX_PENDING, engine_stage.MAX_PENDING_S)


@pytest.mark.parametrize(("chunk", "turn_end", "together"), [(None, None, False), (20, None, True), (None, 50, True)])
def test_siblings_are_on_different_ranks_unless_they_are_placed_again(chunk, turn_end, together):
    reports = dict(put=lambda *_: None, put_chunks=lambda *_: None, note_stopped=lambda *_: None)
    spec = EngineSpec(COST, 2, EngineConfig(max_seqs=4, max_batch_tokens=64), AMPLE, chunk_tokens=chunk)
    size, clock = RequestSize(4, 0, 100, turn_end), Clock()
    engine = SimulatedEngine(0, spec, clock, size_of=lambda one: size, **reports)
    engine.start([SimulatedRequest(f"{group}/{i}", group) for group in "ab" for i in (0, 1)], 0, time=0.0, stay=True)
    clock.advance_to(0.0)
    groups = [{seq.request.group for seq in [*rank.waiting, *rank.running]} for rank in engine.ranks]
    assert groups == ([{"a"}, {"b"}] if together else [{"a", "b"}, {"a", "b"}])

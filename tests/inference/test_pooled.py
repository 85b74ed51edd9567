"""KV that any engine of the machine continues: to the bit, of these weights and tokens, or computed again."""

from __future__ import annotations

import logging
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from distqueue.payload.sweep import memory
from fusion.inference import Request, SamplingParams
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.kv_pool.pool import KVPoolSpec
from tests.inference.engines import by_id, generate, requests
from tests.inference.keeping import long, steps
from tests.inference.pooling import figures, files_in, moved, pooling
from tests.offload.memory import free_bytes


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        yield Path(folder)


def mixed(tokens=60):
    return long(4) + [replace(request, id=f"q{i}") for i, request in enumerate(requests(4, max_tokens=tokens))]


def all_free(made):
    """Whether no host memory is in use by KV, once all copies are done."""
    made.parked.settle()
    return free_bytes(made.pooled._memory) == made.pooled._memory.nbytes


def in_turns(engines, wanted, chunk=13):
    """Generates in chunks, each on the next engine; returns tokens and log-probabilities by request."""
    had, turn = {}, 0
    again = [replace(request, chunk_tokens=chunk) for request in wanted]
    while again:
        again = moved(wanted, generate(engines[turn % len(engines)], again), had)
        again = [replace(request, chunk_tokens=chunk) for request in again]
        turn += 1
    return had


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("batch_invariant", [True, False])
def test_chunks_on_engines_in_turn_are_the_uninterrupted_response(root, prefix_cache, batch_invariant):
    options = dict(prefix_cache=prefix_cache, batch_invariant=batch_invariant)
    engines = [pooling(root, rank, **options) for rank in range(3)]
    wanted = mixed()
    whole = by_id(generate(pooling(root, suspended="recompute", **options), wanted))
    had = in_turns(engines, wanted)
    for id, (tokens, logprobs) in whole.items():
        assert had[id] == (tokens, logprobs if batch_invariant else pytest.approx(logprobs, abs=1e-5))
    pulled = sum(figures(made)[1] for made in engines)
    assert pulled > 10 and all(figures(made)[2:] == (0, 0) for made in engines)
    assert sum(made.status()["recomputed_tokens"] for made in engines) == 0
    assert sum(made.status()["kv_restored_tokens"] for made in engines) > 500
    assert not files_in(root), "each file was used once"
    assert all(all_free(made) for made in engines)
    assert all(made.scheduler.blocks.available == made.scheduler.blocks.count for made in engines)


def test_an_engine_takes_back_what_it_has_parked_itself(root):
    made = pooling(root)
    wanted = mixed()
    assert in_turns([made], wanted) == by_id(generate(pooling(root, suspended="recompute"), wanted))
    hits, *others = figures(made)
    assert hits > 10 and others == [0, 0, 0] and made.status()["recomputed_tokens"] == 0


def test_drafts_continue_behind_pulled_kv(root):
    prompt = (3, 4, 5) * 9
    wanted = [Request(f"r{i}", prompt, SamplingParams(0.6, max_tokens=60, stop_token_ids=()), "g") for i in range(4)]
    engines = [pooling(root, rank, source="siblings") for rank in range(2)]
    for made in engines:
        made.scheduler.drafter = TextDrafter.of(made.config.drafts)
    assert in_turns(engines, wanted) == by_id(generate(pooling(root, suspended="recompute"), wanted))
    assert sum(figures(made)[1] for made in engines) > 4
    assert all(made.status()["accepted_tokens"] > 0 for made in engines)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_routing_travels_with_the_kv(root, prefix_cache):
    options = dict(dtype=torch.float64, routing=True, prefix_cache=prefix_cache)
    wanted = long(4)
    whole = {output.request_id: output for output in generate(pooling(root, **options), wanted)}
    one, other = (pooling(root, rank, **options) for rank in range(2))
    begun = generate(one, [replace(request, chunk_tokens=10) for request in wanted])
    outputs = generate(other, moved(wanted, begun))
    assert figures(other) == (0, 4, 0, 0)
    first = {output.request_id: output.routing for output in begun}
    first_tokens = {output.request_id: output.tokens for output in begun}
    for output in outputs:
        routing = torch.cat([first[output.request_id], output.routing])
        assert torch.equal(routing, whole[output.request_id].routing)
        assert first_tokens[output.request_id] + output.tokens == whole[output.request_id].tokens


def test_kv_without_routing_is_not_used_where_it_is_recorded(root):
    wanted = long(2)
    one, other = (pooling(root, rank, dtype=torch.float64, routing=rank == 1) for rank in range(2))
    again = moved(wanted, generate(one, [replace(request, chunk_tokens=10) for request in wanted]))
    generate(other, again)
    assert figures(other) == (0, 0, 0, 2)


def test_a_suspended_engine_leaves_its_kv_to_the_others(root):
    one, other = pooling(root, 0, max_seqs=3), pooling(root, 1)
    wanted, had = mixed(), {}
    whole = by_id(generate(pooling(root, suspended="recompute"), wanted))
    begun = generate(one, [replace(request, chunk_tokens=9) for request in wanted])
    other.submit(moved(wanted, begun, had))
    steps(other, 4)
    suspended = other.suspend()
    one.submit(moved(wanted, suspended, had))
    steps(one, 2)
    suspended = one.suspend()
    assert len(one.scheduler.waiting) == 0 and min(output.kv_tokens for output in suspended) > 0
    waited = [output for output in suspended if not output.tokens]
    assert waited, "some had not been admitted, and their KV is in the pool again"
    moved(wanted, generate(other, moved(wanted, suspended, had)), had)
    assert had == whole
    assert one.status()["recomputed_tokens"] == other.status()["recomputed_tokens"] == 0
    assert not files_in(root)


def test_a_suspended_engine_copies_nothing_where_nobody_continues_under_its_weights(root):
    one = pooling(root, 0, spec=KVPoolSpec("run", takes_suspended=False), max_seqs=2)
    wanted = long(4)
    again = moved(wanted, generate(one, [replace(request, chunk_tokens=20) for request in wanted]))
    one.submit(again)
    steps(one, 2)
    suspended = one.suspend()
    assert {(output.kv_rank, output.kv_tokens) for output in suspended} == {(None, 0)}
    assert not files_in(root) and one.parked.host_bytes == 0 and all_free(one)


def test_kv_that_was_fetched_stays_when_the_memory_of_the_cache_goes_and_returns(root):
    wanted, had = long(4), {}
    one, other = pooling(root, 0), pooling(root, 1, max_seqs=2)
    again = moved(wanted, generate(one, [replace(request, chunk_tokens=20) for request in wanted]), had)
    other.submit(again)
    outputs = steps(other, 2)
    assert len(other.scheduler.waiting) == 2
    other.release_kv()
    other.allocate_kv()
    moved(wanted, outputs + other.run(), had)
    assert had == by_id(generate(pooling(root, suspended="recompute"), wanted))
    assert figures(other) == (0, 4, 0, 0) and all_free(other)


def test_host_memory_is_used_again_by_an_engine_that_only_takes(root):
    one, other, held = pooling(root, 0), pooling(root, 1), []
    for number in range(4):
        wanted = [replace(request, id=f"{request.id}-{number}") for request in long(4)]
        generate(other, moved(wanted, generate(one, [replace(request, chunk_tokens=20) for request in wanted])))
        held.append(other.pooled._memory.nbytes)
    assert held == held[:1] * 4 and figures(other) == (0, 16, 0, 0)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("spoil", "counted"),
    [
        (flip, (0, 2, 0, 2)),
        (truncate, (0, 2, 0, 2)),
        (Path.unlink, (0, 2, 2, 0)),
        (lambda path: path.chmod(0o644), (0, 2, 0, 2)),
    ],
    ids=["flipped", "truncated", "missing", "readable"],
)
def test_what_is_damaged_or_missing_is_counted_and_computed_again(root, caplog, spoil, counted):
    wanted, had = long(4), {}
    one, other = pooling(root, 0), pooling(root, 1)
    again = moved(wanted, generate(one, [replace(request, chunk_tokens=20) for request in wanted]), had)
    for path in files_in(root)[:2]:
        spoil(path)
    with caplog.at_level(logging.WARNING):
        moved(wanted, generate(other, again), had)
    assert had == by_id(generate(pooling(root, suspended="recompute"), wanted))
    assert figures(other) == counted and other.status()["recomputed_tokens"] > 0
    assert len([record for record in caplog.records if "is damaged" in record.message]) == counted[3]
    args = [arg for record in caplog.records for arg in record.args]
    assert not any(isinstance(arg, Exception) for arg in args), "its frames would keep an engine, and the card's memory"
    assert not files_in(root)


def test_kv_is_not_used_for_other_tokens(root):
    wanted = long(2)
    one, other = pooling(root, 0), pooling(root, 1)
    first, second = moved(wanted, generate(one, [replace(request, chunk_tokens=20) for request in wanted]))
    first = replace(first, response=(*first.response[:-1], (first.response[-1] + 1) % 30))
    outputs = by_id(generate(other, [first, second]))
    assert figures(other) == (0, 1, 1, 0)
    assert outputs == by_id(generate(pooling(root, suspended="recompute"), [first, second]))


def test_new_weights_free_what_is_parked_and_what_was_fetched(root):
    one, other = pooling(root, 0), pooling(root, 1, max_seqs=2)
    wanted = long(4)
    again = moved(wanted, generate(one, [replace(request, chunk_tokens=20) for request in wanted]))
    other.submit(again[:3])
    other.step()
    assert len(other.scheduler.waiting) == 1 and other.scheduler.waiting.first.parked
    assert one.parked_kv_bytes > 0 and len(files_in(root)) == 1
    one.policy_version = other.policy_version = 1
    assert one.parked_kv_bytes == other.parked.host_bytes == 0 and not files_in(root)
    other.run()
    assert all_free(other)
    generate(other, again[3:])
    assert figures(other) == (0, 3, 1, 0)


def test_kv_that_exceeds_the_limit_is_on_disk_or_computed_again(root):
    wanted = long(10, prompt=tuple(range(2, 30)) * 8, tokens=30)
    whole = by_id(generate(pooling(root, suspended="recompute"), wanted))
    for spill, pulls in ((str(root / "disk"), 10), (None, 3)):
        one = pooling(root, 0, spec=KVPoolSpec("run", 1 << 18, spill))
        other = pooling(root, 1, spec=KVPoolSpec("run", None, spill))
        had = {}
        again = moved(wanted, generate(one, [replace(request, chunk_tokens=9) for request in wanted]), had)
        assert one.parked_kv_bytes <= 1 << 18
        if spill is None:
            pulls = sum(request.kv_tokens > 0 for request in again)
            assert 0 < pulls < 10 and one.status()["kv_pool_evictions"] == 10 - pulls
        moved(wanted, generate(other, again), had)
        assert had == whole and figures(other) == (0, pulls, 0, 0)
        one.pooled.store.close(), other.pooled.store.close()


def test_an_engine_fetches_no_more_than_it_may_park(root):
    one, other = pooling(root, 0), pooling(root, 1, max_parked_mib=1)
    wanted = long(10, prompt=tuple(range(2, 30)) * 8, tokens=30)
    again = moved(wanted, generate(one, [replace(request, chunk_tokens=9) for request in wanted]))
    other.submit(again)
    other._apply_orders(other._exchange())
    counters = other.counters
    assert (
        counters.kv_pool_pulls + counters.kv_pool_misses == 10
        and counters.kv_pool_misses > 0
        and other.pooled.blocks * other.cache.block_bytes <= 1 << 20
    )


def test_aborted_and_forgotten_requests_leave_nothing(root):
    one, other = pooling(root, 0), pooling(root, 1, max_seqs=1)
    wanted = long(4)
    again = moved(wanted, generate(one, [replace(request, chunk_tokens=20) for request in wanted]))
    other.submit(again[:2])
    other.step()
    other.abort(["r0", "r1"])
    one.forget(["r0", "r1", "r2", "r3", "nobody's"])
    other.run(), one.run()
    assert not files_in(root) and one.parked_kv_bytes == other.parked.host_bytes == 0
    assert all_free(other)


class Weights:
    """Weights that differ between versions, of the model that all engines of a test share."""

    def __init__(self, made):
        self.norm = made.model.layers["1"].input_norm
        self.first = self.norm.detach().clone()

    def set(self, version):
        with torch.no_grad():
            self.norm.copy_(self.first * 0.8**version)


def journey(root, suspended, seed):
    """Random requests on two engines: in chunks, suspended, moved, under new weights, with a damaged file. Returns
    tokens, log-probabilities and versions of each, and the engines."""
    draw = random.Random(seed)
    engines = [pooling(root, rank, suspended=suspended, max_kv_tokens=1024) for rank in range(2)]
    weights, version = Weights(engines[0]), 0
    wanted = mixed(40)
    todo, had, versions = [(0, request) for request in wanted], {}, {}
    try:
        while todo or any(made.scheduler.unfinished for made in engines):
            waiting, todo = todo, []
            for _, request in waiting:
                engine, chunk = draw.randrange(2), draw.choice((0, 5, 12))
                engines[engine].submit([replace(request, chunk_tokens=chunk)])
            event = draw.random()
            outputs = [output for made in engines for output in steps(made, draw.randint(1, 8))]
            if event < 0.2:
                made = draw.choice(engines)
                outputs += made.suspend()
                made.resume()
            if event > 0.85:
                version += 1
                weights.set(version)
                for made in engines:
                    made.policy_version = version
            if 0.5 < event < 0.6:
                for path in files_in(root)[:1]:
                    flip(path)
            for output in outputs:
                versions.setdefault(output.request_id, []).extend(output.versions)
            todo = [(0, request) for request in moved(wanted, outputs, had)]
    finally:
        weights.set(0)
    return had, versions, engines


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_kv_of_other_weights_is_never_served(seed):
    """Every token is what it is where all KV is computed again: by the weights that its version names."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        had, versions, engines = journey(Path(folder), "pool", seed)
        again, same_versions, _ = journey(Path(folder), "recompute", seed)
        assert had == again and versions == same_versions
        for made in engines:
            assert not made.pooled._entries and all_free(made)
            made.pooled.store.close()
        assert not files_in(folder)

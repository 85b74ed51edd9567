"""Prompts that engines share: to the bit what each computes itself, and nothing stays of what is under way."""

from __future__ import annotations

import logging
import random
import tempfile
import threading
import time
from concurrent import futures
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from distqueue.payload.sweep import memory
from fusion.inference import Request, SamplingParams
from fusion.rollout.kv_pool.pool import KVPoolSpec
from tests import machine
from tests.inference.engines import by_id, generate
from tests.inference.keeping import steps
from tests.inference.pooling import figures, files_in, moved, pooling
from tests.inference.test_pooled import Weights, all_free, flip, truncate

PROMPT = tuple(2 + number % 29 for number in range(70))
"""Four whole blocks, and a rest"""


@pytest.fixture
def root():
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        yield Path(folder)


def sharing(root, rank=0, suspended="pool", **rollout):
    pull = {"pull_tokens": 16} if suspended == "pool" else {}
    return pooling(root, rank, suspended=suspended, **(pull | rollout))


def siblings(count=3, name="r", prompt=PROMPT, tokens=12, **fields):
    params = SamplingParams(max_tokens=tokens, stop_token_ids=())
    return [Request(f"{name}{number}", prompt, params, "g", **fields) for number in range(count)]


def written(made):
    """Waits until the engine's prompts are files."""
    machine.wait_for(lambda: made.parked.settle() or not made.pooled._writes, 20)
    assert all_free(made)


def pulling(root, wanted, **rollout):
    """An engine whose reader waits for the gate, and which has seen the requests; the prompt is a file."""
    one, other = sharing(root, 0), sharing(root, 1, **rollout)
    generate(one, siblings(1))
    written(one)
    gate = futures.Future()
    other.pooled._reader.submit(gate.result)
    other.submit(wanted)
    other.step()
    return other, gate


def prompts(made):
    return made.counters.kv_pool_prompts


def plain(root, wanted, **rollout):
    return by_id(generate(sharing(root, 9, suspended="recompute", **rollout), wanted))


@pytest.mark.parametrize("batch_invariant", [True, False])
@pytest.mark.parametrize("length", [17, 65, 70])
def test_siblings_on_another_engine_read_a_prompt_once(root, length, batch_invariant):
    one, other = (sharing(root, rank, batch_invariant=batch_invariant) for rank in range(2))
    blocks = (length - 1) // 16
    first, second = siblings(1, "a", PROMPT[:length]), siblings(3, "b", PROMPT[:length])
    generate(one, first)
    written(one)
    assert len(files_in(root)) == 1 and prompts(one) == 0
    outputs = by_id(generate(other, second))
    for id, (tokens, logprobs) in plain(root, second, batch_invariant=batch_invariant).items():
        assert outputs[id] == (tokens, logprobs if batch_invariant else pytest.approx(logprobs, abs=1e-5))
    assert prompts(other) == 1 and other.counters.kv_restored_tokens == 16 * blocks
    assert other.counters.kv_pool_bytes == blocks * other.cache.block_bytes
    assert other.counters.prefix_hit_tokens == 2 * length, "of the other two, the last tokens are computed once, too"
    assert figures(other) == (0, 0, 0, 0) and all_free(other)
    generate(other, siblings(2, "c", PROMPT[:length]))
    written(other)
    assert prompts(other) == 1 and len(files_in(root)) == 1, "they are in the cache now, and written already"
    for made in (one, other):
        made.policy_version = 1
    assert not files_in(root)


def test_short_prompts_and_engines_without_a_prefix_cache_share_nothing(root):
    short, without = sharing(root, 0, pull_tokens=80), sharing(root, 1, prefix_cache=False)
    for made in (short, without):
        generate(made, siblings())
        written(made)
    assert not files_in(root)


def test_others_decode_while_a_request_waits_for_its_prompt(root):
    one, other = sharing(root, 0), sharing(root, 1)
    generate(one, siblings(1))
    written(one)
    gate = futures.Future()
    other.pooled._reader.submit(gate.result)
    running, late = siblings(2, "x", PROMPT[:9], 40), siblings(2, "y")
    other.submit(running)
    steps(other, 2)
    other.submit(late)
    ended = steps(other, 10)
    assert not ended and [seq.request.id for seq in other.scheduler.waiting] == ["y0", "y1"]
    assert other.status()["depth"] == 2 and all(len(seq.tokens) > 15 for seq in other.scheduler.running)
    gate.set_result(None)
    assert by_id(other.run()) == plain(root, running + late)
    assert prompts(other) == 1


def test_a_rank_with_nothing_else_to_do_waits_without_computing(root):
    other, gate = pulling(root, siblings(1, "y"))
    for _ in range(3):
        assert not other.step() and not other.idle and other.last_step_kind == ""
    gate.set_result(None)
    assert [output.request_id for output in other.run()] == ["y0"]


@pytest.mark.parametrize("spoil", [flip, truncate, lambda path: path.chmod(0o644)], ids=["flip", "truncate", "mode"])
def test_a_damaged_prompt_is_counted_and_computed(root, caplog, spoil):
    one, other = sharing(root, 0), sharing(root, 1)
    generate(one, siblings(1))
    written(one)
    spoil(*files_in(root))
    wanted = siblings(3, "b")
    with caplog.at_level(logging.WARNING):
        outputs = by_id(generate(other, wanted))
    assert outputs == plain(root, wanted) and prompts(other) == 0 and figures(other) == (0, 0, 0, 3)
    (record,) = (record for record in caplog.records if "is damaged" in record.message)
    assert not any(isinstance(arg, Exception) for arg in record.args) and all_free(other)
    written(other)
    for made in (one, sharing(root, 2)):
        with caplog.at_level(logging.WARNING):
            generate(made, siblings(3, "c"))
        written(made)
    assert [one for one in caplog.records if "is damaged" in one.message] == [record]
    assert prompts(made) == len(files_in(root)) == 1, "the file was written again"
    generate(one, siblings(1, "d", prompt=PROMPT[::-1]))
    written(one)
    assert len(files_in(root)) == 2


@pytest.mark.parametrize("routed", [True, False])
def test_routing_is_shared_where_it_is_recorded(root, routed):
    one = sharing(root, 0, dtype=torch.float64, routing=routed)
    other = sharing(root, 1, dtype=torch.float64, routing=True)
    generate(one, siblings(1))
    written(one)
    wanted = siblings(3, "b")
    outputs = generate(other, wanted)
    whole = generate(sharing(root, 9, dtype=torch.float64, routing=True, suspended="recompute"), wanted)
    routing = {output.request_id: output.routing for output in whole}
    assert all(torch.equal(output.routing, routing[output.request_id]) for output in outputs)
    assert by_id(outputs) == by_id(whole) and (prompts(other), figures(other)[3]) == ((1, 0) if routed else (0, 3))


@pytest.mark.parametrize("event", ["abort", "suspend", "weights", "release"])
def test_what_ends_while_a_prompt_is_read_leaves_nothing(root, event):
    wanted = siblings(3, "y")
    other, gate = pulling(root, wanted)
    if event == "weights":
        other.policy_version = 1
    elif event == "suspend":
        assert {(output.request_id, output.kv_tokens) for output in other.suspend()} == {(f"y{i}", 0) for i in range(3)}
    elif event == "release":
        other.release_kv()
        other.allocate_kv()
    else:
        other.abort(["y1"])
        assert [output.request_id for output in other.step()] == ["y1"]
    gate.set_result(None)
    outputs = by_id(other.run())
    expected = {"abort": {"y0", "y2"}, "suspend": set()}.get(event, {"y0", "y1", "y2"})
    assert outputs.keys() == expected
    assert outputs == {id: one for id, one in plain(root, wanted).items() if id in expected}
    assert prompts(other) == (event in ("abort", "release")) and all_free(other)
    assert not other.scheduler.waiting.held and not other.pooled._entries


def test_new_weights_wait_for_the_file_that_is_being_written(root, monkeypatch):
    one, begun = sharing(root), threading.Event()
    park = one.pooled.store.park

    def slow(key, **content):
        begun.set()
        time.sleep(0.2)
        return park(key, **content)

    monkeypatch.setattr(one.pooled.store, "park", slow)
    generate(one, siblings(1) + siblings(1, "b", (7, *PROMPT[1:])))
    one.parked.settle()
    assert begun.wait(60) and len(one.pooled._writes) == 2
    one.policy_version = 1
    assert all_free(one) and not files_in(root) and one.parked_kv_bytes == 0
    one.pooled.store.writer.submit(len, ()).result()
    assert not files_in(root)


def test_a_prompt_for_whose_blocks_there_is_no_room_waits_for_it(root):
    wanted = siblings(3, "x", PROMPT[:9], 40) + siblings(1, "y")
    other, gate = pulling(root, wanted, max_kv_tokens=7 * 16, max_length=112)
    gate.set_result(None)
    machine.wait_for(lambda: not other.step() and other.scheduler.waiting, 20)
    assert other.scheduler.waiting.first.parked
    assert by_id(other.run()) == plain(root, wanted, max_length=112) and prompts(other) == 1


def test_a_prompt_that_was_read_but_not_admitted_is_parked_by_a_suspended_engine(root):
    wanted, had = siblings(1, "x", PROMPT[:9], 40) + siblings(2, "y"), {}
    other, gate = pulling(root, wanted, max_seqs=1)
    gate.set_result(None)
    machine.wait_for(lambda: not other.step() and other.scheduler.waiting, 20)
    suspended = other.suspend()
    assert sorted(output.kv_tokens for output in suspended if not output.tokens) == [0, 64] and all_free(other)
    moved(wanted, generate(sharing(root, 2), moved(wanted, suspended, had)), had)
    assert had == plain(root, wanted)


def test_the_sibling_that_is_admitted_first_is_restored(root):
    wanted = [replace(one, priority=int(number != 1)) for number, one in enumerate(siblings(3, "y"))]
    other, gate = pulling(root, wanted)
    gate.set_result(None)
    machine.wait_for(lambda: other.step() or prompts(other), 20)
    other.run()
    assert other.counters.kv_restored_tokens == 64 and other.counters.prefix_hit_tokens == 2 * 70


def test_host_memory_is_used_again_by_an_engine_that_only_reads(root):
    one, other, held = sharing(root, 0), sharing(root, 1), []
    for number in range(4):
        generate(one, siblings(1, "a", (number + 2, *PROMPT)))
        written(one)
        generate(other, siblings(2, "b", (number + 2, *PROMPT)))
        held.append(other.pooled._memory.nbytes)
    assert held == held[:1] * 4 and prompts(other) == 4


def test_an_engine_reads_no_more_prompts_than_it_may_park(root):
    one = sharing(root, 0)
    wanted = [replace(siblings(1, f"r{number}-", (number, *PROMPT * 3))[0]) for number in range(2, 12)]
    generate(one, wanted)
    written(one)
    other = sharing(root, 1, max_parked_mib=1)
    other.submit(wanted)
    other._take_orders()
    assert 0 < len(other.pooled._reads) < 10 and other.pooled.blocks * other.cache.block_bytes <= 1 << 20
    assert by_id(other.run()) == plain(root, wanted) and 0 < prompts(other) < 10 and all_free(other)


def test_of_a_prompt_whose_beginning_is_cached_the_rest_is_copied(root):
    one, other = sharing(root, 0), sharing(root, 1)
    for made, length in ((one, 70), (other, 40)):
        generate(made, siblings(1, "a", PROMPT[:length]))
        written(made)
    wanted = siblings(2, "b")
    assert by_id(generate(other, wanted)) == plain(root, wanted)
    assert prompts(other) == 1 and other.counters.prefix_hit_tokens == 70


def test_more_than_the_host_may_hold_is_not_shared(root, monkeypatch):
    made = sharing(root)
    monkeypatch.setattr("fusion.inference.pooled_prompts.MAX_UNWRITTEN_BYTES", 5 * made.cache.block_bytes)
    generate(made, siblings(1) + siblings(1, "b", (7, *PROMPT[1:])))
    written(made)
    assert len(files_in(root)) == 1


def journey(root, seed):
    """Random groups on three engines: siblings at random times on random engines, in chunks, aborted, suspended, under
    new weights, with damaged and missing files. Returns the requests, what was generated, versions, and the engines."""
    draw = random.Random(seed)
    limit = draw.choice((None, 1 << 16))
    engines = [sharing(root, rank, max_kv_tokens=512, spec=KVPoolSpec("run", limit)) for rank in range(3)]
    weights, version, had, versions = Weights(engines[0]), 0, {}, {}
    wanted = [
        one
        for group in range(3)
        for one in siblings(4, f"{group}-", (group + 2, *PROMPT[: draw.choice((20, 40, 70))]), 30, priority=group % 2)
    ]
    todo = list(wanted)
    try:
        while todo or any(made.scheduler.unfinished for made in engines):
            draw.shuffle(todo)
            count = draw.randint(0, len(todo))
            for request in todo[:count]:
                draw.choice(engines).submit([replace(request, chunk_tokens=draw.choice((0, 5, 12)))])
            todo, event = todo[count:], draw.random()
            outputs = [output for made in engines for output in steps(made, draw.randint(1, 6))]
            made = draw.choice(engines)
            if event < 0.15:
                outputs += made.suspend()
                made.resume()
            elif event < 0.25:
                made.release_kv()
                made.allocate_kv()
            elif event < 0.35:
                made.abort([draw.choice(wanted).id])
                outputs += made.step()
            elif event > 0.9:
                version += 1
                weights.set(version)
                for made in engines:
                    made.policy_version = version
            elif event > 0.85:
                for path in files_in(root)[:1]:
                    draw.choice((flip, truncate, Path.unlink))(path)
            for output in outputs:
                versions.setdefault(output.request_id, []).extend(output.versions)
            todo += moved(wanted, outputs, had)
    finally:
        weights.set(0)
    return wanted, had, versions, engines


def computed_alone(root, wanted, versions):
    """What an engine without a pool generates under the same versions of the weights."""
    made, had = sharing(root, 9, suspended="recompute"), {}
    weights = Weights(made)
    try:
        for version in sorted({version for of_one in versions.values() for version in of_one}):
            weights.set(version)
            made.policy_version = version
            again = [replace(one, response=tuple(had[one.id][0]) if one.id in had else ()) for one in wanted]
            counts = {id: of_one.count(version) for id, of_one in versions.items()}
            again = [replace(one, chunk_tokens=counts[one.id]) for one in again if counts[one.id]]
            moved(wanted, generate(made, again), had)
    finally:
        weights.set(0)
    return had


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_every_response_is_that_of_engines_that_compute_every_prompt(seed):
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        wanted, had, versions, engines = journey(Path(folder), seed)
        assert had == computed_alone(Path(folder), wanted, versions) and len(had) == len(wanted)
        for made in engines:
            made.policy_version += 1
            written(made)
            assert not made.pooled._entries and not made.pooled._pulls and not made.scheduler.waiting.held
            made.pooled.store.close()
        assert not [path for path in Path(folder).rglob("*") if path.is_file()]

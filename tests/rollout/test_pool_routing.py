"""Requests whose KV is in the machine's pool: to their KV while the engines are balanced; each copy is freed once."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fusion.rollout import EngineRoom, PoolRouting, RequestBuffer, SuspendedSample

SPREAD, PULL = 2, 10


@settings(max_examples=100)
@given(st.integers(1, 4), st.none() | st.integers(1, 8), st.randoms(use_true_random=False))
def test_kv_in_the_pool_is_used_from_where_it_is_or_freed_there(engines, most, random):
    buffer, added = RequestBuffer(pool=PoolRouting(SPREAD, PULL)), 0
    files: dict[str, int] = {}
    """Request → engine that has parked its KV, as far as that engine knows"""
    used: dict[str, int] = {}
    """Files that another engine reads: they are freed when the request leaves it"""
    held: dict[str, int] = {}
    for _ in range(60):
        match random.choice(["add", "dispatch", "dispatch", "suspend", "suspend", "finish", "weights"]):
            case "add":
                buffer.add(f"g{added}", [f"g{added}/{k}" for k in range(3)], 5, 100)
                added += 1
            case "dispatch":
                running = sorted(random.sample(range(engines), random.randint(1, engines)))
                found = buffer.dispatch(running, most and EngineRoom(most))
                counts = {engine: buffer.num_running_on(engine) for engine in running}
                for engine, entries in found.items():
                    assert most is None or not entries or counts[engine] <= most
                    for entry in entries:
                        held[entry.id] = engine
                        home = files.get(entry.id)
                        assert home is not None or not entry.kv_tokens, "KV of other weights is not asked for"
                        if home is not None and home != engine and entry.kv_tokens:
                            assert entry.kv_tokens >= PULL
                            used[entry.id] = files.pop(entry.id)
                        elif home == engine:
                            del files[entry.id]  # it takes its own back
            case "weights" if random.random() < 0.3:
                buffer.observe_new_weights()
                files.clear()
            case "suspend" if held:
                id = random.choice(sorted(held))
                engine, tokens = held.pop(id), random.choice([0, 5, 20])
                generated = buffer.entries[id].generated + 1
                rank = 0 if tokens else None
                buffer.suspend(engine, SuspendedSample(id, generated, "row", (0, 0), kv_rank=rank, kv_tokens=tokens))
                if tokens:
                    files[id] = engine
            case "finish" if held:
                id = random.choice(sorted(held))
                del held[id]
                buffer.finish({id: 7})
        for engine, ids in buffer.take_left_kv().items():
            for id in ids:
                left = used if id in used else files
                assert left.pop(id) == engine, "by the engine that has written it, once"
        entries = buffer.entries
        assert all(entries[id].kv == (engine, 0) for id, engine in files.items())
        assert all(entries[id].state == "waiting" for id in files)
        assert {*used} <= {*held}, "no file is left when its request has left the engine that has read it"


@pytest.mark.parametrize("most", [None, 40])
def test_it_returns_to_its_kv_until_that_engine_has_more_than_the_spread(most):
    buffer = RequestBuffer(pool=PoolRouting(SPREAD, PULL))
    buffer.add("a", [f"a/{k}" for k in range(8)], 5, 100)
    buffer.dispatch([0], most and EngineRoom(most))
    for k in range(8):
        buffer.suspend(0, SuspendedSample(f"a/{k}", 20, "row", (0, 0), kv_rank=0, kv_tokens=24 if k % 2 else 4))
    found = buffer.dispatch([0, 1], most and EngineRoom(most))
    assert [[entry.id for entry in found[engine]] for engine in (0, 1)] == [
        ["a/0", "a/1", "a/2", "a/4", "a/6"],
        ["a/3", "a/5", "a/7"],
    ]
    assert {entry.kv_tokens for entry in found[1]} == {24}, "longer KV is pulled"
    assert not buffer.take_left_kv(), "as long as it may be read"
    buffer.finish({"a/3": 30})
    assert buffer.take_left_kv() == {0: ["a/3"]}

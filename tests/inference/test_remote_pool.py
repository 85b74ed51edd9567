"""KV that an engine of another machine continues: to the bit, of these weights and tokens, or computed again."""

from __future__ import annotations

import random
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from distqueue.payload.sweep import memory
from fusion.rollout.kv_pool.pool import KVPoolSpec
from fusion.rollout.kv_pool.remote import PeerGone, PeerLate
from tests.inference.engines import by_id, generate
from tests.inference.keeping import long, steps
from tests.inference.pooling import files_in, moved, pooling
from tests.inference.test_pooled import Weights, all_free, flip, mixed
from tests.rollout.kv_pool.peers import direct_peers, pools_of

ROUTED = dict(dtype=torch.float64, routing=True)


@contextmanager
def machines(count=2, *, prefill_s_per_token=1.0, suspended="pool", **options):
    """Engines on machines of their own, numbered alike, and the servers of their machines."""
    with tempfile.TemporaryDirectory(dir=memory()) as folder:
        roots = [Path(folder) / str(number) for number in range(count)]
        for root in roots:
            root.mkdir()
        peers = direct_peers(roots, KVPoolSpec("run"))
        pools = [pools_of(peers, here, prefill_s_per_token=prefill_s_per_token) for here in range(count)]
        options |= {"suspended": suspended}
        yield [pooling(root, rank, peers=pools[rank], **options) for rank, root in enumerate(roots)], peers, roots


def from_engine(home, requests):
    """As the controller sends them: with the engine that has parked their KV."""
    return [replace(request, kv_engine=home if request.kv_tokens else None) for request in requests]


def counted(made):
    """Pulls, of these from another machine, misses, damaged."""
    return tuple(int(made.status()[f"kv_pool_{name}"]) for name in ("pulls", "remote", "misses", "damaged"))


@pytest.mark.parametrize("options", [{}, ROUTED], ids=["plain", "routing"])
def test_chunks_on_machines_in_turn_are_the_uninterrupted_response(options):
    wanted = long(4)
    with machines(3, **options) as (engines, peers, roots):
        whole = by_id(generate(pooling(roots[0], suspended="recompute", **options), wanted))
        had, turn, again = {}, 0, wanted
        while again:
            outputs = generate(engines[turn % 3], [replace(request, chunk_tokens=13) for request in again])
            again = from_engine(turn % 3, moved(wanted, outputs, had))
            turn += 1
        assert had == whole
        pulls, remote, *others = map(sum, zip(*map(counted, engines), strict=True))
        assert pulls == remote > 8 and others == [0, 0]
        assert sum(made.status()["recomputed_tokens"] for made in engines) == 0
        assert not [path for root in roots for path in files_in(root)], "each file was used once"
        assert all(all_free(made) for made in engines)


def begun(one, wanted, had):
    return from_engine(0, moved(wanted, generate(one, [replace(request, chunk_tokens=20) for request in wanted]), had))


CAUSES = {
    "damaged in the file": (lambda peer, files: [flip(path) for path in files[:2]], (2, 2, 0, 2)),
    "damaged on the way": (lambda peer, files: setattr(peer, "spoils", True), (0, 0, 0, 4)),
    "gone": (lambda peer, files: setattr(peer, "fails", PeerGone("host-a")), (0, 0, 4, 0)),
    "late": (lambda peer, files: setattr(peer, "fails", PeerLate("host-a")), (0, 0, 4, 0)),
    "removed": (lambda peer, files: [path.unlink() for path in files[:1]], (3, 3, 1, 0)),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_does_not_arrive_whole_is_counted_and_computed_again(cause):
    spoil, expected = CAUSES[cause]
    wanted, had = long(4), {}
    with machines() as ((one, other), peers, roots):
        again = begun(one, wanted, had)
        spoil(peers[0], files_in(roots[0]))
        moved(wanted, generate(other, again), had)
        assert had == by_id(generate(pooling(roots[0], suspended="recompute"), wanted))
        assert counted(other) == expected and all_free(other)
        one.forget([request.id for request in wanted])
        one.run()
        assert not files_in(roots[0]) and one.parked_kv_bytes == 0


def test_without_room_or_without_its_engine_no_machine_is_asked():
    wanted = long(10, prompt=tuple(range(2, 30)) * 8, tokens=30)
    with machines(max_parked_mib=1) as ((one, other), peers, _):
        again = begun(one, wanted, {})
        parked = sum(request.kv_tokens > 0 for request in again)
        other.submit([replace(request, kv_engine=None) for request in again[:2]])
        other._apply_orders(other._exchange())
        assert not peers[0].asked
        other.submit(again[2:])
        other._apply_orders(other._exchange())
        assert other.pooled.blocks * other.cache.block_bytes <= 1 << 20
        assert len(peers[0].asked) == other.counters.kv_pool_remote < parked


def test_an_engine_fetches_only_after_it_has_measured_its_prefill():
    wanted = long(4)
    with machines(prefill_s_per_token=None) as ((one, other), peers, _):
        first, *others = begun(one, wanted, {})
        generate(other, [first])
        assert counted(other) == (0, 0, 1, 0) and not peers[0].asked
        rate = other.pooled._peers._plan.prefill_s_per_token
        assert rate > 0
        other.pooled._peers._plan.prefill_s_per_token = 1.0  # however fast this machine is
        generate(other, others)
        assert counted(other) == (3, 3, 1, 0)


def journey(suspended, seed):
    """Random requests on two machines: in chunks, suspended, moved, under new weights, with damaged files. Returns
    tokens, log-probabilities and versions of each."""
    draw = random.Random(seed)
    with machines(suspended=suspended, max_kv_tokens=1024) as (engines, peers, roots):
        weights, version = Weights(engines[0]), 0
        wanted, had, versions = mixed(40), {}, {}
        todo = list(wanted)
        try:
            while todo or any(made.scheduler.unfinished for made in engines):
                for request in todo:
                    engine, chunk = draw.randrange(2), draw.choice((0, 5, 12))
                    engines[engine].submit([replace(request, chunk_tokens=chunk)])
                todo, event = [], draw.random()
                counts = [draw.randint(1, 8) for _ in engines]
                outputs = [steps(made, count) for made, count in zip(engines, counts, strict=True)]
                if event < 0.2:
                    number = draw.randrange(2)
                    outputs[number] += engines[number].suspend()
                    engines[number].resume()
                if event > 0.85:
                    version += 1
                    weights.set(version)
                    for made in engines:
                        made.policy_version = version
                if 0.5 < event < 0.6:
                    for path in [path for root in roots for path in files_in(root)][:1]:
                        flip(path)
                if 0.6 < event < 0.7:
                    peers[draw.randrange(2)].spoils ^= True
                for number, some in enumerate(outputs):
                    for output in some:
                        versions.setdefault(output.request_id, []).extend(output.versions)
                    todo += from_engine(number, moved(wanted, some, had))
        finally:
            weights.set(0)
        if suspended == "pool":
            for made in engines:
                assert not made.pooled._entries and all_free(made)
                made.pooled.store.close()
            assert not [path for root in roots for path in files_in(root)]
        return had, versions


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10**6))
def test_kv_of_other_weights_is_never_served(seed):
    """Every token is what it is where all KV is computed again: by the weights that its version names."""
    assert journey("pool", seed) == journey("recompute", seed)

"""KV that moves between engines of several cards: every rank its own part, and all decide alike."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch

from distqueue.payload.sweep import memory
from fusion.inference import EmbeddedEngine
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.offload import HostPool
from fusion.rollout.drafts.drafter import TextDrafter
from fusion.rollout.kv_pool.files import KVFiles
from fusion.rollout.kv_pool.pool import KVPoolSpec
from tests.helpers import run_ranks
from tests.inference.engines import checkpoint
from tests.inference.keeping import long
from tests.inference.pooling import LIMITS, figures, moved
from tests.pairwise import axes, is_wide, thinned
from tests.rollouts import rollout_config


def pooled_rank(rank, device, folder, root, parallel, rollout, spoiling=()):
    """The same requests on one engine without a break, then in chunks on two in turn. ``spoiling``: ranks that lose
    their file of every second request that the first engine parks. Returns what ended here without and with breaks,
    and the figures and recomputed tokens of both engines."""
    mesh = Mesh.create(parallel)
    config = rollout_config(**(LIMITS | rollout))
    loaded = Transformer(ModelConfig.from_hf(folder), mesh, device, batch_invariant=True)
    load_weights(loaded, folder)
    routing = mesh.parallel.ep > 1
    engines = []
    for number in range(2):
        store = KVFiles(KVPoolSpec("run"), number * parallel.world + rank, Path(root))
        drafter, pool = TextDrafter.of(config.drafts), HostPool(device)
        made = EmbeddedEngine(loaded, mesh, device, config, 5, routing, pool, drafter=drafter, kv_store=store)
        made.allocate_kv()
        engines.append(made)
    whole, had, wanted = {}, {}, long(8, tokens=28)
    if rank == 0:
        engines[0].submit(wanted)
    for output in engines[0].run():
        whole[output.request_id] = output.tokens, output.logprobs, _listed(output.routing)
    again, turn, ended, routes = wanted, 0, {}, {}
    while again:
        made, turn = engines[turn % 2], turn + 1
        if rank == 0:
            made.submit([replace(request, chunk_tokens=12) for request in again])
        everyone = [None] * parallel.world
        torch.distributed.all_gather_object(everyone, made.run())
        outputs = [output for mine in everyone for output in mine]
        for output in outputs:
            routes.setdefault(output.request_id, []).append(output.routing)
        again = moved(wanted, outputs, had)
        ended |= {output.request_id: had[output.request_id] for output in everyone[rank]}
        if rank in spoiling and turn == 1:
            for id in [request.id for request in again][::2]:
                if name := made.pooled.store._names.get(id):
                    made.pooled.store._folders["memory"].remove(name)
    ended = {id: (*had[id], _listed(torch.cat(routes[id]) if routing else None)) for id in had if id in whole}
    found = [(figures(made), made.status()["recomputed_tokens"], made.parked.host_bytes) for made in engines]
    for made in engines:
        made.pooled.store.close()
        made.release_kv()
    return whole, ended, found


def _listed(routing):
    return None if routing is None else routing.tolist()


def run_world(parallel, spoiling=(), device="emulated", folder=None, **rollout):
    with tempfile.TemporaryDirectory(dir=memory()) as root:
        arguments = folder or checkpoint(), root, parallel, rollout, spoiling
        results = run_ranks(pooled_rank, parallel.world, *arguments, device=device)
        assert not [*Path(root).iterdir()]
    whole, broken = ({id: one for mine in results for id, one in mine[run].items()} for run in (0, 1))
    assert whole == broken and len(whole) == 8
    found = [mine[2] for mine in results]
    assert all(one == found[0] for one in found), "the figures of the engine, on every rank"
    return found[0]


WORLDS = [Parallel(2, tp=2), Parallel(2, ep=2), Parallel(2, pp=2), Parallel(4, tp=2, ep=2), Parallel(4, ep=2, pp=2)]
CASES = list(product(WORLDS, ("none", "siblings"), (True, False)))


@pytest.mark.parametrize(
    ("parallel", "drafts", "prefix_cache"),
    thinned(CASES, lambda case: (*axes(case[0]), *case[1:]), extended=lambda case: is_wide(case[0])),
    ids=str,
)
def test_chunks_on_two_engines_in_turn_are_the_uninterrupted_response(parallel, drafts, prefix_cache):
    window = {} if drafts == "none" else dict(source=drafts)
    for (hits, pulls, misses, damaged), recomputed, _ in run_world(parallel, prefix_cache=prefix_cache, **window):
        assert pulls > 0 == hits == misses == damaged == recomputed


@pytest.mark.parametrize(
    "parallel",
    [
        pytest.param(Parallel(2, tp=2), marks=pytest.mark.extended),
        Parallel(2, pp=2),
        pytest.param(Parallel(4, ep=2, pp=2), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_what_one_rank_does_not_find_all_compute_again(parallel):
    """The last rank has lost half of its files, of which the rank that counts has its own."""
    ((_, _, first_misses, _), _, _), ((_, pulls, misses, _), recomputed, _) = run_world(
        parallel, spoiling=(parallel.world - 1,)
    )
    assert first_misses == 0 < misses and pulls > 0 < recomputed


@pytest.mark.extended
def test_every_copy_is_waited_for():
    run_world(Parallel(2, tp=2), device="adversarial")

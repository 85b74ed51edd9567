"""KV that leaves cards of an engine and comes back: every rank its own part, and all alike."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from fusion.inference import EmbeddedEngine
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.offload import HostPool
from tests.helpers import run_ranks
from tests.inference.engines import checkpoint
from tests.inference.keeping import LIMITS, long, resumed, steps
from tests.pairwise import axes, is_wide, thinned
from tests.rollouts import rollout_config


def away_rank(rank, device, folder, parallel, rollout, chunks=0):
    """The same requests without a break, then away and back twice, suspended or at the end of their chunks: of each
    what ended here, the engine's figures, and the bytes that were parked while it was away and at the end."""
    found = []
    for breaks in (0, 2):
        mesh = Mesh.create(parallel)
        config = rollout_config(**(LIMITS | dict(batch_invariant=True) | rollout))
        loaded = Transformer(ModelConfig.from_hf(folder), mesh, device, batch_invariant=True)
        load_weights(loaded, folder)
        made = EmbeddedEngine(loaded, mesh, device, config, 5, memory=HostPool(device))
        made.allocate_kv()
        wanted, had, away = long(8, tokens=30, chunk_tokens=chunks if breaks else 0), {}, []
        again = wanted
        for _ in range(breaks):
            if rank == 0:
                made.submit(again)
            outputs = made.run() if chunks else steps(made, 12) + made.suspend()
            away.append(made.parked.host_bytes)
            made.release_kv()
            made.policy_version += 1
            made.allocate_kv()
            made.resume()
            everyone = [None] * parallel.world
            torch.distributed.all_gather_object(everyone, outputs)
            again = resumed(wanted, [output for mine in everyone for output in mine], had)
        if rank == 0:
            made.submit([replace(request, chunk_tokens=0) for request in again])
        outputs = made.run()
        resumed(wanted, outputs, had)
        ended = {output.request_id: had[output.request_id] for output in outputs}
        found.append((ended, made.status(), away, made.parked.host_bytes))
        made.release_kv()
    return found


def check_worlds(results):
    whole, broken = ({id: one for mine in results for id, one in mine[run][0].items()} for run in (0, 1))
    assert whole == broken and len(whole) == 8
    for _, (_, status, away, left) in results:
        assert min(away) > 0 and not left, "every rank has its part, until it is back"
        assert status["kv_restored_tokens"] > 0 == status["recomputed_tokens"]


WORLDS = [Parallel(2, tp=2), Parallel(2, pp=2), Parallel(4, tp=2, ep=2), Parallel(4, ep=2, pp=2)]


CASES = list(product(WORLDS, (True, False)))


@pytest.mark.parametrize(
    ("parallel", "prefix_cache"),
    thinned(CASES, lambda case: (*axes(case[0]), case[1]), extended=lambda case: is_wide(case[0])),
    ids=str,
)
def test_every_rank_parks_its_own_part_and_all_decide_alike(parallel, prefix_cache):
    check_worlds(run_ranks(away_rank, parallel.world, checkpoint(), parallel, dict(prefix_cache=prefix_cache)))


def test_every_rank_parks_its_own_part_of_a_chunk():
    check_worlds(run_ranks(away_rank, 2, checkpoint(), Parallel(2, ep=2), {}, 12))


@pytest.mark.extended
def test_every_rank_of_a_larger_world_parks_its_own_part_of_a_chunk():
    check_worlds(run_ranks(away_rank, 4, checkpoint(), Parallel(4, tp=2, ep=2), {}, 12))


def copies_rank(rank, device, folder):
    """Whether the copy was done before it was waited for, and whether host and card hold the same behind that."""
    loaded = Transformer(ModelConfig.from_hf(folder), Mesh.single(), device)
    load_weights(loaded, folder)
    made = EmbeddedEngine(loaded, loaded.mesh, device, rollout_config(**LIMITS), 5, memory=HostPool(device))
    made.allocate_kv()
    made.submit(long(1))
    steps(made, 5)
    (seq,) = made.scheduler.running
    made.parked.park([seq])
    entry = made.parked._entries["r0"]
    early = entry.copied.query()
    made.parked.settle()
    rows = [*seq.blocks, *(block + made.cache.blocks for block in seq.blocks)]
    pairs = zip(made.parked._on_host(entry), made.cache.pools, strict=True)
    return early, all(torch.equal(layer, pool[rows].cpu()) for layer, pool in pairs)


def test_kv_is_whole_on_the_host_once_that_was_waited_for():
    assert run_ranks(copies_rank, 1, checkpoint(), device="adversarial") == [(False, True)]


def test_every_copy_is_waited_for():
    check_worlds(run_ranks(away_rank, 2, checkpoint(), Parallel(2, tp=2), {}, device="adversarial"))

"""Prompts that engines of several cards share: every rank its own part, and all decide alike."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from distqueue.payload.sweep import memory
from fusion.inference import EmbeddedEngine
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.offload import HostPool
from fusion.rollout.kv_pool.files import KVFiles
from fusion.rollout.kv_pool.pool import KVPoolSpec
from tests.helpers import run_ranks
from tests.inference.engines import checkpoint
from tests.inference.pooling import LIMITS, files_in
from tests.inference.test_pooled_prompts import siblings, written
from tests.rollouts import rollout_config


def sharing_rank(rank, device, folder, root, parallel, spoiling, rollout):
    """Four groups: a response of each on the first engine, then three on the second while others decode there, then all
    on an engine that shares nothing. ``spoiling``: ranks that lose all of their files but one in between. Returns what
    the second and the last one ended here, and the figures of the second."""
    mesh = Mesh.create(parallel)
    loaded = Transformer(ModelConfig.from_hf(folder), mesh, device, batch_invariant=True)
    load_weights(loaded, folder)
    engines = []
    for number, suspended in enumerate(("pool", "pool", "recompute")):
        pull = {"pull_tokens": 16} if suspended == "pool" else {}
        store = KVFiles(KVPoolSpec("run"), number * parallel.world + rank, Path(root)) if pull else None
        config = rollout_config(**(LIMITS | rollout | dict(suspended=suspended) | pull))
        pool = HostPool(device)
        engines.append(EmbeddedEngine(loaded, mesh, device, config, 5, parallel.ep > 1, pool, kv_store=store))
        engines[-1].allocate_kv()
    one, other, plain = engines
    groups = [tuple((number * (group + 3)) % 29 + 2 for number in range(80)) for group in range(4)]
    wanted = [one for group, prompt in enumerate(groups) for one in siblings(3, f"g{group}-", prompt)]
    busy = siblings(4, "busy", (3, 4, 5), 30)
    firsts = [replace(one, id=f"first {one.id}") for one in wanted[::3]]
    if rank == 0:
        one.submit(firsts)
    one.run()
    written(one)
    torch.distributed.barrier()
    if rank in spoiling:
        for name in list(one.pooled.store._names.values())[1:]:
            one.pooled.store._folders["memory"].remove(name)
    torch.distributed.barrier()
    ended = []
    for made in (other, plain):
        if rank == 0:
            made.submit(busy)
        outputs = [output for _ in range(3) for output in made.step()]
        if rank == 0:
            made.submit(wanted)
        outputs += made.run()
        routing = {output.request_id: None if output.routing is None else output.routing.tolist() for output in outputs}
        ended.append({one.request_id: (one.tokens, one.logprobs, routing[one.request_id]) for one in outputs})
    status = other.status()
    found = {name: int(status[f"kv_pool_{name}"]) for name in ("prompts", "damaged")} | {
        "files": len(files_in(root)),
        "under way": len(other.pooled._pulls) + len(other.scheduler.waiting.held),
    }
    torch.distributed.barrier()
    for made in engines:
        if made.pooled is not None:
            made.policy_version = 1
            made.pooled.store.close()
        made.release_kv()
    return *ended, found


WORLDS = [
    Parallel(2, tp=2),
    pytest.param(Parallel(2, ep=2), marks=pytest.mark.extended),
    Parallel(2, pp=2),
    Parallel(4, tp=2, ep=2),
    pytest.param(Parallel(4, ep=2, pp=2), marks=pytest.mark.extended),
]


def run_world(parallel, spoiling=(), device="emulated", **rollout):
    with tempfile.TemporaryDirectory(dir=memory()) as root:
        arguments = checkpoint(), root, parallel, spoiling, rollout
        results = run_ranks(sharing_rank, parallel.world, *arguments, device=device)
        assert not [*Path(root).iterdir()]
    shared, alone = ({id: one for mine in results for id, one in mine[run].items()} for run in (0, 1))
    assert shared == alone and len(shared) == 16
    found = [mine[2] for mine in results]
    assert all(one["prompts"] == found[0]["prompts"] and not one["under way"] and not one["damaged"] for one in found)
    return found[0]["prompts"]


@pytest.mark.parametrize("parallel", WORLDS, ids=str)
def test_prompts_are_read_by_all_ranks_or_computed_by_all(parallel):
    assert 4 <= run_world(parallel) <= 4 * parallel.dp, "by each attention rank at most once"


@pytest.mark.parametrize("parallel", [Parallel(2, tp=2), Parallel(2, pp=2)], ids=str)
def test_what_one_rank_does_not_find_all_compute(parallel):
    assert run_world(parallel, spoiling=(parallel.world - 1,)) == 1


@pytest.mark.extended
def test_every_copy_is_waited_for():
    run_world(Parallel(2, tp=2), device="adversarial")

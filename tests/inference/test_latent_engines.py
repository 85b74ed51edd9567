"""Engines of models with latent attention: whatever happens to cached latents, responses are the uninterrupted ones to
the bit, and a token takes as many bytes as the cost model counts."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from distqueue.payload.sweep import memory
from fusion.costmodel.shape import Shape
from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh, ModelConfig, PackedAttention, Parallel, Transformer, load_weights, routing_of
from fusion.offload import HostPool
from fusion.rollout.drafts.drafter import TextDrafter
from tests.families import family_checkpoint, family_fields
from tests.helpers import run_ranks
from tests.inference.engines import OPERATORS, by_id, engine, generate, generate_brokenly, model, requests, tokens
from tests.inference.keeping import keeping, long, resumed, steps, suspend_and_return
from tests.inference.pooling import figures, pooling
from tests.inference.test_drafts_exact import rank as drafted_rank
from tests.inference.test_parked_worlds import away_rank, check_worlds
from tests.inference.test_pooled import in_turns
from tests.inference.test_pooled_worlds import run_world
from tests.inference.test_remote_pool import counted, from_engine, machines
from tests.inference.test_verification import Guesses, truth_of
from tests.rollouts import rollout_config

KIND = "deepseek_v3"
DRAFTED = [("fused", torch.float32, 1), ("composed", torch.float32, 3), ("composed", torch.bfloat16, 1)]
"""Operators, type and children of drafts in the default run"""


@cache
def folder() -> str:
    return family_checkpoint(tempfile.mkdtemp(), KIND, initializer_range=0.3)


def invariant(dtype: torch.dtype = torch.float32, **rollout: Any) -> EmbeddedEngine:
    return engine(dtype, folder=folder(), batch_invariant=True, **rollout)


@pytest.mark.parametrize(
    ("operators", "dtype"),
    [pytest.param(*one, marks=() if one[1] is torch.bfloat16 else pytest.mark.extended) for one in OPERATORS],
    ids=str,
    indirect=["operators"],
)
def test_batch_invariant_logprobs_are_bitwise_equal_under_any_history(operators, dtype):
    wanted = requests(6, max_tokens=20)
    want = by_id(generate(invariant(dtype), wanted))
    for seed in range(3):
        made = invariant(dtype, max_kv_tokens=(None, 160, 192)[seed], max_batch_tokens=(512, 70, 64)[seed])
        assert generate_brokenly(made, wanted, seed) == want
    alone = {}
    for request in wanted:
        alone |= by_id(generate(invariant(dtype, prefix_cache=False), [request]))
    assert alone == want


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (1, 2))])
def test_no_history_changes_what_is_sampled(seed):
    """Also where prompts and long chunks are expanded."""
    wanted = requests(12)
    want = tokens(generate(engine(torch.float64, folder=folder()), wanted))
    made = engine(torch.float64, folder=folder(), max_kv_tokens=160, max_batch_tokens=70)
    assert {name: pair[0] for name, pair in generate_brokenly(made, wanted, seed).items()} == want
    assert made.status()["preemptions"] > 0 or made.status()["recomputed_tokens"] > 0
    assert made.scheduler.blocks.available == made.scheduler.blocks.count


def test_siblings_share_latents_of_their_prompt():
    prompt = tuple(range(2, 30)) * 3
    wanted = [Request(f"r{i}", prompt, SamplingParams(max_tokens=20)) for i in range(4)]
    made = invariant()
    assert by_id(generate(made, wanted)) == by_id(generate(invariant(prefix_cache=False), wanted))
    assert made.status()["prefix_hit_tokens"] == 3 * len(prompt)


@pytest.mark.parametrize(
    ("operators", "dtype", "children"),
    [
        pytest.param(*one, children, marks=() if (*one, children) in DRAFTED else pytest.mark.extended)
        for one in OPERATORS
        for children in (1, 3)
    ],
    ids=str,
    indirect=["operators"],
)
def test_drafts_change_no_token_and_no_logprob(operators, dtype, children):
    wanted = requests(9, max_tokens=20, temperature=0.7)
    plain = by_id(generate(invariant(dtype), wanted))
    for seed in range(2):
        made = invariant(dtype, max_kv_tokens=(None, 400)[seed], max_batch_tokens=(512, 90)[seed])
        made.scheduler.drafter = Guesses(truth_of(plain), children=children, seed=seed)
        assert generate_brokenly(made, wanted, seed) == plain
        assert made.status()["accepted_tokens"] > 20
        assert made.scheduler.blocks.available == made.scheduler.blocks.count


def test_drafts_without_batch_invariance_sample_the_same_tokens():
    """Where there is no fused operator, the rows of a draft are a long chunk each, and absorb."""
    wanted = requests(9, max_tokens=30)
    plain = by_id(generate(engine(torch.float64, folder=folder()), wanted))
    made = engine(torch.float64, folder=folder())
    made.scheduler.drafter = Guesses(truth_of(plain))
    assert tokens(generate(made, wanted)) == {id: one for id, (one, _) in plain.items()}
    assert made.status()["accepted_tokens"] > 50


def test_latents_that_leave_the_card_come_back_to_the_bit():
    options = dict(folder=folder(), batch_invariant=True)
    wanted, (made, _) = long(6), keeping(**options)
    whole, had, again = by_id(generate(keeping(**options)[0], wanted)), {}, wanted
    while again:
        made.submit(again)
        outputs = steps(made, 11)
        again = resumed(wanted, outputs + suspend_and_return(made, new_version=True), had)
    assert had == whole
    status = made.status()
    assert status["recomputed_tokens"] == 0 < status["kv_restored_tokens"] and made.parked.host_bytes == 0


@pytest.mark.parametrize("drafts", ["none", "siblings"])
def test_chunks_on_two_engines_of_a_machine_are_the_uninterrupted_response(drafts):
    options = dict(folder=folder(), routing=True)
    window = {} if drafts == "none" else dict(source=drafts)
    with tempfile.TemporaryDirectory(dir=memory()) as root:
        engines = [pooling(Path(root), rank, **options, **window) for rank in range(2)]
        for made in engines:
            made.scheduler.drafter = TextDrafter.of(made.config.drafts)
        whole = by_id(generate(pooling(Path(root), suspended="recompute", **options), long(6)))
        assert in_turns(engines, long(6)) == whole
        assert sum(figures(made)[1] for made in engines) > 4
        assert all(figures(made)[2:] == (0, 0) and not made.status()["recomputed_tokens"] for made in engines)


def test_chunks_on_two_machines_are_the_uninterrupted_response():
    wanted, had, turn = long(4), {}, 0
    with machines(2, folder=folder()) as (engines, _, roots):
        whole = by_id(generate(pooling(roots[0], suspended="recompute", folder=folder()), wanted))
        again = wanted
        while again:
            outputs = generate(engines[turn % 2], [replace(request, chunk_tokens=13) for request in again])
            again = from_engine(turn % 2, [replace(one, kv_rank=None) for one in moved_on(wanted, outputs, had)])
            turn += 1
        assert had == whole
        assert all(counted(made)[1] > 0 == counted(made)[2] for made in engines)


def moved_on(wanted, outputs, had):
    by_name = {output.request_id: output.kv_tokens for output in outputs}
    return [replace(request, kv_tokens=by_name[request.id]) for request in resumed(wanted, outputs, had)]


@pytest.mark.parametrize("batch_invariant", [True, False])
def test_routing_is_that_of_one_pass_whatever_the_engine_did(batch_invariant):
    made = engine(
        torch.float64,
        folder=folder(),
        routing=True,
        max_kv_tokens=160,
        max_batch_tokens=70,
        batch_invariant=batch_invariant,
    )
    wanted, collected = requests(9), []
    got, network = generate_brokenly(made, wanted, 1, collected), model(torch.float64, folder=folder())
    for request in wanted:
        sequence = (*request.prompt, *got[request.id][0])
        ids, routed = torch.tensor(sequence, device=network.device.torch_device), []
        with torch.no_grad():
            network(
                ids, torch.arange(len(ids), device=ids.device), PackedAttention([len(ids)], network.operators), routed
            )
        pieces = [one.routing for one in collected if one.request_id == request.id and one.tokens]
        expected = routing_of(routed, len(ids), network.mesh, network.config.num_experts).cpu()
        assert torch.equal(torch.cat(pieces), expected[:-1])


WORLDS = [
    Parallel(2, tp=2),
    pytest.param(Parallel(2, ep=2), marks=pytest.mark.extended),
    pytest.param(Parallel(4, tp=2, ep=2), marks=pytest.mark.extended),
    pytest.param(Parallel(4, tp=2, pp=2), marks=pytest.mark.extended),
]


@pytest.mark.parametrize("parallel", WORLDS, ids=str)
def test_every_rank_parks_its_latents_and_all_decide_alike(parallel):
    check_worlds(run_ranks(away_rank, parallel.world, folder(), parallel, {}))


@pytest.mark.parametrize("parallel", WORLDS, ids=str)
def test_chunks_on_two_engines_of_several_ranks_are_the_uninterrupted_response(parallel):
    for (hits, pulls, misses, damaged), recomputed, _ in run_world(parallel, folder=folder()):
        assert pulls > 0 == hits == misses == damaged == recomputed


@pytest.mark.parametrize("parallel", WORLDS, ids=str)
def test_drafts_change_no_token_and_no_logprob_in_several_ranks(parallel):
    for (plain, drafted), accepted in run_ranks(drafted_rank, parallel.world, folder(), parallel, "mixed", 3):
        assert drafted == plain and len(plain) == 9
        assert accepted > 0


def cached_rank(rank: int, device: Any, folder: str, parallel: Parallel) -> tuple[int, int, int, list[torch.Tensor]]:
    """Bytes of a token in the cache, of what is parked, tokens parked, and the latents of each layer."""
    mesh = Mesh.create(parallel)
    loaded = Transformer(ModelConfig.from_hf(folder), mesh, device)
    load_weights(loaded, folder)
    config = rollout_config(max_length=256, max_seqs=8, suspended="keep")
    made = EmbeddedEngine(loaded, mesh, device, config, memory=HostPool(device))
    made.allocate_kv()
    if rank == 0:
        made.submit(long(2))
    steps(made, 5)
    blocks = sorted({block for seq in made.scheduler.running for block in seq.blocks[:1]})
    latents = [pool[blocks].cpu() for pool in made.cache.pools]
    made.suspend()
    assert made.cache.block_bytes % config.engine.block_size == 0
    return made.cache.block_bytes // config.engine.block_size, made.parked.host_bytes, made.parked.blocks, latents


@pytest.mark.parametrize("parallel", [Parallel(1), Parallel(2, tp=2), Parallel(2, pp=2)], ids=str)
def test_a_token_takes_the_bytes_of_the_cost_model_and_tp_ranks_hold_equal_latents(parallel):
    shape = Shape(KIND, ModelConfig.from_hf(folder()))
    fields = family_fields(KIND)
    found = run_ranks(cached_rank, parallel.world, folder(), parallel)
    for nbytes, parked, blocks, _ in found:
        assert nbytes == shape.kv_bytes(parallel.tp, parallel.pp, itemsize=4)
        assert nbytes == 4 * (fields["kv_lora_rank"] + fields["qk_rope_head_dim"]) * fields["num_hidden_layers"] // (
            parallel.pp
        )
        assert parked == blocks * 16 * nbytes > 0, "every rank parks its own copy"
    if parallel.tp == 2:
        for one, other in zip(found[0][3], found[1][3], strict=True):
            assert torch.equal(one, other) and one.isfinite().all()

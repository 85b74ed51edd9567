"""What outputs say of their routing: that of one forward pass over the whole sequence, whatever the engine did.

In float64, where two passes that add in another order choose the same experts.
"""

from __future__ import annotations

import pytest
import torch

from fusion.inference import EmbeddedEngine, Request, RolloutConfig, SamplingParams
from fusion.model import Mesh, ModelConfig, PackedAttention, Parallel, Transformer, load_weights, routing_of
from tests.helpers import run_ranks
from tests.inference.engines import checkpoint, engine, generate, generate_brokenly, model, requests, tokens
from tests.inference.test_worlds import LAYOUTS
from tests.pairwise import axes, thinned

EXPERTS = 8


def expected(sequence, network=None):
    """uint8 [tokens, layers, k]"""
    network = network or model(torch.float64)
    ids = torch.tensor(sequence, device=network.device.torch_device)
    routed = []
    with torch.no_grad():
        network(ids, torch.arange(len(ids), device=ids.device), PackedAttention([len(ids)]), routed)
    return routing_of(routed, len(ids), network.mesh, EXPERTS)


def check(output, sequence, network=None):
    wanted = expected(sequence, network)
    assert output.routing.dtype is torch.uint8 and output.routing.shape == (len(sequence) - 1, 2, 2)
    assert torch.equal(output.routing, wanted[:-1]), output.request_id


@pytest.mark.parametrize(
    "rollout",
    [dict(), dict(max_seqs=3, max_batch_tokens=8), dict(prefix_cache=False), dict(batch_invariant=True)],
    ids=str,
)
def test_every_token_but_the_last_has_its_routing_under_any_schedule(rollout):
    made, wanted = engine(torch.float64, routing=True, **rollout), requests(12, max_tokens=25)
    outputs = generate(made, wanted)
    for output in outputs:
        check(output, (*output.prompt, *output.tokens))
    assert (made.status()["prefix_hit_tokens"] > 0) == made.config.prefix_cache


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_tells_what_came_back_with_its_blocks_or_was_computed_again(prefix_cache):
    wanted = [Request(f"r{i}", (3, 4, 5), SamplingParams(max_tokens=80, stop_token_ids=())) for i in range(6)]
    made = engine(torch.float64, routing=True, max_kv_tokens=128, prefix_cache=prefix_cache)
    for output in generate(made, wanted):
        check(output, (*output.prompt, *output.tokens))
    assert made.status()["preemptions"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_no_history_changes_the_routing_and_the_last_output_tells_all_of_it(seed):
    made, wanted, ended = engine(torch.float64, routing=True, max_kv_tokens=160, max_batch_tokens=70), requests(9), {}
    got = generate_brokenly(made, wanted, seed, ended)
    for request in wanted:
        check(ended[request.id], (*request.prompt, *got[request.id][0]))


def test_what_is_computed_anew_under_new_weights_has_their_routing():
    made = engine(torch.float64, routing=True)
    request = Request("r", (5, 6, 7) * 8, SamplingParams(max_tokens=20, stop_token_ids=()))
    made.submit([request])
    for _ in range(8):
        made.step()
    old = expected(request.prompt, made.model)
    try:
        with torch.no_grad():
            made.model.layers["0"].input_norm.neg_()
        made.policy_version = 1
        (output,) = made.run()
        assert not torch.equal(expected(request.prompt, made.model), old)
        check(output, (*request.prompt, *output.tokens), made.model)
    finally:
        with torch.no_grad():
            made.model.layers["0"].input_norm.neg_()


def test_an_aborted_request_tells_of_what_was_in_the_cache():
    made = engine(torch.float64, routing=True, max_batch_tokens=64)
    params = SamplingParams(max_tokens=30, stop_token_ids=())
    made.submit([Request(name, (3, 4) * 20, params) for name in ("begun", "later")])
    for _ in range(3):
        made.step()
    made.submit([Request("never", (3, 4), params)])
    begun, later, never = sorted(made.suspend(), key=lambda output: output.request_id)
    check(begun, (*begun.prompt, *begun.tokens))
    check(later, (*later.prompt, *later.tokens))
    assert never.routing.shape == (0, 2, 2)


def test_memory_goes_and_comes_with_the_kv():
    made, wanted = engine(torch.float64, routing=True), requests(3)
    made.submit(wanted)
    outputs = [output for _ in range(3) for output in made.step()]
    made.release_kv()
    assert made.routing._cells.nbytes == 0
    made.allocate_kv()
    for output in outputs + made.run():
        check(output, (*output.prompt, *output.tokens))


def test_without_being_asked_nothing_is_kept():
    made = engine()
    assert made.routing is None and made.scheduler.routing_of is None
    assert all(output.routing is None for output in generate(made, requests(3)))


def generate_rank(rank, device, folder, parallel):
    mesh = Mesh.create(parallel)
    config = RolloutConfig(max_length=256, max_seqs=8, max_batch_tokens=64, max_kv_tokens=160)
    network = Transformer(ModelConfig.from_hf(folder), mesh, device, torch.float64)
    load_weights(network, folder)
    made = EmbeddedEngine(network, mesh, device, config, 5, routing=True)
    made.allocate_kv()
    if rank == 0:
        made.submit(requests(12))
    return made.run()


@pytest.mark.parametrize("parallel", thinned([*LAYOUTS, Parallel(4, tp=2, pp=2)], axes), ids=str)
def test_every_layout_tells_the_same(parallel):
    outputs = [output for mine in run_ranks(generate_rank, parallel.world, checkpoint(), parallel) for output in mine]
    assert tokens(outputs) == tokens(generate(engine(torch.float64), requests(12)))
    for output in outputs:
        check(output, (*output.prompt, *output.tokens))

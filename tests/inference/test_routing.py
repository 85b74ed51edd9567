"""The routing of outputs: that of one forward pass over the whole sequence, whatever the engine did; where weights
changed, each token's is of the pass from which the next one was sampled.

In float64, where two passes that add in another order choose the same experts.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from fusion.inference import EmbeddedEngine, Request, SamplingParams
from fusion.model import Mesh, ModelConfig, PackedAttention, Parallel, Transformer, load_weights, routing_of
from tests.helpers import run_ranks
from tests.inference.engines import checkpoint, engine, generate, generate_brokenly, model, requests, tokens
from tests.inference.test_worlds import LAYOUTS
from tests.rollouts import rollout_config

EXPERTS = 8


def expected(sequence, network=None):
    """uint8 [tokens, layers, k]"""
    network = network or model(torch.float64)
    ids = torch.tensor(sequence, device=network.device.torch_device)
    routed = []
    with torch.no_grad():
        network(ids, torch.arange(len(ids), device=ids.device), PackedAttention([len(ids)], network.operators), routed)
    return routing_of(routed, len(ids), network.mesh, EXPERTS).cpu()


def check(routing, sequence):
    assert routing.dtype is torch.uint8 and routing.shape == (len(sequence) - 1, 2, 2)
    assert torch.equal(routing, expected(sequence)[:-1])


@pytest.mark.parametrize(
    "rollout",
    [dict(), dict(max_seqs=3, max_batch_tokens=8), dict(prefix_cache=False), dict(batch_invariant=True)],
    ids=str,
)
def test_every_token_but_the_last_has_its_routing_under_any_schedule(rollout):
    made, wanted = engine(torch.float64, routing=True, **rollout), requests(12, max_tokens=25)
    outputs = generate(made, wanted)
    for output in outputs:
        check(output.routing, (*output.prompt, *output.tokens))
    assert (made.status()["prefix_hit_tokens"] > 0) == made.config.engine.prefix_cache


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_preempted_request_has_the_routing_of_all_its_tokens(prefix_cache):
    wanted = [Request(f"r{i}", (3, 4, 5), SamplingParams(max_tokens=80, stop_token_ids=())) for i in range(6)]
    made = engine(torch.float64, routing=True, max_kv_tokens=128, prefix_cache=prefix_cache)
    for output in generate(made, wanted):
        check(output.routing, (*output.prompt, *output.tokens))
    assert made.status()["preemptions"] > 0


@pytest.mark.parametrize("seed", range(3))
def test_no_history_changes_the_routing_and_the_outputs_of_a_request_have_all_of_it(seed):
    made, wanted = engine(torch.float64, routing=True, max_kv_tokens=160, max_batch_tokens=70), requests(9)
    collected = []
    got = generate_brokenly(made, wanted, seed, collected)
    for request in wanted:
        # A request that was aborted before its first token begins anew, and with it the rows of its prompt.
        pieces = [one.routing for one in collected if one.request_id == request.id and one.tokens]
        check(torch.cat(pieces), (*request.prompt, *got[request.id][0]))


@contextmanager
def other_weights(network):
    """Other weights, under which tokens are routed to other experts, until the context ends."""
    with torch.no_grad():
        network.layers["0"].input_norm.neg_()
    try:
        yield
    finally:
        with torch.no_grad():
            network.layers["0"].input_norm.neg_()


@pytest.mark.parametrize("suspended", ["recompute", "keep"])
@pytest.mark.parametrize("resubmitted", [False, True])
def test_a_token_keeps_the_routing_of_the_pass_from_which_the_next_one_was_sampled(resubmitted, suspended):
    made = engine(torch.float64, routing=True, suspended=suspended)
    request = Request("r", (5, 6, 7) * 8, SamplingParams(max_tokens=20, stop_token_ids=()))
    made.submit([request])
    outputs = [output for _ in range(8) for output in made.step()]
    if resubmitted:
        (begun,) = outputs = made.suspend()
        made.resume()
        made.submit([replace(request, response=tuple(begun.tokens))])
    with other_weights(made.model):
        made.policy_version = 1
        outputs += made.run()
        tokens = (*request.prompt, *(token for output in outputs for token in output.tokens))
        new = expected(tokens, made.model)[:-1]
    old = expected(tokens, made.model)[:-1]
    assert [version for output in outputs for version in output.versions] == [0] * 8 + [1] * 12
    routing, before = torch.cat([output.routing for output in outputs]), len(request.prompt) + 7
    assert len(routing) == len(tokens) - 1 and not torch.equal(old[:before], new[:before])
    assert torch.equal(routing[:before], old[:before])
    if suspended == "recompute":
        assert torch.equal(routing[before:], new[before:])


def test_a_preempted_request_keeps_the_routing_that_its_tokens_were_sampled_with():
    wanted = [Request(f"r{i}", (3, 4, 5), SamplingParams(max_tokens=80, stop_token_ids=())) for i in range(6)]
    made, first_rows = engine(torch.float64, routing=True, max_kv_tokens=128), {}
    made.submit(wanted)
    outputs = []
    with other_weights(made.model):
        while not made.status()["preemptions"]:
            outputs += made.step()
        waiting = {seq.request.id: list(seq.tokens) for seq in made.scheduler.waiting if seq.logprobs}
        first_rows = {id: expected(tokens, made.model)[:-1] for id, tokens in waiting.items()}
    assert first_rows and not outputs
    for output in made.run():
        if (rows := first_rows.get(output.request_id)) is not None:
            assert torch.equal(output.routing[: len(rows)], rows)


def test_an_aborted_request_has_the_routing_of_what_was_computed():
    made = engine(torch.float64, routing=True, max_batch_tokens=64)
    params = SamplingParams(max_tokens=30, stop_token_ids=())
    made.submit([Request(name, (3, 4) * 20, params) for name in ("begun", "later")])
    for _ in range(3):
        made.step()
    made.submit([Request("never", (3, 4), params)])
    begun, later, never = sorted(made.suspend(), key=lambda output: output.request_id)
    check(begun.routing, (*begun.prompt, *begun.tokens))
    check(later.routing, (*later.prompt, *later.tokens))
    assert never.routing.shape == (0, 2, 2)


def test_memory_goes_and_comes_with_the_kv():
    made, wanted = engine(torch.float64, routing=True), requests(3)
    made.submit(wanted)
    outputs = [output for _ in range(3) for output in made.step()]
    made.release_kv()
    assert made.routing._cells.nbytes == 0
    made.allocate_kv()
    for output in outputs + made.run():
        check(output.routing, (*output.prompt, *output.tokens))


def test_without_being_asked_nothing_is_kept():
    made = engine()
    assert made.routing is None and made.scheduler.routing is None
    assert all(output.routing is None for output in generate(made, requests(3)))


def generate_rank(rank, device, folder, parallel):
    mesh = Mesh.create(parallel)
    config = rollout_config(max_length=256, max_seqs=8, max_batch_tokens=64, max_kv_tokens=160)
    network = Transformer(ModelConfig.from_hf(folder), mesh, device, torch.float64)
    load_weights(network, folder)
    made = EmbeddedEngine(network, mesh, device, config, 5, routing=True)
    made.allocate_kv()
    if rank == 0:
        made.submit(requests(9, 24))
    return made.run()


DEFAULT = [Parallel(2, tp=2), Parallel(4, ep=2, pp=2)]


@pytest.mark.parametrize(
    "parallel",
    [
        one if one in DEFAULT else pytest.param(one, marks=pytest.mark.extended)
        for one in (*LAYOUTS, Parallel(4, tp=2, pp=2))
    ],
    ids=str,
)
def test_every_layout_tells_the_same(parallel):
    outputs = [output for mine in run_ranks(generate_rank, parallel.world, checkpoint(), parallel) for output in mine]
    assert tokens(outputs) == tokens(generate(engine(torch.float64), requests(9, 24)))
    for output in outputs:
        check(output.routing, (*output.prompt, *output.tokens))

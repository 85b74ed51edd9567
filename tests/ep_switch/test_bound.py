"""The bound of memory in the allocator's own figures: a switch fits on a card that has no more, its mutants do not."""

from __future__ import annotations

import pytest

from fusion.ep_switch import Plan
from fusion.model import Parallel
from fusion.model.formats import EMBEDDED, MEGATRON, VLLM_CPU
from tests.ep_switch.mutants import frees_nothing, in_layer_order
from tests.ep_switch.pair import BOUND_BUCKETS, Pair
from tests.helpers import run_ranks, tiny_config

CONFIG = tiny_config(
    vocab_size=2048,
    hidden_size=256,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    moe_intermediate_size=128,
    tie_word_embeddings=False,
)
"""A shard of about 17 MB, so that the allocator's segments are small beside a bucket."""

PP2, EP4 = Parallel(4, tp=2, pp=2), Parallel(4, ep=4)


def whole_plan(plan: Plan) -> Plan:
    return plan


def both_ways(rank, device, one, other, mutate, formats=(EMBEDDED, EMBEDDED)):
    """For each direction: whether it gets by with the bound as the card's capacity, which is one of reserved bytes; and
    the extra bytes the plan as it is has allocated, in buckets."""
    pair, found = Pair(CONFIG, device, one=one, other=other, formats=formats), []
    for source in (0, 1):
        pair.refill(source)
        fits = pair.fits_the_bound(source, mutate(pair.plans[source]))
        pair.refill(source)
        found.append((fits, pair.switch(source)[1].allocated / pair.bucket_bytes))
    return found


@pytest.mark.parametrize("device", [pytest.param("emulated", marks=pytest.mark.extended), "adversarial"])
@pytest.mark.parametrize(
    "other", [PP2, pytest.param(Parallel(4, tp=2, ep=2), marks=pytest.mark.extended), Parallel(4, tp=4, etp=4)], ids=str
)
def test_a_switch_fits_the_bound(other, device):
    results = run_ranks(both_ways, 4, other, EP4, whole_plan, device=device)
    for fits, allocated in results[0]:
        assert fits
        assert allocated <= BOUND_BUCKETS


@pytest.mark.parametrize("source", [EMBEDDED, pytest.param(MEGATRON, marks=pytest.mark.extended)], ids=str)
def test_a_switch_to_the_weights_of_vllm_fits_the_bound_and_others_do_not(source):
    """The bound with the largest tensor of vLLM's, which is nearly two buckets."""
    one = Parallel(4, tp=2, ep=2)
    for mutate, fitting in ((whole_plan, True), (frees_nothing, False), (in_layer_order, False)):
        results = run_ranks(both_ways, 4, one, EP4, mutate, (source, VLLM_CPU))
        for fits, allocated in results[0]:
            assert fits == fitting
            assert allocated <= BOUND_BUCKETS


def test_a_plan_that_frees_nothing_runs_out_of_memory():
    results = run_ranks(both_ways, 4, PP2, EP4, frees_nothing)
    assert [fits for fits, *_ in results[0]] == [False, False]


def test_a_plan_in_layer_order_runs_out_of_memory():
    results = run_ranks(both_ways, 4, PP2, EP4, in_layer_order)
    assert [fits for fits, *_ in results[0]] == [False, False]

"""What comes from the host on the way back to TRAIN: chosen purely, and the same weights as over the wire."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.colocate.weights.masters import choose_hosted, host_parts, master_runs
from fusion.ep_switch import Layout, Topology, plan_switch
from fusion.model import Mesh, Parallel, Transformer
from fusion.model.options import PolicyModelConfig
from fusion.training.optimizer import ShardedAdamW
from tests.colocate.cards import Card, make_spec
from tests.ep_switch.oracle import check_contents, random_config, random_layout
from tests.helpers import run_ranks, tiny_checkpoint, tiny_config

BF16 = torch.bfloat16


@st.composite
def returns(draw: st.DrawFn):
    def choose(options):
        return draw(st.sampled_from(list(options)))

    config, bucket_bytes, world = random_config(choose), choose((512, 1024, 6144)), choose((2, 4, 6, 8))
    ends = [replace(random_layout(choose, config, range(world), bucket_bytes), dtype=BF16) for _ in range(2)]
    train = replace(ends[1], ranks=ends[1].ranks[: ends[1].parallel.world], bucket_bytes=bucket_bytes)
    host = choose((1e7, 1e9, 1e11))
    return ends[0], train, bucket_bytes, Topology(host_bytes_per_s=host)


@settings(max_examples=5)
@given(returns())
def test_what_is_hosted_lies_in_own_masters_once_and_never_makes_the_return_longer(case):
    check(case)


@pytest.mark.extended
@settings(max_examples=30)
@given(returns())
def test_what_is_hosted_on_more_returns(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=200)
@given(returns())
def test_what_is_hosted_on_many_returns(case):
    check(case)


def check(case):
    source, train, bucket_bytes, topology = case
    hosted = choose_hosted(source, train, train.ranks, topology)
    assert hosted == choose_hosted(source, train, train.ranks, topology)
    wire, plan = (plan_switch(source, train, bucket_bytes, topology, hosted=units) for units in ((), hosted))
    assert plan.hosted == hosted == tuple((r, unit) for r in plan.ranks for unit in plan.hosted_units(r)), "none shared"
    check_contents(plan)
    for rank in train.ranks:
        runs, units = master_runs(train, rank), train.units(rank)
        for unit, found in runs.items():
            elements = Counter(e for run in found for e in range(run.start, run.start + run.numel))
            needed = {e for param, start in units[unit].entries for e in range(start, start + param.numel)}
            assert set(elements) == needed and max(elements.values()) == 1
        places = Counter(
            (run.shard, e) for found in runs.values() for run in found for e in range(run.at, run.at + run.numel)
        )
        assert max(places.values(), default=1) == 1, "a master is of one element"
        mine = plan.hosted_units(rank)
        assert set(mine) <= set(runs)
        saved = received(wire, rank) - received(plan, rank)
        assert saved > 0 if mine else saved == 0
        host_s = sum(units[unit].numel for unit in mine) * 4 / topology.host_bytes_per_s
        longest = max(received(plan, rank) / topology.bytes_per_s[0], host_s)
        assert longest <= received(wire, rank) / topology.bytes_per_s[0] + bucket_bytes * 2 / topology.host_bytes_per_s
    for units in ((), train.ranks):
        assert not choose_hosted(source, train, units, Topology(host_bytes_per_s=1e-3)), "not over a slow host link"


def received(plan, rank):
    return sum(plan.received_bytes(rank).values())


def test_a_fast_host_gives_all_that_the_rank_has_masters_of():
    config = tiny_config()
    source, train = (Layout(config, Parallel(2, *grid), (0, 1), BF16) for grid in ((2, 1, 1, 2), (1, 2)))
    hosted = choose_hosted(source, train, (1,), Topology(host_bytes_per_s=1e15))
    experts = {unit for unit, plan in enumerate(train.units(1)) if plan.expert}
    assert experts <= {unit for _, unit in hosted} <= set(master_runs(train, 1))
    assert {rank for rank, _ in hosted} == {1}, "the other has none"


def own_masters(rank, device, parallel, tied):
    """The runs against the optimizer's own masters."""
    config = tiny_config(tie_word_embeddings=tied)
    layout = Layout(config, parallel, tuple(range(parallel.world)), BF16, 1 << 13)
    model = Transformer(config, Mesh.create(parallel), device, BF16, bucket_bytes=1 << 13)
    for flat in model.weights.flats:
        flat.copy_(torch.randn(flat.shape, generator=torch.Generator().manual_seed(3)))
    states = ShardedAdamW(model).states.tensors()
    runs = master_runs(layout, rank)
    parts = host_parts(runs, {i: states[f"master.{i}"].cpu() for i in range(sum("master" in name for name in states))})
    for unit, found in parts.items():
        for name, start, values in found:
            assert torch.equal(model.weights.flats[unit][start : start + values.numel()].cpu(), values.to(BF16)), name
    whole = {False: parallel.dp == 1, True: parallel.edp == 1}
    assert {unit for unit, plan in enumerate(model.weights.plans) if whole[plan.expert]} <= set(parts)
    return len(parts)


@pytest.mark.parametrize(("grid", "tied"), [((4, 1, 4), False), ((4, 2, 1, 2), True), ((4, 1, 2, 2), True)])
def test_runs_are_where_the_optimizer_has_its_masters(grid, tied):
    assert min(run_ranks(own_masters, 4, Parallel(*grid), tied)) > 0


def steps_in_bf16(rank, device, spec):
    """Two steps; what the way back takes over the wire, and from the host."""
    card = Card(rank, device, spec)
    steps = [{name: value for name, value in card.step(version).items() if name != "memory"} for version in range(2)]
    plan = card.worker.card.switcher.route.to_train
    return steps, received(plan, rank), plan.hosted_units(rank)


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("bf16") / "policy")


def run(policy, offload, device="emulated"):
    spec = make_spec(policy, 2, {"ep": 2}, {"tp": 2, "etp": 2}, offload=offload)
    return zip(
        *run_ranks(steps_in_bf16, 2, replace(spec, model=PolicyModelConfig(policy, "bfloat16")), device=device),
        strict=True,
    )


def test_training_goes_on_bitwise_with_fewer_bytes_over_the_wire(policy):
    steps, wire, hosted = run(policy, "none")
    assert not any(hosted) and steps[0][0]["weights"] != steps[0][1]["weights"]
    for offload, device in (("switch", "adversarial"), ("stream", "adversarial")):
        same, less, units = run(policy, offload, device)
        assert same == steps, offload
        assert all(units) and all(ours < theirs for ours, theirs in zip(less, wire, strict=True)), offload

"""Units that come from the host while the rest comes over the wire: planned as the rest is, bitwise, within memory."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.ep_switch import Layout, Switcher, SwitchError, plan_switch
from fusion.ep_switch.fill import HostFill, HostPart
from fusion.model import BucketPlan, Buckets, LocalParam, Parallel
from fusion.npu import open_device
from tests.ep_switch.oracle import check_contents, check_traffic, random_switch
from tests.ep_switch.switching import BUCKET, End, assert_bound, assert_filled, build_pair, element_values, fill
from tests.helpers import run_ranks, tiny_config

MOE = tiny_config(num_key_value_heads=2)
BF16 = torch.bfloat16


@st.composite
def hosted_switches(draw: st.DrawFn):
    source, target, bucket_bytes, topology, _ = random_switch(
        lambda options: draw(st.sampled_from(list(options))), draw(st.sampled_from((2, 4, 6, 8)))
    )
    every = draw(st.integers(1, 4))
    units = [(rank, unit) for rank in target.ranks for unit in range(len(target.units(rank)))]
    return source, target, bucket_bytes, topology, False, tuple(units[::every])


@settings(max_examples=5)
@given(hosted_switches())
def test_hosted_units_are_allocated_and_do_not_travel_and_the_rest_is_planned_as_ever(case):
    check(case)


@pytest.mark.extended
@settings(max_examples=40)
@given(hosted_switches())
def test_hosted_units_of_more_plans(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=200)
@given(hosted_switches())
def test_hosted_units_of_many_plans(case):
    check(case)


def check(case):
    plan = plan_switch(*case)
    most = check_contents(plan)
    for rank in plan.ranks:
        assert plan.peak_bytes(rank) == most[rank] + sum(plan.wire_bytes(rank)) + plan.staging_bytes(rank)
        bound = max(plan.source.nbytes(rank), plan.target.nbytes(rank)) + 4 * plan.bucket_bytes
        assert plan.peak_bytes(rank) <= bound
        assert bool(plan.hosted_units(rank)) == bool(plan.staging_bytes(rank))
    check_traffic(plan, busiest=1.1)


def every_second_unit(layout: Layout) -> tuple[tuple[int, int], ...]:
    return tuple((rank, unit) for rank in layout.ranks for unit in range(0, len(layout.units(rank)), 2))


def masters(device, layout, rank, units):
    """What the parameters of some units are, in float32 and pinned, each cut in two."""
    found = {}
    for unit in units:
        found[unit] = []
        for param, offset in layout.units(rank)[unit].entries:
            host = device.host_empty((param.numel,), torch.float32)
            for part in param.parts:
                part.view(host.view(param.shape)).copy_(element_values(part.name, part.region, torch.float32))
            cut = param.numel // 3
            halves = ((offset, host[:cut]), (offset + cut, host[cut:]))
            found[unit] += [HostPart(param.name, start, values) for start, values in halves]
    return found


def way_back(rank, device, one, other, kind):
    """From an inference layout to a training layout, twice, with and without the host."""
    ends = [one.layout(MOE), other.layout(MOE)]
    models = build_pair(*ends, device)
    shared = {(r, unit) for r, unit, _ in plan_switch(*ends, BUCKET).shared}
    plans = [plan_switch(*ends, BUCKET, hosted=hosted) for hosted in ((), every_second_unit(ends[1]))]
    parts = [masters(device, ends[1], rank, plan.hosted_units(rank)) for plan in plans]
    gc.collect()
    reports = []
    for plan, host in [*zip(plans, parts, strict=True)] * 2:
        models[0].weights.allocate()
        fill(models[0])
        others = device.memory().allocated - plan.source.nbytes(rank)
        device.reset_peak()
        reports.append(Switcher(plan, *models, device=device, exchange=kind).run(host=host))
        assert_bound(plan, rank, reports[-1], device.memory().peak_allocated - others)
        assert_filled(models[1], via=BF16)
        for index in range(len(models[1].weights.flats)):
            if (rank, index) not in shared:
                models[1].weights.release(index)
    return reports


@pytest.mark.parametrize("kind", ["shared", "collective"])
@pytest.mark.parametrize("device", [pytest.param("emulated", marks=pytest.mark.extended), "adversarial"])
def test_masters_on_the_host_fill_the_target_bitwise_and_save_the_wire(device, kind):
    ends = End(Parallel(4, 4), dtype=BF16), End(Parallel(4, 1, 2), dtype=BF16)  # back to DP4, EP2
    for wire, host, *again in run_ranks(way_back, 4, *ends, kind, device=device):
        assert (wire.bytes_hosted, host.bytes_hosted) == (again[0].bytes_hosted, again[1].bytes_hosted)
        assert wire.bytes_hosted == 0 < host.bytes_hosted
        assert host.bytes_moved < wire.bytes_moved


def incomplete(rank, device):
    ends = [End(Parallel(2, 2), (0, 1), BF16).layout(MOE), End(Parallel(2), (0, 1), BF16).layout(MOE)]
    models = build_pair(*ends, device)
    plan = plan_switch(*ends, BUCKET, hosted=every_second_unit(ends[1]))
    parts = masters(device, ends[1], rank, plan.hosted_units(rank))
    if rank == 1:
        parts[min(parts)].pop()
    with pytest.raises(SwitchError, match=r"rank 1 failed in preparation: .*unit \d+ has \d+ elements, the host"):
        Switcher(plan, *models, device=device).run(host=parts)
    assert_filled(models[0], via=BF16)
    return True


def test_masters_that_are_not_all_there_are_refused_by_all_ranks_before_anything_moves():
    assert run_ranks(incomplete, 2) == [True, True]


@pytest.mark.parametrize("hurry", [True, False])
def test_every_copy_waits_for_what_was_queued_before_and_is_waited_for(hurry):
    device = open_device("emulated", index=9, streams="adversarial")
    with device.on_stream(device.new_stream()):
        plan = BucketPlan(False, 64, ((LocalParam("p", (64,), ()), 0),))
        target = Buckets((plan,), device, BF16, owner="weights", resident=False)
        filler, noise = HostFill(device), device.host_empty((64,), BF16).fill_(7)
        values = device.host_empty((64,), torch.float32).copy_(torch.arange(64.0))
        filler.open(target, (0,), {0: [HostPart("p", 0, values)]}, staging_bytes=64)
        target.allocate()
        target.flats[0].copy_(noise, non_blocking=True)  # whoever had the memory before is not done with it
        filler.fill(0)
        if hurry:
            filler._stream.synchronize()
        filler.close()
        assert target.flats[0].tolist() == values.tolist()

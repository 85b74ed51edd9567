"""Switches between real processes on emulated cards: bitwise, within memory, both ways of exchange."""

from __future__ import annotations

import gc
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fusion.ep_switch import Layout, Topology, plan_switch, weights_checksum
from fusion.ep_switch import plan as planning
from fusion.ep_switch.opening import open_exchange
from fusion.ep_switch.outcome import Stopwatch
from fusion.ep_switch.transfer import Switcher
from fusion.model import Mesh, Parallel, Transformer
from tests.ep_switch.switching import (
    BUCKET,
    End,
    assert_bound,
    assert_filled,
    build,
    build_pair,
    execute,
    fill,
    own_bytes,
)
from tests.helpers import run_ranks, tiny_config
from tests.pairwise import axes, thinned

MOE = tiny_config(num_key_value_heads=2)
UNTIED = tiny_config(tie_word_embeddings=False)
ONE_HEAD = tiny_config(num_key_value_heads=1, num_hidden_layers=3)
DENSE = tiny_config(experts=False)
BF16 = torch.bfloat16


def chain(rank, device, config, one, other, options):
    """There and back, twice in shared memory and once by collectives; everything is checked after every switch."""
    ends = [one.layout(config), other.layout(config)]
    models = build_pair(*ends, device)
    plans = [plan_switch(*pair, BUCKET, **options) for pair in (ends, ends[::-1])]
    narrow = min(one.dtype, other.dtype, key=lambda dtype: dtype.itemsize)
    gc.collect()  # models of earlier tests would go while this one's memory is measured
    reports = []
    for kind, times in (("shared", 2), ("collective", 1)):
        switchers = [
            Switcher(plan, *pair, device=device, exchange=kind)
            for plan, pair in zip(plans, (models, models[::-1]), strict=True)
        ]
        for switcher in switchers * times:
            reports.append(one_switch(rank, device, switcher, checksum=len(reports) % 2 == 0))
            source, target = switcher._holders
            assert_filled(target, via=narrow)
            if not switcher.plan.keep:
                shared = set(switcher.plan.shared_units(rank).values()) if rank in switcher.plan.ranks else ()
                assert own_bytes(source, shared) == 0
            else:
                assert_filled(source, via=narrow)
                release_own(target, switcher.plan.shared_units(rank))
    assert {report.exchange for report in reports} == {"shared", "collective"}
    return reports


def one_switch(rank, device, switcher, checksum):
    plan = switcher.plan
    source, target = (end.weights if end else None for end in switcher._holders)
    held = sum(flat.untyped_storage().nbytes() for flat in source.flats) if source else 0
    others = device.memory().allocated - held
    device.reset_peak()
    report = switcher.run(checksum=checksum)
    peak = device.memory().peak_allocated - others
    if rank in plan.ranks:
        if not checksum:
            assert_bound(plan, rank, report, peak)
        assert report.bytes_moved == sum(plan.received_bytes(rank).values()) == sum(report.received_bytes.values())
    united = report.exchange != "collective" and not checksum
    assert report.rounds == len((plan.in_place() if united else plan).rounds)
    assert 0.3 * report.seconds < sum(report.parts_s.values()) < report.seconds + 1e-3
    return report


def release_own(model, shared):
    for index in range(len(model.weights.flats) if model else 0):
        if index not in shared:
            model.weights.release(index)


CASES = {
    "TP2EP2-EP4": (MOE, End(Parallel(4, 2, 2)), End(Parallel(4, 1, 4)), {}),
    "TP2PP2-EP4": (UNTIED, End(Parallel(4, 2, pp=2)), End(Parallel(4, 1, 4)), {}),
    "TP2ETP2EP2-TP4": (ONE_HEAD, End(Parallel(4, 2, 2, etp=2)), End(Parallel(4, 4)), {}),
    "EP4-EP4 reversed": (MOE, End(Parallel(4, 1, 4)), End(Parallel(4, 1, 4), ranks=(3, 2, 1, 0)), {}),
    "PP4-two engines of EP2": (
        tiny_config(num_hidden_layers=4),
        End(Parallel(4, pp=4)),
        End(Parallel(2, 1, 2), dtype=BF16),
        {},
    ),
    "bfloat16-float32": (DENSE, End(Parallel(2, 2), (0, 1), BF16), End(Parallel(2), (1, 0)), {}),
    "separate": (MOE, End(Parallel(2, 2), (0, 1)), End(Parallel(2, 1, 2), (2, 3)), {}),
    "hybrid": (UNTIED, End(Parallel(2, 1, 2), (0, 1)), End(Parallel(1), (1, 2)), {}),
    "relays": (
        DENSE,
        End(Parallel(2, 2), (0, 1)),
        End(Parallel(2, 2), (2, 3, 0, 1)),
        {"topology": Topology(ranks_per_node=2, ranks_per_supernode=4, bytes_per_s=(4e9, 4e9, 1e9, 1e9))},
    ),
}


CONFIGS = [config for config, *_ in CASES.values()]


def case_factors(case: tuple[str, str]) -> tuple:
    """The device, the model, what changes between the two layouts (dtype, cards), what they shard."""
    config, one, other, options = CASES[case[0]]
    shared = len(set(one.ranks) & set(other.ranks)) / len({*one.ranks, *other.ranks})
    changes = one.dtype != other.dtype, 0 < shared < 1, shared == 0, bool(options)
    sizes = [max(size) > 1 for size in zip(axes(one.parallel), axes(other.parallel), strict=True)]
    return case[1], CONFIGS.index(config), *changes, *sizes


@pytest.mark.parametrize(
    ("case", "device"),
    thinned(
        list(product(CASES, ("emulated", "adversarial"))), case_factors, extended=lambda case: case[1] == "emulated"
    ),
)
def test_chains_of_switches_are_bitwise_and_within_memory(case, device):
    config, one, other, options = CASES[case]
    world = max(*one.ranks, *other.ranks) + 1
    results = run_ranks(chain, max(2, world), config, one, other, options, device=device)
    assert sum(report.bytes_moved for reports in results for report in reports) > 0


def kept(rank, device):
    """The source stays; the target is filled again and again. Rank 3 has no part in it."""
    ends = [End(Parallel(2, 2), (0, 1)).layout(MOE), End(Parallel(1), (2,)).layout(MOE)]
    source, target = build_pair(*ends, device)
    plan = plan_switch(*ends, BUCKET, keep=True)
    for kind in ("shared", "collective"):
        switcher = Switcher(plan, source, target, device=device, exchange=kind)
        for _ in range(2):
            one_switch(rank, device, switcher, checksum=False)
            assert_filled(source, via=torch.float32)
            assert_filled(target, via=torch.float32)
            release_own(target, ())
    return rank in plan.ranks


def parked_chain(rank, device, config, one, other, options):
    with patch.object(planning, "TRIES", ()):
        for pair in ((one, other), (other, one)):
            plan = plan_switch(*(end.layout(config) for end in pair), BUCKET, **options)
            assert plan.parked
        reports = chain(rank, device, config, one, other, options)
    return reports


@pytest.mark.parametrize("device", [pytest.param("emulated", marks=pytest.mark.extended), "adversarial"])
@pytest.mark.parametrize("case", ["TP2PP2-EP4", pytest.param("PP4-two engines of EP2", marks=pytest.mark.extended)])
def test_a_source_that_is_parked_on_the_host_comes_through_bitwise_and_within_memory(case, device):
    """As it is where no order is found that keeps the bound."""
    run_ranks(parked_chain, 4, *CASES[case], device=device)


@pytest.mark.parametrize("device", ["emulated", "adversarial"])
def test_a_kept_source_serves_many_switches_and_strangers_only_agree(device):
    assert run_ranks(kept, 4, device=device) == [True, True, True, False]


def equal_layouts(rank, device):
    layout = End(Parallel(2, 1, 2), (0, 1)).layout(MOE)
    source, target = build_pair(layout, layout, device)
    report = execute(plan_switch(layout, layout, BUCKET), source, target, device=device)
    assert_filled(target, via=torch.float32)
    assert_filled(source, via=torch.float32)
    return report


def test_equal_layouts_share_everything():
    for report in run_ranks(equal_layouts, 2):
        assert report.bytes_moved == report.bytes_local == 0


def test_one_process_needs_no_torch_distributed():
    from fusion.npu import open_device

    assert not dist.is_initialized()
    device = open_device("emulated", index=0)
    layouts = [Layout(UNTIED, Parallel(), (0,), dtype, BUCKET) for dtype in (torch.float32, BF16)]
    models = [
        Transformer(UNTIED, Mesh.single(), device, layout.dtype, bucket_bytes=BUCKET, resident=layout is layouts[0])
        for layout in layouts
    ]
    fill(models[0])
    report = execute(plan_switch(*layouts, BUCKET), *models, device=device, checksum=True)
    assert_filled(models[1], via=BF16)
    assert (report.bytes_moved, report.exchange) == (0, "none")
    assert report.bytes_local == layouts[1].nbytes(0)
    assert report.peak_bytes <= layouts[0].nbytes(0) + 4 * BUCKET


def beside(rank, device):
    """On a stream of one's own, where copies are late, too."""
    ends = [End(Parallel(2, 2), (0, 1)).layout(MOE), End(Parallel(2, 1, 2), (0, 1), BF16).layout(MOE)]
    plan, stream = plan_switch(*ends, BUCKET), device.new_stream()
    with device.on_stream(stream):
        source, target = build_pair(*ends, device)
        for exchange in ("shared", "collective"):
            source.weights.allocate()
            fill(source)
            execute(plan, source, target, device=device, checksum=exchange == "collective", exchange=exchange)
            assert_filled(target, via=BF16)
            release_own(target, ())
    stream.synchronize()


def test_a_switch_may_run_on_a_stream_of_its_own():
    run_ranks(beside, 2, device="adversarial")


def amid(rank, device, exchange):
    """Late writes of the source on the current stream are waited for, late copies of something else are not. Nothing is
    copied on rank 0, which has the weights: no kernel of its own waits for the writes."""
    ends = [End(Parallel(), (0,)).layout(MOE), End(Parallel(), (1,), BF16).layout(MOE)]
    source, target = build_pair(*ends, device)
    flats = source.weights.flats if source else []
    hosts = [device.host_empty(flat.shape, flat.dtype).copy_(flat) for flat in flats]
    for flat in flats:
        flat.zero_()
    state = torch.ones(1000, device=device.torch_device)
    open_exchange(device, None, kind="auto", clock=Stopwatch(device))  # the ranks meet, which waits for everything
    device.synchronize()
    away, stream, done = device.host_empty((1000,), torch.float32).zero_(), device.new_stream(), device.event()
    with device.on_stream(stream):
        away.copy_(state, non_blocking=True)
        done.record(stream)
    for flat, host in zip(flats, hosts, strict=True):
        flat.copy_(host, non_blocking=True)
    execute(plan_switch(*ends, BUCKET), source, target, device=device, exchange=exchange)
    beside = float(away.sum())
    assert_filled(target, via=BF16)
    done.synchronize()
    return beside, float(away.sum())


@pytest.mark.parametrize("exchange", ["shared", "collective"])
def test_a_switch_waits_for_its_weights_and_for_nothing_else(exchange):
    assert run_ranks(amid, 2, exchange, device="adversarial") == [(0.0, 1000.0)] * 2


def totals(rank, device):
    """The sum over all weights does not depend on the layout they lie in."""
    ends = [End(Parallel(4, 2, 2)).layout(MOE), End(Parallel(4, 1, 4)).layout(MOE)]
    source, target = build_pair(*ends, device)
    before = weights_checksum(source)
    execute(plan_switch(*ends, BUCKET), source, target, device=device)
    return before, weights_checksum(target)


def unsummed(rank, device):
    model = build(End(Parallel(2, 2), (0, 1)).layout(MOE), device)
    if rank == 1:
        model.weights.release()
    with pytest.raises(RuntimeError) as caught:
        weights_checksum(model)
    return str(caught.value)


def test_a_rank_that_cannot_sum_its_weights_keeps_nobody_waiting():
    one, other = run_ranks(unsummed, 2)
    assert one == other and "rank 1 failed in weights checksum: " in one and "rank 0" not in one


def test_the_checksum_of_all_weights_survives_a_switch():
    assert len({total for both in run_ranks(totals, 4) for total in both}) == 1

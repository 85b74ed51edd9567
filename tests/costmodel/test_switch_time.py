"""Seconds of a switch: the published run is the check; the rest is arithmetic that must hang together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fusion.costmodel.hardware import Figure, hardware_named
from fusion.costmodel.memory import estimate_memory, largest_weight_bytes
from fusion.costmodel.presets import check_figures, load_shape
from fusion.costmodel.setup import Setup, SwitchLimits
from fusion.costmodel.step_time import generate_s, train_s
from fusion.costmodel.switch_time import (
    ACHIEVED,
    PUBLISHED,
    parked_s,
    pessimistic,
    published,
    to_infer,
    to_train,
    wire,
)
from fusion.costmodel.traffic import Traffic, switch_traffic
from fusion.model import Parallel

ASCEND_910C = hardware_named("ascend_910c")
SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"
A3_RUN = Setup(
    load_shape("deepseek_r1_671b", SHAPES).shape,
    ASCEND_910C,
    Parallel(256, tp=4, ep=32, pp=8),
    Parallel(256, tp=2, ep=128),
)


@pytest.mark.parametrize("what", ["reshard", "offload"])
def test_the_published_run_is_predicted(what):
    """DeepSeek-R1 on 128 cards of two dies, all-gather reshard and blocking offload: 11.5 and 5.5 s, within 25 %."""
    assert published(A3_RUN)[what] == pytest.approx(PUBLISHED[what], rel=0.25)
    assert check_figures(SHAPES) == published(A3_RUN)


@pytest.mark.parametrize("bytes_per_s", [7e9, 40e9])
def test_the_check_does_not_rest_on_the_figure_that_is_assumed(bytes_per_s):
    hardware = replace(ASCEND_910C, host_copy_bytes_per_s=Figure(bytes_per_s, "test"))
    assert published(replace(A3_RUN, hardware=hardware))["offload"] == pytest.approx(PUBLISHED["offload"], rel=0.25)


def test_calibrated_on_the_same_run():
    """Its rollout took 373.65 s, of which the model took less than 60 %, and hosts the rest."""
    assert train_s(A3_RUN) == pytest.approx(319.3, rel=0.05)
    assert generate_s(A3_RUN, estimate_memory(A3_RUN).kv_tokens) == pytest.approx(0.6 * 373.65, rel=0.1)


def test_directed_and_overlapped_is_several_times_as_fast():
    assert not estimate_memory(A3_RUN).overlap, "the stacks of a layer's experts do not fit beside four buckets"
    run = replace(A3_RUN, fusion=SwitchLimits(bucket_bytes=128 << 20))
    size = estimate_memory(run)
    ways = [switch_traffic(run.shape, *ends, ASCEND_910C.topology) for ends in (run.sides, run.sides[::-1])]
    there, back = to_infer(run, ways[0], size), to_train(run, ways[1], size)
    assert there.seconds + back.seconds < sum(PUBLISHED.values()) / 4
    assert there.limit == "the host link, offloading"
    assert there.seconds == there.parts["offload"] == pytest.approx(size.states_bytes / 30e9)
    streamed = replace(run, fusion=SwitchLimits(offload="stream", bucket_bytes=128 << 20))
    faster = to_infer(streamed, ways[0], estimate_memory(streamed))
    assert faster.seconds < there.seconds and faster.limit == "the wire, sending"


def test_the_way_back_takes_from_the_host_what_own_masters_cover():
    """The experts of this run are on one rank of a stage each (EP32 of 32), so all of their masters are at hand."""
    size, back = estimate_memory(A3_RUN), switch_traffic(A3_RUN.shape, *A3_RUN.sides[::-1], ASCEND_910C.topology)
    both, kept = to_train(A3_RUN, back, size), replace(A3_RUN, fusion=SwitchLimits(offload="none"))
    alone = to_train(kept, back, estimate_memory(kept))
    assert alone.parts["masters"] == 0 == alone.parts["onload, beside training"]
    assert both.seconds < 0.9 * alone.seconds
    assert both.parts["masters"] == pytest.approx(both.seconds, rel=0.1), "both links end together"
    assert both.parts["onload, beside training"] == pytest.approx(size.states_bytes / 34e9)
    divided = replace(A3_RUN, train=Parallel(256, tp=4, ep=2, pp=8))
    back = switch_traffic(divided.shape, *divided.sides[::-1], ASCEND_910C.topology)
    assert to_train(divided, back, estimate_memory(divided)).parts["masters"] == 0, (
        "a sixteenth of a bucket holds no unit"
    )


def test_states_that_must_leave_first_add_up():
    crowded = replace(A3_RUN, infer=Parallel(256, tp=1, ep=64))
    size = estimate_memory(crowded)
    assert not size.overlap
    moved = switch_traffic(crowded.shape, *crowded.sides, ASCEND_910C.topology)
    switch = to_infer(crowded, moved, size)
    assert switch.seconds > switch.parts["offload"] and switch.limit.startswith("HBM")


def test_the_wire_takes_its_busiest_die_and_both_ports():
    def moved(sent, received):
        return Traffic(np.array(sent, float).T, np.array(received, float).T, np.zeros(2), np.zeros(2))

    ub, rdma = ASCEND_910C.link_bytes_per_s(1), ASCEND_910C.link_bytes_per_s(3)
    one_port = wire(moved([[0, ub, ub, 0], [0, 0, 0, 0]], [[0, 0, 0, 0], [0, ub, ub, 0]]), ASCEND_910C, 1 << 40)
    assert one_port.seconds == pytest.approx(1 + ub / ASCEND_910C.link_bytes_per_s(2), rel=1e-3)
    two_ports = wire(moved([[0, ub, 0, 3 * rdma], [0, 0, 0, 0]], [[0] * 4, [0, ub, 0, 3 * rdma]]), ASCEND_910C, 1 << 40)
    assert two_ports.seconds == pytest.approx(3, rel=1e-3)
    rounds = wire(moved([[0, 1e9, 0, 0], [0] * 4], [[0] * 4, [0, 1e9, 0, 0]]), ASCEND_910C, int(2e6))
    assert rounds.rounds == 1000
    assert rounds.seconds == pytest.approx(1e9 / ub + 1000 * ASCEND_910C.collective_s.value)


def test_a_parked_source_crosses_the_host_link_twice():
    hardware, weights = A3_RUN.hardware, largest_weight_bytes(A3_RUN.shape, A3_RUN.train)
    crossed = weights / hardware.out_bytes_per_s.value + weights / hardware.back_bytes_per_s.value
    assert parked_s(A3_RUN, A3_RUN.train) == pytest.approx(crossed)


def test_the_pessimistic_switch_receives_at_what_published_updates_achieve():
    run = replace(A3_RUN, fusion=SwitchLimits(offload="stream"))
    size, moved = estimate_memory(run), switch_traffic(run.shape, *run.sides, ASCEND_910C.topology)
    slow = replace(run, hardware=pessimistic(ASCEND_910C))
    normal, late = to_infer(run, moved, size), to_infer(slow, moved, size)
    received = moved.received.sum(0).max()
    assert late.seconds >= 0.99 * received / ACHIEVED.value > normal.seconds
    assert pessimistic(pessimistic(ASCEND_910C)) == pessimistic(ASCEND_910C)
    levels = range(len(ASCEND_910C.reached))
    assert all(slow.hardware.link_bytes_per_s(level) <= ASCEND_910C.link_bytes_per_s(level) for level in levels)
    assert slow.hardware.link_bytes_per_s(0) == ASCEND_910C.link_bytes_per_s(0), "inside a card nothing travels far"

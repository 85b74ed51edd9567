"""The modelled clock of an emulated card, on a clock that the test moves."""

from __future__ import annotations

import time

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fusion.npu.pacer import CATCH_UP_S, Pacer
from fusion.telemetry import Metrics
from tests.helpers import run_ranks
from tests.machine import patience


class Clock:
    def __init__(self, oversleep_s: float = 0.0):
        self.now, self.oversleep_s, self.slept = 100.0, oversleep_s, 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept += seconds
        self.now += seconds + self.oversleep_s


def _pacer(**options):
    clock = Clock(**options)
    return clock, Pacer(clock, clock.sleep)


def test_a_step_takes_its_modelled_time_whatever_the_real_work_took():
    clock, pacer = _pacer()
    with pacer.stage():
        for work in (0.01, 0.03, 0.0):
            start = clock.now
            with pacer.step({"decode": 0.05}):
                clock.now += work
            assert clock.now == pytest.approx(start + 0.05)
    assert pacer.modelled_s["decode"] == pytest.approx(0.15) and not pacer.overrun_s
    assert clock.slept == pytest.approx(0.11)


def test_late_wake_ups_do_not_add_up():
    clock, pacer = _pacer(oversleep_s=0.004)
    with pacer.stage():
        for _ in range(100):
            clock.now += 0.001
            with pacer.step({"decode": 0.05}):
                clock.now += 0.01
        assert clock.now == pytest.approx(105.0, abs=0.005)
    assert sum(pacer.overrun_s.values()) == pytest.approx(0.004)


def test_work_that_takes_longer_than_modelled_is_overrun_and_not_slept():
    clock, pacer = _pacer()
    with pacer.stage():
        for _ in range(10):
            with pacer.step({"decode": 0.001}):
                clock.now += 0.03
    assert clock.slept == 0
    assert sum(pacer.overrun_s.values()) == pytest.approx(10 * 0.029)
    metrics, later = Metrics(), Metrics()
    pacer.report(metrics, "gen")
    figures = metrics.result()
    assert figures["pace/overrun"] == figures["pace/overrun/gen"] == pytest.approx(29.0)
    assert figures["pace/modelled_s/decode"] == pytest.approx(0.01)
    assert figures["pace/overrun_s/decode"] == pytest.approx(0.29)
    pacer.report(later, "gen")
    assert later.result() == {"pace/waited_s": 0.0}, "handed over once"


def test_what_is_to_be_waited_for_and_what_is_not_there_is_no_overrun():
    clock, pacer = _pacer()
    with pacer.stage():
        with pacer.step({"train": 1.0}):
            pass
        with pacer.step({"optimizer": 0.5}):
            pacer.until(pacer.now + 2.0, "onload")
            pacer.until(pacer.now - 2.0, "onload")
        pacer.rest()
        clock.now += 3.0
        with pacer.step({"decode": 0.25}, {"decode": 0.05}):
            clock.now += 0.1
    assert clock.now == pytest.approx(100 + 1 + 0.5 + 2 + 3 + 0.25)
    assert pacer.modelled_s == {"train": 1.0, "optimizer": 0.5, "onload": 2.0, "decode": 0.25}
    assert pacer.ideal_s["decode"] == 0.05 and pacer.waited_s == pytest.approx(3.0) and not pacer.overrun_s


seconds = st.floats(0, 0.2)


@given(st.lists(st.tuples(seconds, seconds, seconds, st.booleans()), max_size=20), st.floats(0, 0.05))
def test_every_second_of_a_stage_is_modelled_waited_or_overrun(steps, oversleep_s):
    clock, pacer = _pacer(oversleep_s=oversleep_s)
    with pacer.stage():
        for between, modelled, real, rests in steps:
            if rests:
                pacer.rest()
            clock.now += between
            start = pacer.now
            with pacer.step({"decode": modelled / 2, "prefill": modelled / 2}):
                clock.now += real
            assert clock.now - pacer.now <= CATCH_UP_S + 1e-9 and pacer.now >= start + modelled - 1e-9
            assert clock.now >= pacer.now - 1e-9, "no step ends before its modelled end"
    told = sum(pacer.modelled_s.values()) + pacer.waited_s + sum(pacer.overrun_s.values())
    assert clock.now - 100 == pytest.approx(told, abs=1e-6)


def _steps(rank, device, count):
    pacer = Pacer()
    group = dist.group.WORLD
    dist.barrier()
    start = time.perf_counter()
    with pacer.stage():
        for number in range(count):
            with pacer.step({"decode": 0.06 if (number + rank) % 2 else 0.02}, group=group):
                pass
    return start, time.perf_counter(), dict(pacer.modelled_s), pacer.waited_s, sum(pacer.overrun_s.values())


def test_ranks_that_step_together_take_the_longest_of_them_and_do_not_drift_apart():
    count = 12
    found = run_ranks(_steps, 2, count)
    for start, end, modelled, waited, overrun in found:
        assert modelled["decode"] == pytest.approx(count * 0.04)
        assert waited >= count * 0.02, "for the longer one of every step"
        assert end - start == pytest.approx(modelled["decode"] + waited + overrun, abs=patience(0.01))
    host_s = max(overrun for *_, overrun in found) + patience(0.03)  # what a busy host took
    for start, end, *_ in found:
        assert count * 0.06 <= end - start < count * 0.06 + 0.05 + host_s, "the longest of each, and no drift"
    assert abs(found[0][1] - found[1][1]) < host_s, "they end together"

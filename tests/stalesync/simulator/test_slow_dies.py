"""Slow dies: drawn by seed and number, and paid for by those that wait for them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.simulator.outcome import outcome_of
from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.slow_dies import SlowDies
from tests.stalesync.simulator.configs import config_of, simulation_of


@given(st.integers(0, 99), st.integers(1, 300), st.integers(1, 300), st.floats(0, 1))
def test_a_cluster_contains_the_factors_of_a_smaller_one(seed, few, more, share):
    slow = SlowDies(share, 0.05, 0.30)
    one, both = (slow.factor(seed, range(count)) for count in (few, few + more))
    rest = slow.factor(seed, range(few, few + more))
    assert 1 <= one <= both == max(one, rest) <= 1.3
    assert one == max(slow.factor(seed, [die]) for die in range(few))


def test_the_share_of_slow_dies_and_the_spread_are_those_stated():
    factors = [SlowDies(0.1, 0.05, 0.30).factor(3, [die]) for die in range(4000)]
    slow = [factor for factor in factors if factor > 1]
    assert 0.085 < len(slow) / len(factors) < 0.115 and 1.05 <= min(slow) < 1.06 and 1.29 < max(slow) <= 1.3


def slowed(run, slow):
    return SimulatedRun(replace(run.setup, slow_dies=slow), run._lengths)


@pytest.mark.parametrize(("deployment", "bound"), [("colocated", 0), ("separate", 1), ("hybrid", 1)])
def test_dies_that_are_all_as_slow_take_as_much_longer(deployment, bound):
    one, slow = simulation_of(config_of(deployment, bound)), simulation_of(config_of(deployment, bound))
    slow = slowed(slow, SlowDies(1.0, 0.5, 0.5))
    one.run(), slow.run()
    assert slow.totals().training_card_s == pytest.approx(1.5 * one.totals().training_card_s, rel=0.02)
    assert slow.totals().generating_card_s == pytest.approx(1.5 * one.totals().generating_card_s, rel=0.05)
    lost = outcome_of(slow).lost
    assert sum(lost.values()) + outcome_of(slow).utilisation == pytest.approx(1)
    assert lost["slow dies"] > 0.1 and outcome_of(one).lost["slow dies"] == 0


def test_one_slow_die_slows_training_and_its_own_engine_only():
    config = config_of("separate", 0)
    seed = next(seed for seed in range(99) if 1 < SlowDies(0.2, 0.3, 0.3).factor(seed, range(4)))
    config.run.seed = seed
    run = slowed(simulation_of(config), SlowDies(0.2, 0.3, 0.3))
    scale = run.setup.engine.cost.pace.time_scale
    for engine, dies in zip(run.cards.engines, run.setup.worker.engines, strict=True):
        factor = run.setup.slow_dies.factor(seed, dies)
        assert engine.spec.cost.pace.time_scale == pytest.approx(scale / factor)
    assert run.cards.training_factor == run.setup.slow_dies.factor(seed, run.setup.worker.deployment.train)

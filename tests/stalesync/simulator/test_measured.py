"""Simulations of what benchmarks measure on real, paced cards are close to their figures."""

from __future__ import annotations

import random

import pytest

from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.lengths import SimulatedPrompt, TraceLengths
from stalesync.simulator.outcome import min_steps, outcome_of
from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.setup import SimulationSetup
from tests.stalesync.simulator.configs import config_of

MEASURED = {
    ("separate", 0, 4): 1143,
    ("separate", 0, 5): 1148,
    ("separate", 1, 4): 2377,
    ("separate", 2, 4): 2390,
    ("colocated", 0, None): 2051,
    ("colocated", 1, None): 2628,
    ("colocated", 2, None): 2607,
    ("hybrid", 1, 2): 2647,
    ("hybrid", 2, 2): 2613,
}
"""docs/figures.md, "Running ahead": modelled tokens/s by deployment, staleness bound and cards that only generate"""

COMPARED = {
    ("separate", 0, 3): 1121,
    ("separate", 1, 3): 1787,
    ("colocated", 0, None): 1387,
    ("colocated", 1, None): 2112,
    ("hybrid", 0, 2): 1335,
    ("hybrid", 1, 2): 2174,
}
"""The same, "The systems side by side", of four steps"""
SIMULATED = {
    ("separate", 0, 2): 918,
    ("separate", 1, 2): 1193,
    ("separate", 0, 3): 1086,
    ("separate", 1, 3): 1780,
    ("colocated", 0, None): 1461,
    ("colocated", 1, None): 2174,
    ("hybrid", 1, 2): 2182,
}
"""The same, simulated, of 24 steps"""


def prompts(num_rows=100, epochs=8):
    """The prompts of a benchmark, in its order: rows, which are shuffled in every epoch."""
    forced = ForcedLengths(0, 8, 68)
    for epoch in range(epochs):
        order = list(range(num_rows))
        random.Random(f"0-epoch-{epoch}").shuffle(order)
        names = [f"e{epoch}-{row}" for row in order]
        for name, lengths in zip(names, forced.of_groups(names, range(8)), strict=True):
            yield SimulatedPrompt(name, 4, lengths)


@pytest.mark.parametrize(("mode", "tokens_per_s"), MEASURED.items())
def test_simulated_speeds_are_within_5_percent_of_measured_ones(mode, tokens_per_s):
    deployment, bound, generating = mode
    config = config_of(
        deployment,
        bound,
        cards=8,
        prompts=64,
        group=8,
        steps=min_steps(bound) + 5,
        speed=52.0,
        max_response_length=68,
        max_seqs=8,
    )
    config.fusion.infer_cards = generating
    config.training.share_prefixes = "off"  # as in these runs
    run = SimulatedRun(SimulationSetup.of(config), TraceLengths(list(prompts())))
    run.run()
    assert outcome_of(run).tokens_per_s == pytest.approx(tokens_per_s, rel=0.05)


def tokens_per_s_of_compare(deployment, bound, generating, steps):
    """Of a run of benchmarks/compare.py whose first steps, one and one more where it runs ahead, are not measured."""
    config = config_of(deployment, bound, prompts=16, group=8, steps=40, speed=44.0, max_response_length=68, max_seqs=8)
    config.fusion.infer_cards, config.device.pace_training = generating, 1.0
    config.algorithm.kl_coef, config.training.share_prefixes = 0.01, "off"
    run = SimulatedRun(SimulationSetup.of(config), TraceLengths(list(prompts(num_rows=16, epochs=50))))
    run.run()
    measured = run.steps[1 + bound : 1 + bound + steps]
    per_s = sum(step.tokens for step in measured) / sum(step.seconds for step in measured)
    return per_s * config.device.pace_tokens / config.device.pace_speed


@pytest.mark.parametrize(("mode", "tokens_per_s"), COMPARED.items())
def test_simulated_speeds_of_the_systems_side_by_side_are_within_5_percent_of_measured_ones(mode, tokens_per_s):
    assert tokens_per_s_of_compare(*mode, steps=4) == pytest.approx(tokens_per_s, rel=0.05)


@pytest.mark.extended
@pytest.mark.parametrize(("mode", "tokens_per_s"), SIMULATED.items())
def test_the_systems_side_by_side_over_more_steps_are_as_fast_as_the_page_of_figures_says(mode, tokens_per_s):
    assert tokens_per_s_of_compare(*mode, steps=24) == pytest.approx(tokens_per_s, rel=0.02)

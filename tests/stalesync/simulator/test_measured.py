"""Simulations of what benchmarks/stalesync.py measures on real, paced cards are close to its figures."""

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
    ("separate", 0, 4): 544,
    ("colocated", 0, None): 965,
    ("colocated", 1, None): 1231,
    ("hybrid", 1, 2): 1238,
    ("hybrid", 2, 2): 1246,
}
"""docs/figures.md, "Running ahead": modelled tokens/s by deployment, staleness bound and cards that only generate"""


def prompts():
    """The prompts of the benchmark, in its order: of 100 rows, which are shuffled in every epoch."""
    forced = ForcedLengths(0, 8, 68)
    for epoch in range(8):
        order = list(range(100))
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
        max_response_length=68,
        max_seqs=8,
    )
    config.fusion.infer_cards = generating
    config.training.share_prefixes = "off"  # as in these runs
    run = SimulatedRun(SimulationSetup.of(config), TraceLengths(list(prompts())))
    run.run()
    assert outcome_of(run).tokens_per_s == pytest.approx(tokens_per_s, rel=0.05)

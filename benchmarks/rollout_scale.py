"""Run the part `scale` of `benchmarks/rollout.py`: Pangu 718B on 1, 4 and 16 supernodes, by `scripts/simulate.py`."""

from __future__ import annotations

import argparse
from typing import Any

from fusion.resources import RECIPES
from stalesync.job.job_arguments import parse
from stalesync.simulator.cluster import base_of, simulate
from stalesync.simulator.command_line import OPTIONS, cases_of, scenario_of
from stalesync.simulator.report import growing_loss, linearity

PUBLISHED = {(4, 0): 0.85, (4, 1): 0.91}
"""Linearity by supernodes and staleness (RL Fusion; the bound with StaleSync is not published)"""

WORKLOAD = """data.prompts_per_step=512 data.max_prompt_length=1024 rollout.max_response_length=16384
rollout.forced_median=2048 rollout.max_seqs=64"""

TARGETS = {4: 0.95, 16: 0.90}
"""Lower bounds of linearity with staleness, by supernodes"""


def scale(args: argparse.Namespace) -> dict[str, Any]:
    """Simulates every number of supernodes at staleness 0, 1 and 2."""
    parsed = parse(
        [
            "model=pangu_718b",
            "cluster=cloudmatrix384",
            f"supernodes={args.supernodes}",
            "stalesync.max_staleness=0,1,2",
            f"run.steps={args.scale_steps}",
            *WORKLOAD.split(),
        ],
        options=OPTIONS,
        flags=[],
        conf=RECIPES / "conf",
    )
    scenario = scenario_of(parsed, RECIPES)
    base, outcomes = base_of(scenario, "colocated"), {}
    figures: dict[str, Any] = {}
    for case in cases_of(parsed.options):
        outcomes[case] = simulate(scenario, base, case)
        one: dict[str, Any] = {"tokens_per_s": outcomes[case].tokens_per_s, "linearity": linearity(outcomes, case)}
        one |= {"limits_linearity": growing_loss(outcomes, case), "limits_speed": outcomes[case].limit}
        figures.setdefault(str(case.supernodes), {})[str(case.max_staleness)] = one
        published = PUBLISHED.get((case.supernodes, case.max_staleness))
        beside = f" (published {published:.0%})" if published else ""
        shown = f"{one['linearity']:.1%}{beside}, limited by {one['limits_linearity']}" if one["linearity"] else "-"
        print(
            f"scale, {case.supernodes} supernodes, staleness {case.max_staleness}: {one['tokens_per_s']:,.0f} tokens/s"
            f", linearity {shown}; speed limited by {one['limits_speed']}",
            flush=True,
        )
    return figures


def misses(figures: dict[str, Any]) -> list[str]:
    """Returns a line for each target that is missed."""
    return [
        f"{supernodes} supernodes, staleness {staleness}: linearity {one['linearity']:.3f}, target {least}"
        for supernodes, least in TARGETS.items()
        for staleness, one in figures.get(str(supernodes), {}).items()
        if staleness != "0" and one["linearity"] < least
    ]

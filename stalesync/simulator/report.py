"""Render the outcomes of simulated runs: a table with the published anchors beside it, or plain data."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusion.costmodel.memory import WEIGHT_BYTES
from fusion.costmodel.report import published_of, rates, rates_of, table_of
from stalesync.job.workload import describe, lengths_of, workload_of
from stalesync.simulator.baseline import PUBLISHED_MODEL, PUBLISHED_RATIO, BaselineRow, BaselineStep, rows
from stalesync.simulator.cluster import Base, Case, Scenario
from stalesync.simulator.outcome import LOSSES, Outcome

PAPER = {
    "tokens_per_s": {
        "1 supernode, separate, synchronous": 14e3,
        "1 supernode, colocated, synchronous": 25e3,
        "1 supernode, with staleness": 35e3,
        "4 supernodes, synchronous": 85e3,
        "4 supernodes, with staleness": 127e3,
    },
    "linearity": {"4 supernodes, synchronous": 0.85, "4 supernodes, with staleness": 0.91},
}
"""As published by their authors for Pangu 718B on CloudMatrix 384 supernodes; the lengths of their responses are not
public. Nothing here is fitted to them."""


CASE = "fusion", "staleness", "supernodes"
"""Columns of `_cells`"""
STALE_STEPS = 5
"""Measured steps from which on linearity with staleness is stated: steps that run ahead are long and short in turns"""
STALE_CYCLES = 5
"""Cycles of 1 + staleness steps, of which the last is the longest, from which on speed is stated without reservation"""


def linearity(outcomes: Mapping[Case, Outcome], case: Case) -> float | None:
    """Return the speed over that of one supernode times their number; None: one supernode was not simulated, or too few
    steps were measured."""
    one = outcomes.get(Case(1, case.deployment, case.max_staleness))
    if one is None or (case.supernodes > 1 and case.max_staleness and one.steps < STALE_STEPS):
        return None
    return outcomes[case].tokens_per_s / (case.supernodes * one.tokens_per_s)


def assumptions(scenario: Scenario, outcomes: Mapping[Case, Outcome]) -> list[str]:
    """State what linearity and speed rest on, a line each."""
    lines = [
        "strong scaling: all supernodes share the prompts of one"
        if scenario.strong
        else "weak scaling: every supernode brings prompts of its own (scaling=strong: all share those of one)",
        f"{scenario.slow_dies} (slow_share=, slow_by=)",
        f"{scenario.hardware.link_bytes_per_s(-1) / 1e9:.1f} GB/s a die between supernodes (network_gb_s=)",
    ]
    for case, outcome in outcomes.items():
        name = f"{case.deployment}, staleness {case.max_staleness}, {case.supernodes} supernodes"
        if case.supernodes > 1 and not outcome.gradients_network_gb:
            lines.append(f"{name}: no gradients between supernodes, as each has whole pipeline stages")
        if case.supernodes > 1 and case.max_staleness and outcome.steps < STALE_STEPS:
            needed = STALE_STEPS + 1 + 2 * case.max_staleness
            lines.append(f"{name}: {outcome.steps} measured steps are too few for linearity: run.steps={needed}")
        cycle = 1 + case.max_staleness
        if case.max_staleness and outcome.steps < STALE_CYCLES * cycle:
            needed = cycle + case.max_staleness + STALE_CYCLES * cycle
            lines.append(f"{name}: {outcome.steps} measured steps may state too many tokens/s: run.steps={needed}")
    return [f"linearity assumes: {lines[0]}", *lines[1:]]


def growing_loss(outcomes: Mapping[Case, Outcome], case: Case) -> str | None:
    """Return the kind of lost time whose share grew most over one supernode: what limits linearity."""
    one = outcomes.get(Case(1, case.deployment, case.max_staleness))
    if one is None or case.supernodes == 1:
        return None
    lost = outcomes[case].lost
    return max(lost, key=lambda kind: lost[kind] - one.lost[kind])


def as_dict(scenario: Scenario, bases: Mapping[str, Base], outcomes: Mapping[Case, Outcome]) -> dict[str, Any]:
    """Return everything as plain data."""
    rows = [
        asdict(case)
        | outcome.as_dict()
        | {"linearity": linearity(outcomes, case), "limits_linearity": growing_loss(outcomes, case)}
        for case, outcome in outcomes.items()
    ]
    config, setups = scenario.config, {name: base.setup for name, base in bases.items()}
    return {
        "model": scenario.shape.name,
        "hardware": scenario.hardware.name,
        "layouts": {name: {"train": str(one.train), "infer": str(one.infer)} for name, one in setups.items()},
        "rates": {name: rates_of(one) for name, one in setups.items()},
        "published_rates": published_of(next(iter(setups.values()))),
        "notes": scenario.notes,
        "lengths": str(scenario.trace) if scenario.trace else _lengths(scenario),
        "environment": None if scenario.environment is None else asdict(scenario.environment),
        "config": {name: asdict(getattr(config, name)) for name in ("run", "data", "algorithm", "reward", "rollout")},
        "rows": rows,
        "assumptions": assumptions(scenario, outcomes),
        "baseline": [asdict(row) | {"gap": row.gap} for row in baseline(scenario, outcomes)],
        "published": PAPER,
    }


def render(scenario: Scenario, bases: Mapping[str, Base], outcomes: Mapping[Case, Outcome]) -> Group:
    """Render a report of at most 140 columns."""
    parts: list[RenderableType] = [Text(line) for line in _heading(scenario, bases)]
    parts += [Text(), _table(outcomes), *map(Text, assumptions(scenario, outcomes)), Text(), _losses(outcomes), Text()]
    if compared := baseline(scenario, outcomes):
        parts += [_baseline(compared), Text()]
    parts += [rates({name: base.setup for name, base in bases.items()}), Text()]
    parts += [Text(line) for line in _anchors()]
    return Group(*parts)


def _heading(scenario: Scenario, bases: Mapping[str, Base]) -> list[str]:
    config = scenario.config
    lengths = f"of {scenario.trace}" if scenario.trace else ", ".join(_lengths(scenario).values())
    lines = [
        f"{scenario.shape.name} on {scenario.hardware.name}, per supernode {config.cluster.npus} dies; "
        f"{config.run.steps} steps, seed {config.run.seed}",
        f"{describe(config)}, per supernode",
        f"lengths of responses: {lengths}",
        *scenario.notes,
    ]
    if (environment := scenario.environment) is not None:
        lines.append(
            f"conversations: {environment.turns} turns, observations of {environment.observation_tokens} tokens, "
            f"latency of median {environment.latency_s:g} s and sigma {environment.spread:g}, a branch behind "
            f"{environment.branch_share:.0%} of the turns"
        )
    if seconds := config.reward.latency_s:
        lines.append(f"rewards: {seconds:g} s a sample (reward.latency_s), {config.reward.workers} processes in all")
    return lines + [
        f"{name}: train {base.setup.train}, generate {base.setup.infer}, KV cache of {base.kv_tokens:,} tokens a rank"
        for name, base in bases.items()
    ]


def _cells(case: Case) -> tuple[str, ...]:
    return case.deployment, str(case.max_staleness), str(case.supernodes)


def _table(outcomes: Mapping[Case, Outcome]) -> Table:
    speeds = "tokens/s", "linearity", "utilisation", "of bound", "bound tokens/s"
    table = table_of(*CASE, *speeds, "step s", "tail s", "train s", "switch s", "control s")
    for case, outcome in outcomes.items():
        share = linearity(outcomes, case)
        table.add_row(
            *_cells(case),
            f"{outcome.tokens_per_s:,.0f}",
            "" if share is None else f"{share:.1%}",
            f"{outcome.utilisation:.1%}",
            f"{outcome.ratio_to_bound:.3f}",
            f"{outcome.bound_tokens_per_s:,.0f}",
            *(f"{seconds:,.1f}" for seconds in (outcome.step_s, outcome.tail_s, outcome.train_s, outcome.switch_s)),
            f"{outcome.controller_s:,.1f}",
        )
    return table


def _losses(outcomes: Mapping[Case, Outcome]) -> Table:
    title = "lost share of the cards' time; GB of a step: weights between supernodes, gradients in groups across them"
    kinds = [kind for kind in LOSSES if kind != "slow dies" or any(outcome.lost[kind] for outcome in outcomes.values())]
    figures = *kinds, "weights", "gradients", "limits speed", "limits linearity"
    table = table_of(*CASE, *figures, left=3, title=title)
    for case, outcome in outcomes.items():
        table.add_row(
            *_cells(case),
            *(f"{max(0.0, outcome.lost[kind]):.1%}" for kind in kinds),
            f"{outcome.weights_network_gb:,.0f}",
            f"{outcome.gradients_network_gb:,.0f}",
            outcome.limit,
            growing_loss(outcomes, case) or "",
        )
    return table


def baseline(scenario: Scenario, outcomes: Mapping[Case, Outcome]) -> list[BaselineRow]:
    """Return the terms of the published baseline; none unless one supernode is simulated in both deployments, with the
    model that it is published for."""
    separate, colocated = (outcomes.get(Case(1, name, 0)) for name in ("separate", "colocated"))
    if separate is None or colocated is None or scenario.trace or scenario.shape.name != PUBLISHED_MODEL:
        return []
    work = workload_of(scenario.config)
    job = BaselineStep(
        weight_bytes=WEIGHT_BYTES * scenario.shape.numel,
        samples=work.samples,
        mean_tokens=work.prompt + work.response,
        padded_tokens=work.prompt + work.longest,
        link_bytes_per_s=scenario.hardware.link_bytes_per_s(-1),
        train_s=separate.train_s,
        step_s=separate.step_s,
        colocated_s=colocated.step_s,
    )
    return rows(job)


def _baseline(compared: list[BaselineRow]) -> Table:
    title = f"colocated over the published baseline as it was, staleness 0 (published: {PUBLISHED_RATIO:.3f})"
    table = table_of("term", "seconds a step", "ratio so far", "not explained", title=title)
    table.add_column("source")
    for row in compared:
        figures = f"{row.term.seconds:,.0f}", f"{row.ratio:.3f}", f"{row.gap:.2f} x"
        table.add_row(row.term.name, *figures, row.term.source)
    return table


def _anchors() -> list[str]:
    speeds = ", ".join(f"{name} {speed / 1000:.0f}k" for name, speed in PAPER["tokens_per_s"].items())
    shares = ", ".join(f"{name} {share:.0%}" for name, share in PAPER["linearity"].items())
    lines = [f"{kind}: {what}" for kind, what in LOSSES.items()]
    return [
        *lines,
        "",
        f"published for Pangu 718B on CloudMatrix 384, tokens/s: {speeds}",
        f"published linearity: {shares}. Nothing is fitted to either; their lengths are not public.",
    ]


def _lengths(scenario: Scenario) -> dict[str, str]:
    assumed = lengths_of(scenario.config)
    between, within, runaway = assumed.spread
    return {
        "median": f"median {assumed.median:g}",
        "spread": f"sigma {between:g} between rows and {within:g} within a group",
        "runaway": f"{runaway:.1%} at the maximum",
    }

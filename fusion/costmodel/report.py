"""Render an estimate as tables of 100 columns, or as plain data for `--json`."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusion.costmodel.fitting import advice, fitting_settings
from fusion.costmodel.layouts import layout_text
from fusion.costmodel.rates import BATCH, CONTEXT, plan_rates, published_rates
from fusion.costmodel.search import DeploymentEstimate, Ranking, SetupEstimate, keys_of
from fusion.costmodel.setup import Setup
from fusion.costmodel.switch_time import ACHIEVED, PUBLISHED, parked_s
from fusion.ep_switch.topology import LEVELS
from fusion.model import Parallel
from fusion.telemetry.memory import GIB

GB = 1e9
SECONDS = ("step_s", "train_s", "generate_s", "switch_s")
LINKS = {
    "card": "inside a card",
    "node": "inside a node",
    "supernode": "inside a supernode",
    "network": "between supernodes",
}
UNITS = (
    (" link", "GB/s", GB),
    ("per_s", "GB/s", GB),
    ("_s", "us", 1e-6),
    ("flops", "TFLOPS", 1e12),
    ("_bytes", "GiB", GIB),
    ("_reached", "%", 0.01),
)
FIGURES = {
    "collective_s": "one exchange",
    "hbm_bytes": "HBM of a die",
    "reserved_bytes": "of it reserved",
    "hbm_bytes_per_s": "HBM",
    "flops": "bf16 of a die",
    "forward_reached": "of it, a forward pass",
    "train_reached": "of it, a training step",
    "layer_s": "a layer's overhead",
    "launch_s": "a launch by the host",
    "out_bytes_per_s": "die to host",
    "back_bytes_per_s": "host to die",
    "host_bytes": "host of a node",
    "host_copy_bytes_per_s": "copy on the host",
    "unmap_bytes_per_s": "giving HBM back",
}


def render(chosen: SetupEstimate, ranking: Ranking, *, check: dict[str, float], notes: Iterable[str]) -> Group:
    """Render a report: the setup, whether it fits, its seconds, the alternatives, the constants with their sources."""
    parts: list[RenderableType] = [_heading(chosen, notes), _memory(chosen), _bytes(chosen), _seconds(chosen)]
    parts += [rates({"this plan": chosen.setup}), _pairs(ranking, chosen), _deployments(ranking), _sources(chosen)]
    parts.append(_check(check))
    return Group(*[piece for part in parts for piece in (part, Text())])


def verdict(chosen: SetupEstimate) -> str:
    """Summarize whether the setup fits, in one line."""
    if chosen.problems:
        return "does not fit: " + "; ".join([*chosen.problems, advice(chosen.setup)])
    return (
        f"fits: switches of {chosen.switches[0].seconds:.2f} s and {chosen.switches[1].seconds:.2f} s, "
        f"{chosen.memory.kv_tokens:,} tokens of KV cache an attention rank"
    )


def as_dict(chosen: SetupEstimate, ranking: Ranking, check: dict[str, float]) -> dict[str, Any]:
    """Return the report as plain data: bytes, seconds, bytes/s."""
    setup, moved = chosen.setup, dict(zip(("to_generate", "to_train"), chosen.moved, strict=True))
    return {
        "model": {"name": setup.shape.name, "parameters": setup.shape.numel, "active": setup.shape.active},
        "hardware": setup.hardware.name,
        "dies": setup.dies,
        "dies_per_node": setup.hardware.topology.ranks_per_node,
        "nodes": -(-setup.dies // setup.hardware.topology.ranks_per_node),
        "layouts": {"train": layout_text(setup.train), "infer": layout_text(setup.infer)},
        "workload": asdict(setup.workload),
        "fits": not chosen.problems,
        "problems": list(chosen.problems),
        "fits_with": fitting_settings(chosen.setup),
        "bytes_by_phase_and_owner": chosen.memory.phases,
        "usable_bytes": setup.hardware.usable_bytes,
        "kv_tokens": chosen.memory.kv_tokens,
        "host_bytes_per_node": chosen.memory.host_bytes,
        "moved": {
            way: {
                end: {
                    level: {"mean": float(nbytes.mean()), "most": float(nbytes.max())}
                    for level, nbytes in zip(LEVELS, getattr(traffic, end), strict=True)
                }
                for end in ("sent", "received")
            }
            | {"total": traffic.total, "kept_most": float(traffic.kept.max())}
            for way, traffic in moved.items()
        },
        "switch": {
            way: {"seconds": switch.seconds, "limit": switch.limit, "parts": switch.parts}
            | {"pessimistic_s": slow.seconds, "pessimistic_parts": slow.parts, "parked_s": parked_s(setup, source)}
            for way, switch, slow, source in zip(
                moved, chosen.switches, chosen.pessimistic, (setup.train, setup.infer), strict=True
            )
        },
        "rates": rates_of(setup),
        "published": published_of(setup),
        "figures": {name: {"value": v, "source": s} for name, (v, s) in setup.hardware.figures().items()},
        "ranking": [_pair(pair) for pair in ranking.pairs],
        "deployments": [_deployment_row(plan) for plan in ranking.deployments],
        "recommended": next(map(_deployment_row, ranking.deployments), None),
        "check": {what: {"predicted": s, "published": PUBLISHED[what]} for what, s in check.items()},
    }


def _pair(pair: SetupEstimate) -> dict[str, Any]:
    return {
        "train": layout_text(pair.setup.train),
        "infer": layout_text(pair.setup.infer),
        "fits": not pair.problems,
        "kv_tokens": pair.memory.kv_tokens,
    } | {name: getattr(pair, name) for name in SECONDS}


def _deployment_row(plan: DeploymentEstimate) -> dict[str, Any]:
    return {
        "deployment": plan.deployment,
        "train": layout_text(plan.train),
        "train_dies": plan.train.world,
        "infer": layout_text(plan.infer),
        "infer_dies": plan.infer.world,
        "keys": keys_of(plan),
    } | {name: getattr(plan, name) for name in (*SECONDS, "reference_s")}


def _heading(chosen: SetupEstimate, notes: Iterable[str]) -> Text:
    setup = chosen.setup
    cards = setup.dies // setup.hardware.topology.ranks_per_card
    lines = [
        f"{setup.shape.name}: {setup.shape.numel / 1e9:.1f}B parameters, {setup.shape.active / 1e9:.1f}B active",
        f"{setup.dies} dies ({cards} cards) {setup.hardware.name}; "
        f"trains in {_axes(setup.train)}, generates in {_axes(setup.infer)}",
    ]
    text = Text("\n".join(lines), style="bold")
    for note in notes:
        text.append(f"\n{note}", style="not bold dim")
    style = "not bold red" if chosen.problems else "not bold green"
    return text.append(f"\n{verdict(chosen)}", style=style)


def _axes(parallel: Parallel) -> str:
    return f"{layout_text(parallel)} (dp{parallel.dp}, edp{parallel.edp})"


def table_of(*columns: str, left: int = 1, title: str | None = None) -> Table:
    """Return a table with the first ``left`` columns justified to the left, the others to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    return table


def _under(title: str, table: Table, *captions: str) -> Group:
    """Render a table below its title and above its captions."""
    return Group(Text(title, style="bold"), table, *(Text(caption, style="dim") for caption in captions if caption))


def _memory(chosen: SetupEstimate) -> Group:
    phases, usable = chosen.memory.phases, chosen.setup.hardware.usable_bytes
    table = table_of("owner", *phases)
    for owner in next(iter(phases.values())):
        sizes = [held[owner] for held in phases.values()]
        if any(sizes):
            table.add_row(owner, *(f"{size / GIB:.1f}" if size else "" for size in sizes))
    table.add_section()
    totals = [chosen.memory.total(phase) for phase in phases]
    shown = (f"{total / GIB:.1f}" if total <= usable else f"[red]{total / GIB:.1f}[/red]" for total in totals)
    table.add_row(f"together, of {usable / GIB:.0f} usable", *shown)
    host, room = chosen.memory.host_bytes / GIB, chosen.setup.hardware.host_bytes.value / GIB
    return _under(
        "HBM of a die by phase, GiB (a die of the pipeline stage that takes most)",
        table,
        f"KV cache of an attention rank: {chosen.memory.kv_tokens:,} tokens. "
        f"Optimizer state of a node while away: {host:.0f} GiB of its host's {room:,.0f}.",
    )


def _bytes(chosen: SetupEstimate) -> Group:
    table = table_of("link", *("sent", "most", "received", "most") * 2)
    for i, level in enumerate(LEVELS):
        row = [
            figure(end[i]) / GB for t in chosen.moved for end in (t.sent, t.received) for figure in (np.mean, np.max)
        ]
        if any(row):
            outer = "between nodes" if level == "network" and not chosen.setup.hardware.has_supernodes else LINKS[level]
            table.add_row(outer, *(f"{value:.2f}" for value in row))
    table.add_section()
    row = [f(end.sum(0)) / GB for t in chosen.moved for end in (t.sent, t.received) for f in (np.mean, np.max)]
    table.add_row("together", *(f"{value:.2f}" for value in row))
    kept = [t.kept.max() / GB for t in chosen.moved]
    return _under(
        "GB of a die by link, mean and most: to generate (left), to train if all came over the wire (right)",
        table,
        f"Held in both layouts, and therefore not sent: up to {kept[0]:.2f} GB a die.",
    )


def _seconds(chosen: SetupEstimate) -> Group:
    table = table_of("way", "part", "seconds", "pessimistic", left=2)
    for way, switch, slow in zip(("to generate", "to train"), chosen.switches, chosen.pessimistic, strict=True):
        for i, ((part, seconds), slow_s) in enumerate(zip(switch.parts.items(), slow.parts.values(), strict=True)):
            table.add_row("" if i else way, part, f"{seconds:.3f}", f"{slow_s:.3f}")
        total = f"[bold]all; the limit is {switch.limit}", f"[bold]{switch.seconds:.3f}", f"[bold]{slow.seconds:.3f}"
        table.add_row("", *total)
        table.add_section()
    overlap = chosen.memory.overlap or not chosen.switches[0].parts.get("offload")
    how = (
        "Packing overlaps with the wire, bucket by bucket, and the host link with both."
        if overlap
        else "The optimizer state leaves before the weights change: HBM does not hold both."
    )
    achieved = f"Pessimistic: links reach {ACHIEVED.value / GB:.1f} GB/s, as published updates: {ACHIEVED.source}."
    setup = chosen.setup
    infer_s, train_s = (parked_s(setup, source) for source in (setup.train, setup.infer))
    parked = f"Where no order keeps the bound on memory, the host link adds {infer_s:.3f} and {train_s:.3f}."
    return _under("Seconds of a switch by part", table, how, achieved, parked)


def rates_of(setup: Setup) -> dict[str, Any]:
    """Return the predicted rates of a plan as plain data."""
    return {work: asdict(rate) for work, rate in plan_rates(setup).items()}


def published_of(setup: Setup) -> list[dict[str, Any]]:
    """Return the published rates of a plan's model and card as plain data, with the predictions."""
    return [
        {"work": one.work, "system": one.system, "tokens_per_s": one.tokens_per_s, "predicted": asdict(rate)}
        | {"conditions": one.conditions, "source": one.source}
        for one, rate in published_rates(setup)
    ]


def rates(plans: Mapping[str, Setup]) -> Group:
    """Render the predicted rates of plans of one model on one card, by name, beside the published ones of both."""
    table = table_of("work", "system", "published", "predicted", "ms a step", "limit", left=2)
    table.columns[-1].justify = "left"
    lines = [f"{', '.join(plans)}: for sequences of {CONTEXT:,} tokens, {BATCH} an attention rank in decoding."]
    for name, setup in plans.items():
        for work, rate in plan_rates(setup).items():
            table.add_row(work, name, "", f"{rate.tokens_per_s:,.0f}", f"{1e3 * rate.step_s:.1f}", rate.limit)
    for one, rate in published_rates(setup):
        shown = (f"{tokens:,.0f}" for tokens in (one.tokens_per_s, rate.tokens_per_s))
        table.add_row(one.work, one.system, *shown, f"{1e3 * rate.step_s:.1f}", rate.limit)
        lines.append(f"{one.system}: {one.conditions}; {one.source}")
    if len(lines) == 1:
        lines.append(f"No published rate of {setup.shape.name} on {setup.hardware.name} is known.")
    return _under("Tokens a second of a die: published, and predicted under the same conditions", table, *lines)


def _pairs(ranking: Ranking, chosen: SetupEstimate) -> Group:
    table = table_of("train", "infer", "step s", "train", "generate", "switch", "KV tokens", "", left=2)
    table.columns[-1].justify = "left"
    pairs = list(ranking.pairs)
    if all((p.setup.train, p.setup.infer) != (chosen.setup.train, chosen.setup.infer) for p in pairs):
        pairs.append(chosen)
    for pair in pairs:
        seconds = (pair.step_s, pair.train_s, pair.generate_s, pair.switch_s)
        asked = (pair.setup.train, pair.setup.infer) == (chosen.setup.train, chosen.setup.infer)
        why = pair.problems[0].split(",")[0] if pair.problems else "this plan" if asked else ""
        layouts = layout_text(pair.setup.train), layout_text(pair.setup.infer)
        shown = (f"{s:.1f}" if s >= 10 else f"{s:.2f}" for s in seconds)
        table.add_row(*layouts, *shown, f"{pair.memory.kv_tokens:,}", why)
    refused = "; ".join(f"{count} {why}" for why, count in ranking.refused.items())
    trains, infers = ranking.num_candidates
    candidates = f"Of {trains} layouts to train in and {infers} to generate in."
    return _under("Layouts by seconds of a step", table, candidates + (f" Out: {refused}." if refused else ""))


def _deployments(ranking: Ranking) -> RenderableType:
    if not ranking.deployments:
        return Text("No deployment of this model fits these dies.", style="red")
    table = table_of("deployment", "trains", "generates", "step s", "generate", "train", "switch", left=3)
    for plan in ranking.deployments:
        trains = f"{plan.train.world} dies {layout_text(plan.train)}"
        generates = f"{plan.infer.world} dies {layout_text(plan.infer)}"
        seconds = (plan.step_s, plan.generate_s, plan.train_s, plan.switch_s)
        table.add_row(plan.deployment, trains, generates, *(f"{s:.1f}" if s >= 10 else f"{s:.2f}" for s in seconds))
    best = ranking.deployments[0]
    advice = (
        f"By these seconds, without staleness: {' '.join(keys_of(best))}. "
        f"With a reference or a reward model: fusion.deployment=full, {best.reference_s:.0f} s more a step for each."
    )
    return Group(_under("Deployments by seconds of a step (staleness 0)", table), Text(advice, style="bold"))


def _sources(chosen: SetupEstimate) -> Group:
    table = table_of("figure", "value", "source")
    table.columns[2].justify = "left"
    for name, (value, source) in chosen.setup.hardware.figures().items():
        unit, scale = next((unit, scale) for end, unit, scale in UNITS if name.endswith(end))
        table.add_row(FIGURES.get(name, name), f"{value / scale:,.0f} {unit}", source)
    return _under("Figures it rests on", table)


def _check(check: dict[str, float]) -> Text:
    parts = ", ".join(f"{what} {s:.1f} s (published {PUBLISHED[what]})" for what, s in check.items())
    return Text(
        "Check of the figures, none fitted to it (giving HBM back was measured on the same run): DeepSeek-R1 on 128 "
        f"Atlas A3 cards (256 dies), train TP4 EP8 PP8, all-gather and blocking copies: {parts}. "
        "Seconds of training and generation, which only rank, are calibrated on that system.",
        style="dim",
    )

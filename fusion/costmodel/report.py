"""An estimate as tables for 100 columns, and as plain data for `--json`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fusion.costmodel.layouts import layout_text
from fusion.costmodel.search import Estimate, Ranking, Split
from fusion.costmodel.switch_time import PUBLISHED
from fusion.ep_switch.topology import LEVELS
from fusion.model import Parallel

GIB, GB = 2.0**30, 1e9
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
    "layer_s": "a layer's launches",
    "out_bytes_per_s": "die to host",
    "back_bytes_per_s": "host to die",
    "host_bytes": "host of a node",
    "host_copy_bytes_per_s": "copy on the host",
    "unmap_bytes_per_s": "giving HBM back",
}


def render(given: Estimate, ranking: Ranking, *, check: dict[str, float], notes: Iterable[str]) -> Group:
    """Everything, in the order of reading: what is planned, whether it fits, how long it takes, what else there is."""
    parts: list[RenderableType] = [_heading(given, notes), _memory(given), _bytes(given), _seconds(given)]
    parts += [_pairs(ranking, given), _splits(ranking), _sources(given), _check(check)]
    return Group(*[piece for part in parts for piece in (part, Text())])


def verdict(given: Estimate) -> str:
    """One line: it fits, or what does not."""
    if given.problems:
        return "does not fit: " + "; ".join(given.problems)
    return (
        f"fits: switches of {given.switches[0].seconds:.2f} s and {given.switches[1].seconds:.2f} s, "
        f"{given.memory.kv_tokens:,} tokens of KV cache an attention rank"
    )


def as_dict(given: Estimate, ranking: Ranking, check: dict[str, float]) -> dict[str, Any]:
    """The same as plain data: bytes, seconds, bytes/s."""
    setup, moved = given.setup, dict(zip(("to_generate", "to_train"), given.moved, strict=True))
    return {
        "model": {"name": setup.shape.name, "parameters": setup.shape.numel, "active": setup.shape.active},
        "hardware": setup.hardware.name,
        "dies": setup.dies,
        "dies_per_node": setup.hardware.topology.ranks_per_node,
        "nodes": -(-setup.dies // setup.hardware.topology.ranks_per_node),
        "layouts": {"train": layout_text(setup.train), "infer": layout_text(setup.infer)},
        "fits": not given.problems,
        "problems": list(given.problems),
        "bytes_by_phase_and_owner": given.memory.phases,
        "usable_bytes": setup.hardware.usable_bytes,
        "kv_tokens": given.memory.kv_tokens,
        "host_bytes_per_node": given.memory.host_bytes,
        "moved": {
            way: {
                end: {
                    level: {
                        "mean": float(getattr(traffic, end)[i].mean()),
                        "most": float(getattr(traffic, end)[i].max()),
                    }
                    for i, level in enumerate(LEVELS)
                }
                for end in ("sent", "received")
            }
            | {"total": traffic.total, "kept_most": float(traffic.kept.max())}
            for way, traffic in moved.items()
        },
        "switch": {
            way: {"seconds": switch.seconds, "limit": switch.limit, "parts": switch.parts}
            for way, switch in zip(moved, given.switches, strict=True)
        },
        "figures": {name: {"value": v, "source": s} for name, (v, s) in setup.hardware.figures().items()},
        "ranking": [_pair(pair) for pair in ranking.pairs],
        "deployments": [_as_row(split) for split in ranking.splits],
        "recommended": _recommended(ranking),
        "check": {what: {"predicted": s, "published": PUBLISHED[what]} for what, s in check.items()},
    }


def _pair(pair: Estimate) -> dict[str, Any]:
    return {
        "train": layout_text(pair.setup.train),
        "infer": layout_text(pair.setup.infer),
        "fits": not pair.problems,
        "step_s": pair.step_s,
        "train_s": pair.train_s,
        "generate_s": pair.generate_s,
        "switch_s": pair.switch_s,
        "kv_tokens": pair.memory.kv_tokens,
    }


def _as_row(split: Split) -> dict[str, Any]:
    return {
        "deployment": split.deployment,
        "train": layout_text(split.train),
        "train_dies": split.train.world,
        "infer": layout_text(split.infer),
        "infer_dies": split.infer.world,
        "step_s": split.step_s,
        "generate_s": split.generate_s,
        "train_s": split.train_s,
        "switch_s": split.switch_s,
        "reference_s": split.reference_s,
        "keys": _keys(split),
    }


def _recommended(ranking: Ranking) -> dict[str, Any] | None:
    return _as_row(ranking.splits[0]) if ranking.splits else None


def _heading(given: Estimate, notes: Iterable[str]) -> Text:
    setup = given.setup
    cards = setup.dies // setup.hardware.topology.ranks_per_card
    lines = [
        f"{setup.shape.name}: {setup.shape.numel / 1e9:.1f}B parameters, {setup.shape.active / 1e9:.1f}B active",
        f"{setup.dies} dies ({cards} cards) {setup.hardware.name}; "
        f"trains in {_axes(setup.train)}, generates in {_axes(setup.infer)}",
    ]
    text = Text("\n".join(lines), style="bold")
    for note in notes:
        text.append(f"\n{note}", style="not bold dim")
    style = "not bold red" if given.problems else "not bold green"
    return text.append(f"\n{verdict(given)}", style=style)


def _axes(parallel: Parallel) -> str:
    return f"{layout_text(parallel)} (dp{parallel.dp}, edp{parallel.edp})"


def _table(*columns: str, left: int = 1) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", overflow="fold")
    return table


def _under(title: str, table: Table, *captions: str) -> Group:
    """A table under its title; captions below it."""
    return Group(Text(title, style="bold"), table, *(Text(caption, style="dim") for caption in captions if caption))


def _memory(given: Estimate) -> Group:
    phases, usable = given.memory.phases, given.setup.hardware.usable_bytes
    table = _table("owner", *phases)
    for owner in next(iter(phases.values())):
        sizes = [held[owner] for held in phases.values()]
        if any(sizes):
            table.add_row(owner, *(f"{size / GIB:.1f}" if size else "" for size in sizes))
    table.add_section()
    totals = [given.memory.total(phase) for phase in phases]
    table.add_row(f"together, of {usable / GIB:.0f} usable", *(_fits(total, usable) for total in totals))
    host, room = given.memory.host_bytes / GIB, given.setup.hardware.host_bytes.value / GIB
    return _under(
        "HBM of a die by phase, GiB (a die of the pipeline stage that takes most)",
        table,
        f"KV cache of an attention rank: {given.memory.kv_tokens:,} tokens. "
        f"Optimizer state of a node while away: {host:.0f} GiB of its host's {room:,.0f}.",
    )


def _fits(total: float, usable: float) -> str:
    shown = f"{total / GIB:.1f}"
    return shown if total <= usable else f"[red]{shown}[/red]"


def _bytes(given: Estimate) -> Group:
    table = _table("link", *("sent", "most", "received", "most") * 2)
    for i, level in enumerate(LEVELS):
        row = [figure(end[i]) / GB for t in given.moved for end in (t.sent, t.received) for figure in (_mean, _most)]
        if any(row):
            outer = "between nodes" if level == "network" and not given.setup.hardware.has_supernodes else LINKS[level]
            table.add_row(outer, *(f"{value:.2f}" for value in row))
    table.add_section()
    row = [figure(end.sum(0)) / GB for t in given.moved for end in (t.sent, t.received) for figure in (_mean, _most)]
    table.add_row("together", *(f"{value:.2f}" for value in row))
    kept = [t.kept.max() / GB for t in given.moved]
    return _under(
        "GB of a die by link, mean and most: to generate (left), to train if all came over the wire (right)",
        table,
        f"Held in both layouts, so that it does not travel: up to {kept[0]:.2f} GB a die.",
    )


def _mean(values: Any) -> float:
    return float(values.mean())


def _most(values: Any) -> float:
    return float(values.max())


def _seconds(given: Estimate) -> Group:
    table = _table("way", "part", "seconds", left=2)
    for way, switch in zip(("to generate", "to train"), given.switches, strict=True):
        for i, (part, seconds) in enumerate(switch.parts.items()):
            table.add_row("" if i else way, part, f"{seconds:.3f}")
        table.add_row("", f"[bold]all; the limit is {switch.limit}", f"[bold]{switch.seconds:.3f}")
        table.add_section()
    overlap = given.memory.overlap or not given.switches[0].parts.get("offload")
    how = (
        "Packing runs behind the wire, bucket by bucket; the host link works beside both."
        if overlap
        else "The optimizer state leaves before the weights change: HBM does not hold both."
    )
    return _under("Seconds of a switch by part", table, how)


def _pairs(ranking: Ranking, given: Estimate) -> Group:
    table = _table("train", "infer", "step s", "train", "generate", "switch", "KV tokens", "", left=2)
    table.columns[-1].justify = "left"
    pairs = list(ranking.pairs)
    if all((p.setup.train, p.setup.infer) != (given.setup.train, given.setup.infer) for p in pairs):
        pairs.append(given)
    for pair in pairs:
        seconds = (pair.step_s, pair.train_s, pair.generate_s, pair.switch_s)
        asked = (pair.setup.train, pair.setup.infer) == (given.setup.train, given.setup.infer)
        why = pair.problems[0].split(",")[0] if pair.problems else "this plan" if asked else ""
        layouts = layout_text(pair.setup.train), layout_text(pair.setup.infer)
        shown = (f"{s:.1f}" if s >= 10 else f"{s:.2f}" for s in seconds)
        table.add_row(*layouts, *shown, f"{pair.memory.kv_tokens:,}", why)
    refused = "; ".join(f"{count} {why}" for why, count in ranking.refused.items())
    looked_at = f"Of {ranking.looked_at[0]} layouts to train in and {ranking.looked_at[1]} to generate in."
    return _under("Layouts by seconds of a step", table, looked_at + (f" Out: {refused}." if refused else ""))


def _splits(ranking: Ranking) -> RenderableType:
    if not ranking.splits:
        return Text("No deployment of this model fits these dies.", style="red")
    columns = ("deployment", "trains", "generates", "step s", "generate", "train", "switch")
    table = _table(*columns, left=3)
    for split in ranking.splits:
        trains = f"{split.train.world} dies {layout_text(split.train)}"
        generates = f"{split.infer.world} dies {layout_text(split.infer)}"
        seconds = (split.step_s, split.generate_s, split.train_s, split.switch_s)
        table.add_row(split.deployment, trains, generates, *(f"{s:.1f}" if s >= 10 else f"{s:.2f}" for s in seconds))
    best = ranking.splits[0]
    advice = (
        f"Recommended: {' '.join(_keys(best))}. "
        f"With a reference or a reward model: fusion.deployment=full, {best.reference_s:.0f} s more a step for each."
    )
    return Group(_under("Deployments by seconds of a step (staleness 0)", table), Text(advice, style="bold"))


def _keys(split: Split) -> list[str]:
    """What to tell scripts/train.py."""
    keys = [f"fusion.deployment={split.deployment}"]
    alone = split.infer.world - (0 if split.deployment == "separate" else split.train.world)
    keys += [f"fusion.infer_cards={alone}"] if alone else []
    for name, layout in (("train", split.train), ("infer", split.infer)):
        sizes = {axis: getattr(layout, axis) for axis in ("tp", "pp", "ep", "etp")}
        keys += [f"parallel.{name}.{axis}={size}" for axis, size in sizes.items() if size > 1]
    return keys


def _sources(given: Estimate) -> Group:
    table = _table("figure", "value", "source")
    table.columns[2].justify = "left"
    for name, (value, source) in given.setup.hardware.figures().items():
        unit, scale = next((unit, scale) for end, unit, scale in UNITS if name.endswith(end))
        table.add_row(FIGURES.get(name, name), f"{value / scale:,.0f} {unit}", source)
    return _under("Figures it rests on", table)


def _check(check: dict[str, float]) -> Text:
    told = ", ".join(f"{what} {s:.1f} s (published {PUBLISHED[what]})" for what, s in check.items())
    return Text(
        "Check of the figures, none fitted to it (giving HBM back was measured on the same run): DeepSeek-R1 on 128 "
        f"Atlas A3 cards (256 dies), train TP4 EP8 PP8, all-gather and blocking copies: {told}. "
        "Seconds of training and generation, which only rank, are calibrated on that run.",
        style="dim",
    )

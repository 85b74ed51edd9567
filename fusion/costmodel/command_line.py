"""The command line of `scripts/plan.py`: arguments to a setup, the setup to tables or JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from fusion.costmodel.hardware import hardware_named
from fusion.costmodel.layouts import parse_layout
from fusion.costmodel.presets import load_cluster, load_shape
from fusion.costmodel.report import as_dict, render
from fusion.costmodel.search import Estimate, Ranking, estimate, rank
from fusion.costmodel.setup import EngineLimits, Setup, TrainingLimits
from fusion.costmodel.switch_time import published
from fusion.model import Parallel

OPTIONS = ("model", "cluster", "train", "infer", "cluster.hardware", "cluster.npus")
PUBLISHED_RUN = ("deepseek_r1_671b", "ascend_910c", Parallel(256, tp=4, ep=32, pp=8), Parallel(256, tp=2, ep=128))
"""Model, hardware and layouts of the run the figures are checked on. Its EP8 spans TP4 (`moe_tp_extend_ep`): EP32
here."""
WIDTH = 100

ConfigGroups = Mapping[str, type]
"""Name of a config group → its dataclass, whose `validate()` raises ValueError: `training`, `fusion` and `rollout`."""


@dataclass(frozen=True)
class Arguments:
    """A parsed command line. ``overrides``: key of a config group → value as text; ``json_path``: None for tables,
    "-" for the terminal."""

    options: dict[str, str]
    overrides: dict[str, str]
    json_path: str | None


def answer(arguments: Sequence[str], recipes: Path, groups: ConfigGroups) -> int:
    """Plans the requested setup and prints it.

    Args:
        recipes: the folder that holds `shapes/` and `conf/cluster/`.
        groups: the config groups whose keys may be overridden.

    Returns:
        0 if the plan fits, else 1.

    Raises:
        ValueError: an argument that is unknown or wrong, by key.
    """
    parsed = parse(arguments, groups)
    options = parsed.options
    preset = load_shape(options.get("model"), recipes / "shapes")
    hardware, dies = load_cluster(
        options.get("cluster"),
        hardware=options.get("cluster.hardware"),
        npus=options.get("cluster.npus"),
        folder=recipes / "conf" / "cluster",
    )
    limits = _limits(parsed.overrides, groups)
    setup = Setup(preset.shape, hardware, train=Parallel(dies), infer=Parallel(dies), **limits)
    train, infer = (
        None if text == "auto" else parse_layout(key, text, world=dies, shape=preset.shape)
        for key, text in ((key, options.get(key, "auto")) for key in ("train", "infer"))
    )
    ranking = rank(setup)
    chosen = _chosen(setup, train, infer) if train or infer else ranking.pairs[0]
    check = check_figures(recipes / "shapes")
    _print(chosen, ranking, check=check, notes=preset.notes, json_path=parsed.json_path)
    return 1 if chosen.problems else 0


def check_figures(shapes: Path) -> dict[str, float]:
    """Predicts the published run's switch: its parts in seconds."""
    model, hardware, train, infer = PUBLISHED_RUN
    return published(Setup(load_shape(model, shapes).shape, hardware_named(hardware), train=train, infer=infer))


def parse(arguments: Sequence[str], groups: ConfigGroups) -> Arguments:
    """Splits `key=value` arguments into options of this command and overrides of config groups.

    Raises:
        ValueError: an unknown argument, or `--json` without a path.
    """
    options: dict[str, str] = {}
    overrides: dict[str, str] = {}
    remaining, json_path = list(arguments), None
    keys = [*OPTIONS, *(f"{group}.{f.name}" for group, kind in groups.items() for f in dataclasses.fields(kind))]
    while remaining:
        argument = remaining.pop(0)
        if argument == "--json" or argument.startswith("--json="):
            json_path = argument[7:] if "=" in argument else remaining.pop(0) if remaining else ""
            if not json_path:
                raise ValueError("--json needs a path, or - for the terminal")
            continue
        key, equals, value = argument.partition("=")
        if not equals or key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            raise ValueError(f"unknown argument {argument!r}" + (f"; did you mean {near[0]}=?" if near else ""))
        (options if key in OPTIONS else overrides)[key] = value
    return Arguments(options, overrides, json_path)


def _limits(overrides: Mapping[str, str], groups: ConfigGroups) -> dict[str, Any]:
    """Returns the fields of a `Setup` that come from config groups, which validate what the arguments change."""
    configs: dict[str, Any] = {}
    for name, kind in groups.items():
        changed = {key.split(".")[1]: yaml.safe_load(v) for key, v in overrides.items() if key.startswith(f"{name}.")}
        configs[name] = kind(**({"recompute": True} if name == "training" else {}) | changed)
        configs[name].validate()
    return {
        "training": _subset(TrainingLimits, configs["training"]),
        "rollout": _subset(EngineLimits, configs["rollout"]),
        "fusion": configs["fusion"],
    }


def _subset(kind: type, config: object) -> Any:
    return kind(**{f.name: getattr(config, f.name) for f in dataclasses.fields(kind)})


def _chosen(setup: Setup, train: Parallel | None, infer: Parallel | None) -> Estimate:
    """Estimates the requested layouts; one that is `auto` (None) is the best in combination with the other."""
    best = rank(setup, (train, infer), num_exact=1).pairs[0].setup if not (train and infer) else setup
    return estimate(setup.with_layouts(train or best.train, infer or best.infer))


def _print(
    chosen: Estimate,
    ranking: Ranking,
    *,
    check: dict[str, float],
    notes: tuple[str, ...],
    json_path: str | None,
) -> None:
    if json_path is not None:
        text = json.dumps(as_dict(chosen, ranking, check), indent=2)
        if json_path == "-":
            print(text)
            return
        Path(json_path).write_text(text + "\n")
    console = Console()
    console = console if console.is_terminal and console.width >= WIDTH else Console(width=WIDTH)
    console.print(render(chosen, ranking, check=check, notes=notes))

"""From the words of a command line to an answer: presets, layouts, overrides; then tables or JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from fusion.costmodel.hardware import ASCEND_910C, Hardware, hardware_named
from fusion.costmodel.layouts import parse_layout
from fusion.costmodel.report import as_dict, render
from fusion.costmodel.search import Estimate, Ranking, estimate, rank
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.costmodel.switch_time import published
from fusion.ep_switch.config import FusionConfig
from fusion.inference.config import RolloutConfig
from fusion.model import Parallel
from fusion.model.config import read_json
from fusion.training.config import TrainingConfig

GROUPS = {"training": TrainingConfig, "fusion": FusionConfig, "rollout": RolloutConfig}
WORDS = ("model", "cluster", "train", "infer", "cluster.npus")
PUBLISHED_RUN = ("deepseek_r1_671b", Parallel(256, tp=4, ep=32, pp=8), Parallel(256, tp=2, ep=128))
"""Model and layouts of the run the figures are checked on. Its EP8 spans TP4 (`moe_tp_extend_ep`): EP32 here."""
WIDTH = 100


@dataclass(frozen=True)
class Preset:
    """A shape of recipes/shapes: the model, and what is known and what was inferred about it."""

    shape: Shape
    notes: tuple[str, ...] = ()


def answer(arguments: Sequence[str], recipes: Path) -> int:
    """Plans what the arguments ask for and prints it; 0 if it fits, else 1.

    Raises:
        ValueError: an argument that is unknown or wrong, by key.
    """
    words, overrides, out = _words(arguments)
    preset = load_shape(words.get("model"), recipes / "shapes")
    hardware, dies = load_cluster(words.get("cluster"), words.get("cluster.npus"), recipes / "conf" / "cluster")
    setup = Setup(preset.shape, hardware, Parallel(dies), Parallel(dies), **_groups(overrides))
    fixed = tuple(
        None if text == "auto" else parse_layout(key, text, dies, preset.shape)
        for key, text in ((key, words.get(key, "auto")) for key in ("train", "infer"))
    )
    ranking = rank(setup)
    given = ranking.pairs[0]
    if any(fixed):
        best = rank(setup, (fixed[0], fixed[1]), few=1) if not all(fixed) else None
        train = fixed[0] or (best and best.pairs[0].setup.train)
        infer = fixed[1] or (best and best.pairs[0].setup.infer)
        assert train and infer
        given = estimate(setup.with_layouts(train, infer))
    check = check_figures(recipes / "shapes")
    _tell(given, ranking, check, preset.notes, out)
    return 1 if given.problems else 0


def check_figures(shapes: Path) -> dict[str, float]:
    """The published run's switch as the model predicts it, in seconds."""
    name, train, infer = PUBLISHED_RUN
    return published(Setup(load_shape(name, shapes).shape, ASCEND_910C, train, infer))


def load_shape(name: str | None, folder: Path) -> Preset:
    """Raises:
    ValueError: no such shape, or a config that cannot be planned for; names the key.
    """
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if not name:
        raise ValueError(f"model is not set: expected one of {', '.join(known)}, or a Hugging Face folder")
    if name in known:
        told = yaml.safe_load((folder / f"{name}.yaml").read_text())
        shape = Shape.from_hf(name, told["config"])
        return Preset(shape, (f"source: {told['source'].strip()}", f"inferred: {told['inferred'].strip()}"))
    if (Path(name) / "config.json").is_file():
        return Preset(Shape.from_hf(Path(name).name, read_json(Path(name) / "config.json")))
    raise ValueError(f"model={name!r}: expected one of {', '.join(known)}, or a Hugging Face folder")


def load_cluster(name: str | None, npus: str | None, folder: Path) -> tuple[Hardware, int]:
    """(hardware, dies).

    Raises:
        ValueError: no such cluster, one that names no hardware, or a number of dies that is none.
    """
    presets = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))}
    known = [stem for stem, preset in presets.items() if preset.get("hardware")]
    if name not in known:
        raise ValueError(f"cluster={name!r}: expected one that names its hardware: {', '.join(known)}")
    preset = presets[name]
    dies = preset["npus"] if npus is None else int(npus) if npus.isdigit() else 0
    if dies < 1:
        raise ValueError(f"cluster.npus={npus}: expected a whole number of at least 1")
    return hardware_named(preset["hardware"]), dies


def _words(arguments: Sequence[str]) -> tuple[dict[str, str], dict[str, str], str | None]:
    """(words of this command, overrides of config groups, where the JSON goes)."""
    words: dict[str, str] = {}
    overrides: dict[str, str] = {}
    left, out = list(arguments), None
    while left:
        argument = left.pop(0)
        if argument == "--json" or argument.startswith("--json="):
            out = argument[7:] if "=" in argument else left.pop(0) if left else ""
            if not out:
                raise ValueError("--json needs a path, or - for the terminal")
            continue
        key, equals, value = argument.partition("=")
        keys = [*WORDS, *(f"{group}.{f.name}" for group, kind in GROUPS.items() for f in dataclasses.fields(kind))]
        if not equals or key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            raise ValueError(f"unknown argument {argument!r}" + (f"; did you mean {near[0]}=?" if near else ""))
        (words if key in WORDS else overrides)[key] = value
    return words, overrides, out


def _groups(overrides: dict[str, str]) -> dict[str, Any]:
    """The config groups with what the arguments change, validated by their rooms."""
    groups: dict[str, Any] = {}
    for name, kind in GROUPS.items():
        given = {key.split(".")[1]: yaml.safe_load(v) for key, v in overrides.items() if key.startswith(f"{name}.")}
        groups[name] = kind(**({"recompute": True} if name == "training" else {}) | given)
        groups[name].validate()
    return groups


def _tell(given: Estimate, ranking: Ranking, check: dict[str, float], notes: tuple[str, ...], out: str | None) -> None:
    if out is not None:
        text = json.dumps(as_dict(given, ranking, check), indent=2)
        if out == "-":
            print(text)
            return
        Path(out).write_text(text + "\n")
    console = Console()
    console = console if console.is_terminal and console.width >= WIDTH else Console(width=WIDTH)
    console.print(render(given, ranking, check, notes))

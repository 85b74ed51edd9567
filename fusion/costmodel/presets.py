"""Load model shapes and clusters by name: `recipes/shapes/*.yaml`, Hugging Face folders, `recipes/conf/cluster/*.yaml`;
and check the figures on a published run."""

from dataclasses import dataclass
from pathlib import Path

import yaml

from fusion.costmodel.hardware import Hardware, hardware_named
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.costmodel.switch_time import published
from fusion.model import ModelConfig, Parallel
from fusion.telemetry.keys import as_yaml

PUBLISHED_RUN = ("deepseek_r1_671b", "ascend_910c", Parallel(256, tp=4, ep=32, pp=8), Parallel(256, tp=2, ep=128))
"""Model, hardware and layouts of the run the figures are checked on. Its EP8 spans TP4 (`moe_tp_extend_ep`): EP32
here."""


@dataclass(frozen=True)
class Preset:
    """A model's shape; ``notes``: where it comes from, and what of it was inferred."""

    shape: Shape
    notes: tuple[str, ...] = ()


def load_shape(name: str | None, folder: Path, key: str = "model") -> Preset:
    """Load the shape of a model: a preset in ``folder`` or a Hugging Face folder.
    Raise ValueError: no such model, or a config that cannot be planned for; names ``key``."""
    known = sorted(path.stem for path in folder.glob("*.yaml"))
    if not name:
        raise ValueError(f"{key} is not set: expected one of {', '.join(known)}, or a Hugging Face folder")
    if name in known:
        preset = yaml.safe_load((folder / f"{name}.yaml").read_text())
        config = ModelConfig.from_hf(preset["config"], key=f"{key}={name}").without_predictors
        notes = f"source: {preset['source'].strip()}", f"inferred: {preset['inferred'].strip()}"
        return Preset(Shape(name, config), notes)
    if (Path(name) / "config.json").is_file():
        return Preset(Shape(Path(name).name, ModelConfig.from_hf(name, key=f"{key}={name}").without_predictors))
    raise ValueError(f"{key}={name!r}: expected one of {', '.join(known)}, or a Hugging Face folder")


def load_cluster(name: str | None, hardware: str | None, npus: str | None, folder: Path) -> tuple[Hardware, int]:
    """Resolve a cluster to its hardware and number of dies. ``hardware`` and ``npus`` override the preset; with both
    no preset is needed.
    Raise ValueError: no such cluster or hardware, none that states its hardware, or an invalid number of dies."""
    presets = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))}
    known = [stem for stem, preset in presets.items() if preset.get("hardware") or hardware]
    if name is None and hardware and npus:
        preset = {}
    elif name in known:
        preset = presets[name]
    else:
        missing = "a cluster preset" if hardware else "one that names its hardware"
        raise ValueError(
            f"cluster={as_yaml(name)}: expected {missing}: {', '.join(known)}; or cluster.hardware= and cluster.npus="
        )
    dies = preset["npus"] if npus is None else int(npus) if npus.isdigit() else 0
    if dies < 1:
        raise ValueError(f"cluster.npus={npus}: expected a whole number of at least 1")
    return hardware_named(hardware or preset["hardware"]), dies


def check_figures(shapes: Path) -> dict[str, float]:
    """Predict the published run's switch: its parts in seconds."""
    model, hardware, train, infer = PUBLISHED_RUN
    return published(Setup(load_shape(model, shapes).shape, hardware_named(hardware), train=train, infer=infer))

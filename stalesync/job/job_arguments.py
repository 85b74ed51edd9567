"""Read the arguments of `scripts/train.py` for commands that answer for a job without running it (plan, simulate).

Invariant: of every key that an argument changes, the command reads it, it is timeless, or it is refused by name; with
`--job` what would be refused is listed instead. Which it is, the key itself states (`fusion.telemetry.keys.KeyUse`)."""

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.layouts import AXES
from fusion.costmodel.presets import Preset, load_cluster, load_shape
from fusion.telemetry.keys import as_yaml
from stalesync.job import automatic
from stalesync.job.config import Config
from stalesync.job.keys import keys_of, value_of
from stalesync.job.other_names import OTHER_NAMES
from stalesync.job.overrides import (
    HYDRA_OPTIONS,
    accepted,
    check_overrides,
    choices_in,
    composed,
    names_here,
    typed,
    typed_keys,
)

CHOSEN = ("fusion.deployment", "fusion.infer_cards", "stalesync.max_staleness", "run.steps", "run.seed")
"""Keys that a plan chooses for the deployments that it simulates"""


@dataclass
class JobArguments:
    """A parsed command line. ``options``: of the command, by name; ``paths``: by flag; ``overrides``: those of a job;
    ``for_job``: whether keys that the command does not read are listed instead of refused."""

    options: dict[str, str] = field(default_factory=dict)
    paths: dict[str, str] = field(default_factory=dict)
    overrides: list[str] = field(default_factory=list)
    for_job: bool = False


def parse(arguments: Sequence[str], *, options: Collection[str], flags: Sequence[str], conf: Path) -> JobArguments:
    """Split the arguments by what they are. ``options``: names of the command's own `name=value`; ``flags``: flags with
    a path, such as `--json`; ``conf``: folder of the config groups. Raise ValueError for an unknown argument, with the
    most similar known one, or a flag without a path."""
    choices, hints = choices_in(conf), typed_keys()
    known = [*options, *hints, *choices]
    parsed, remaining = JobArguments(), list(arguments)
    while remaining:
        argument = remaining.pop(0)
        name, equals, value = argument.partition("=")
        if name in flags:
            parsed.paths[name] = value if equals else remaining.pop(0) if remaining else ""
            if not parsed.paths[name]:
                raise ValueError(f"{name} needs a path")
        elif argument == "--job":
            parsed.for_job = True
        elif not equals or name not in known:
            if name in OTHER_NAMES or names_here(name, list(hints)) or name[:1] == "-" and name not in HYDRA_OPTIONS:
                check_overrides([argument, *remaining[:1]])
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}=?" if near else f"expected one of {', '.join(options)}, or a key of a job"
            raise ValueError(f"unknown argument {argument!r}; {hint}")
        elif name in options and not (name == "model" and value in choices["model"]):
            if hints.get(name) is int:
                with suppress(ValueError):  # the command itself states what it expects
                    value = ",".join(typed(name, text, int) for text in value.split(","))
            parsed.options[name] = value
        else:
            parsed.overrides.append(argument)
    return parsed


def layout_of(arguments: JobArguments, config: Config, side: str) -> str:
    """Return the layout that `train=` (`infer=`) or `parallel.train` states, or auto; raise ValueError if both do."""
    text, key = arguments.options.get(side), f"parallel.{side}"
    if not any(override.startswith((f"{key}.", "parallel=")) for override in arguments.overrides):
        return text or "auto"
    if text is not None:
        raise ValueError(f"{side}={text!r}: expected it or {key}, not both")
    sizes = getattr(config.parallel, side)
    return "".join(f"{axis}{getattr(sizes, axis, 1)}" for axis in AXES)


def model_of(options: Mapping[str, str], shapes: Path) -> Preset:
    """Load the model that `model=` or `model.path=` names; raise ValueError unless one of them does."""
    if {"model", "model.path"} <= options.keys():
        raise ValueError(f"model.path={options['model.path']}: expected model= or model.path=, not both")
    key = "model.path" if "model.path" in options else "model"
    return load_shape(options.get(key), shapes, key=key)


def cluster_of(options: Mapping[str, str], conf: Path) -> tuple[Hardware, int]:
    """Load the cards that `cluster=` or `cluster.hardware=` names, and their number, as `load_cluster`."""
    hardware, npus = options.get("cluster.hardware"), options.get("cluster.npus")
    return load_cluster(options.get("cluster"), hardware=hardware, npus=npus, folder=conf / "cluster")


def print_answer(table: RenderableType, content: Mapping[str, Any], *, json_path: str | None, width: int) -> None:
    """Print a table of at least ``width`` columns, and write the content as JSON; to "-": prints JSON alone."""
    if json_path is not None:
        text = json.dumps(content, indent=2)
        if json_path == "-":
            print(text)
            return
        Path(json_path).write_text(text + "\n")
    console = Console()
    console = console if console.is_terminal and console.width >= width else Console(width=width)
    console.print(table)


def job_config(
    arguments: JobArguments, conf: Path, *, command: str, defaults: Sequence[str]
) -> tuple[Config, list[str]]:
    """Compose the config of the job, as `scripts/train.py` does; return it, and lines that state what is assumed and
    what is not modelled. ``command``: `plan` or `simulate`; ``defaults``: overrides that apply unless an argument
    states otherwise. Raise ValueError for a value that is not accepted, or a changed key that the command neither reads
    nor may ignore."""
    conf = conf.absolute()  # Hydra expects it
    config = composed(conf, [*defaults, *accepted(arguments.overrides, conf)])
    for group in ("run", "data", "algorithm", "training", "fusion", "rollout"):
        getattr(config, group).validate()
    base = _base(conf, tuple(defaults))
    unread = unread_keys(config, base, command)
    if unread and not arguments.for_job:
        value, only = (as_yaml(value_of(side, unread[0])) for side in (config, base))
        raise ValueError(f"{unread[0]}={value}: expected {only}, as {command}.py does not model this key")
    stated = {override.split("=")[0] for override in arguments.overrides}
    assumed = [default for default in defaults if default.split("=")[0] not in stated]
    lines = [f"assumed unless stated: {' '.join(assumed)}"] if assumed else []
    if off := automatic.unresolved(config):
        lines.append(f"taken to be off, although a run may resolve auto: {' '.join(off)}")
    simulated = {key.path for key in keys_of(Config).values() if "simulate" in key.use.read_by and command == "plan"}
    simulated = simulated - {*CHOSEN}
    for kind, keys in (
        ("modelled in the simulated deployments only", [key for key in unread if key in simulated]),
        ("not modelled", [key for key in unread if key not in simulated]),
    ):
        text = " ".join(f"{key}={as_yaml(value_of(config, key))}" for key in keys)
        lines += [f"{kind}: {text}"] if keys else []
    return config, lines


@cache
def _base(conf: Path, defaults: tuple[str, ...]) -> Config:
    """Compose the config that the arguments of a job change."""
    return composed(conf, defaults)


def unread_keys(config: Config, base: Config, command: str) -> list[str]:
    """List the keys in which two configs differ that the command does not read and that are not timeless."""
    return [
        key.path
        for key in keys_of(Config).values()
        if value_of(config, key.path) != value_of(base, key.path)
        and command not in key.use.read_by
        and not key.use.timeless
    ]

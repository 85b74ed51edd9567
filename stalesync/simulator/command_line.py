"""The command line of `scripts/simulate.py`: arguments to a scenario and its cases, outcomes to tables, JSON or PNG."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from fusion.costmodel.presets import load_cluster, load_shape
from fusion.ep_switch.config import DEPLOYMENTS
from fusion.npu.config import DeviceConfig
from stalesync.config import Config
from stalesync.simulator.cluster import Case, Scenario, base_of, check_supernodes, lengths_of, simulate
from stalesync.simulator.outcome import min_steps
from stalesync.simulator.plot import draw
from stalesync.simulator.report import as_dict, render

OPTIONS = ("model", "cluster", "cluster.npus", "cluster.hardware", "train", "infer", "trace")
SWEPT = ("supernodes", "fusion", "stalesync.max_staleness")
KEYS = {
    "run": ("steps", "seed"),
    "data": ("prompts_per_step", "max_prompt_length", "rows"),
    "algorithm": ("group_size", "minibatches", "kl_coef"),
    "training": ("recompute",),
    "fusion": ("infer_cards", "offload", "double_buffer"),
    "stalesync": ("train_tokens", "lend"),
}
"""Keys of `scripts/train.py` with the same meaning here, by group; those of `rollout` are all but NOT_SIMULATED."""
NOT_SIMULATED = frozenset(
    "temperature top_k top_p min_p stop max_length max_parked_kv_mib drafts draft_tree draft_budget draft_mib "
    "draft_max_age draft_history draft_group_mib probe draft_exchange kv_spill max_spilled_kv_mib "
    "batch_invariant".split()
)
DEFAULTS: dict[str, dict[str, Any]] = {
    "run": {"steps": 20},
    "data": {"prompts_per_step": 512, "max_prompt_length": 1024},
    "training": {"recompute": True},
    "rollout": {"max_response_length": 16384, "forced_median": 2048.0, "max_seqs": 64},
}
"""Where the defaults differ from those of a run."""
WIDTH = 150


@dataclass
class Arguments:
    """A parsed command line: values as text, by key. Paths are None where they are not given; "-" is the terminal."""

    options: dict[str, str] = field(default_factory=dict)
    swept: dict[str, str] = field(default_factory=dict)
    overrides: dict[str, str] = field(default_factory=dict)
    json_path: str | None = None
    png_path: str | None = None


def answer(arguments: Sequence[str], recipes: Path) -> None:
    """Simulates what is asked for and prints it.

    Args:
        recipes: the folder that holds `shapes/` and `conf/cluster/`.

    Raises:
        ValueError: an argument that is unknown or wrong, by key.
    """
    parsed = parse(arguments)
    scenario, cases = scenario_of(parsed, recipes), cases_of(parsed.swept)
    steps = scenario.config.run.steps
    for case in cases:
        check_supernodes(scenario, case.supernodes)
        if steps < (least := min_steps(case.max_staleness)):
            raise ValueError(f"run.steps={steps}: stalesync.max_staleness={case.max_staleness} needs at least {least}")
    lengths_of(scenario)
    bases = {name: base_of(scenario, name) for name in dict.fromkeys(case.deployment for case in cases)}
    progress = Console(stderr=True)
    outcomes = {}
    for case in cases:
        with progress.status(f"{case.deployment}, staleness {case.max_staleness}, {case.supernodes} supernodes"):
            outcomes[case] = simulate(scenario, bases[case.deployment], case)
    if parsed.png_path:
        draw(outcomes, Path(parsed.png_path), f"{scenario.shape.name}: tokens/s")
    if parsed.json_path:
        text = json.dumps(as_dict(scenario, bases, outcomes), indent=2)
        if parsed.json_path == "-":
            print(text)
            return
        Path(parsed.json_path).write_text(text + "\n")
    console = Console()
    console = console if console.is_terminal and console.width >= WIDTH else Console(width=WIDTH)
    console.print(render(scenario, bases, outcomes))


def config_keys() -> list[str]:
    """Lists the config keys that are accepted."""
    rollout = [item.name for item in dataclasses.fields(Config().rollout) if item.name not in NOT_SIMULATED]
    return [f"{group}.{name}" for group, names in (KEYS | {"rollout": tuple(rollout)}).items() for name in names]


def parse(arguments: Sequence[str]) -> Arguments:
    """Splits the arguments by what they are.

    Raises:
        ValueError: an unknown argument, with the most similar known one or all; or a flag without a path.
    """
    parsed, remaining, keys = Arguments(), list(arguments), config_keys()
    known = [*OPTIONS, *SWEPT, *keys]
    while remaining:
        argument = remaining.pop(0)
        flag, equals, value = argument.partition("=")
        if flag in ("--json", "--png"):
            path = value if equals else remaining.pop(0) if remaining else ""
            if not path or (flag == "--png" and path == "-"):
                raise ValueError(f"{flag} needs a path" + (", or - for the terminal" if flag == "--json" else ""))
            parsed.json_path, parsed.png_path = (
                (path, parsed.png_path) if flag == "--json" else (parsed.json_path, path)
            )
            continue
        if not equals or flag not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            hint = f"; did you mean {near[0]}=?" if near else f"; expected one of {', '.join(known)}"
            raise ValueError(f"unknown argument {argument!r}{hint}")
        target = parsed.options if flag in OPTIONS else parsed.swept if flag in SWEPT else parsed.overrides
        target[flag] = value
    return parsed


def cases_of(swept: dict[str, str]) -> list[Case]:
    """Returns all combinations of the values of the swept keys.

    Raises:
        ValueError: a value that is not accepted, by key.
    """
    supernodes = [_whole("supernodes", text, least=1) for text in swept.get("supernodes", "1").split(",")]
    bounds = [_whole("stalesync.max_staleness", text) for text in swept.get("stalesync.max_staleness", "0").split(",")]
    deployments = swept.get("fusion", "colocated").split(",")
    for name in deployments:
        if name not in DEPLOYMENTS:
            raise ValueError(f"fusion={name!r}: expected some of {', '.join(DEPLOYMENTS)}")
    cases = product(dict.fromkeys(deployments), sorted({*bounds}), sorted({*supernodes}))
    return [Case(count, name, bound) for name, bound, count in cases]


def scenario_of(parsed: Arguments, recipes: Path) -> Scenario:
    """Resolves model, cluster and config of one supernode.

    Raises:
        ValueError: a value that is not accepted, by key.
    """
    options = parsed.options
    shape = load_shape(options.get("model"), recipes / "shapes").shape
    hardware, npus = load_cluster(
        options.get("cluster"),
        hardware=options.get("cluster.hardware"),
        npus=options.get("cluster.npus"),
        folder=recipes / "conf" / "cluster",
    )
    config = Config()
    config.device = DeviceConfig("emulated", pace=options["model"], pace_tokens=1, pace_speed=1.0)
    config.cluster.npus, config.cluster.hardware = npus, hardware.name
    values = {f"{group}.{name}": value for group, names in DEFAULTS.items() for name, value in names.items()}
    values |= {key: yaml.safe_load(text) for key, text in parsed.overrides.items()}
    for key, value in values.items():
        group, name = key.split(".")
        setattr(getattr(config, group), name, value)
    if "trace" in options:
        config.rollout.forced_median = None
    elif config.rollout.forced_median is None:
        raise ValueError("rollout.forced_median=null: expected a number, or trace=FILE for the lengths of responses")
    for group in ("run", "data", "algorithm", "training", "fusion", "rollout"):
        getattr(config, group).validate()
    _check_batch(config)
    trace = Path(options["trace"]) if "trace" in options else None
    layouts = {name: options.get(name, "auto") for name in ("train", "infer")}
    return Scenario(shape, hardware, config, trace=trace, **layouts)


def _check_batch(config: Config) -> None:
    prompts, minibatches, tokens = (
        config.data.prompts_per_step,
        config.algorithm.minibatches,
        config.stalesync.train_tokens,
    )
    if prompts % minibatches:
        raise ValueError(f"algorithm.minibatches={minibatches} does not divide data.prompts_per_step={prompts}")
    if tokens is not None and not (isinstance(tokens, int) and tokens >= 1):
        raise ValueError(f"stalesync.train_tokens={tokens!r}: expected a whole number of at least 1, or null")


def _whole(key: str, text: str, least: int = 0) -> int:
    if not text.isdigit() or int(text) < least:
        raise ValueError(f"{key}={text}: expected whole numbers of at least {least}, such as {key}={least},{least + 1}")
    return int(text)


def _number(key: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ValueError(f"{key}={text}: expected a number of at least 0")
    return value

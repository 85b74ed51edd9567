"""The command line of `scripts/simulate.py`: arguments to a scenario and its cases, outcomes to tables, JSON or PNG.

Every function raises a ValueError, which names the key, for a value that is not accepted."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

from rich.console import Console

from fusion.colocate.config import DEPLOYMENTS
from fusion.costmodel.hardware import Figure, Hardware
from fusion.inference.config import DraftsConfig
from fusion.npu.config import DeviceConfig
from fusion.telemetry.validation import Checks
from stalesync.job.config import Config
from stalesync.job.cross_checks import check_minibatches
from stalesync.job.job_arguments import JobArguments, cluster_of, job_config, layout_of, model_of, parse, print_answer
from stalesync.simulator.cluster import Case, Scenario, base_of, check_supernodes, lengths_of, simulate
from stalesync.simulator.drafts import PUBLISHED_ACCEPTANCE, DraftSpec
from stalesync.simulator.environment import EnvironmentSpec
from stalesync.simulator.outcome import min_steps
from stalesync.simulator.plot import draw
from stalesync.simulator.report import as_dict, render
from stalesync.simulator.slow_dies import SlowDies

SWEPT = ("supernodes", "fusion", "stalesync.max_staleness")
ENVIRONMENT = {"turns": "1", "observation_tokens": "16", "latency_s": "1", "latency_spread": "0", "branch_share": "0"}
"""Option of the environment of conversations → its default"""
JOB = ("model", "model.path", "cluster", "cluster.npus", "cluster.hardware", "train", "infer", "trace")
SCALE = ("slow_share", "slow_by", "network_gb_s", "scaling")
"""Options of what grows with the cluster"""
OPTIONS = (*JOB, *ENVIRONMENT, *SCALE, "texts", "tokenizer", *SWEPT)
DEFAULTS = ("model=bfloat16", "training.recompute=true", "run.steps=20")
WIDTH = 165


def answer(arguments: Sequence[str], recipes: Path) -> None:
    """Simulate what is asked for and print it. ``recipes``: the folder that holds `shapes/` and `conf/cluster/`."""
    parsed = parse(arguments, options=OPTIONS, flags=["--json", "--png"], conf=recipes / "conf")
    png_path = parsed.paths.get("--png")
    if png_path == "-":
        raise ValueError("--png needs a path")
    scenario = scenario_of(parsed, recipes)
    cases = cases_of(parsed.options, scenario.config)
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
    if png_path:
        draw(outcomes, Path(png_path), f"{scenario.shape.name}: tokens/s")
    content = as_dict(scenario, bases, outcomes)
    print_answer(render(scenario, bases, outcomes), content, json_path=parsed.paths.get("--json"), width=WIDTH)


def cases_of(options: Mapping[str, str], config: Config) -> list[Case]:
    """Return all combinations of the values of SWEPT; ``config``: has those that are not stated, as by `system=`."""
    ahead = options.get("stalesync.max_staleness", str(config.stalesync.max_staleness))
    bounds = [_whole("stalesync.max_staleness", text) for text in ahead.split(",")]
    supernodes = [_whole("supernodes", text, least=1) for text in options.get("supernodes", "1").split(",")]
    deployments = options.get("fusion", config.fusion.deployment).split(",")
    for name in deployments:
        if name not in DEPLOYMENTS:
            raise ValueError(f"fusion={name!r}: expected some of {', '.join(DEPLOYMENTS)}")
    cases = product(dict.fromkeys(deployments), sorted({*bounds}), sorted({*supernodes}))
    return [Case(count, name, bound) for name, bound, count in cases]


def scenario_of(parsed: JobArguments, recipes: Path) -> Scenario:
    """Resolve model, cluster and config of one supernode."""
    options = parsed.options
    conf = recipes / "conf"
    preset = model_of(options, recipes / "shapes")
    hardware, npus = cluster_of(options, conf)
    config, notes = job_config(parsed, conf, command="simulate", defaults=DEFAULTS)
    config.device = DeviceConfig("emulated", pace=options.get("model", options.get("model.path")), pace_tokens=1)
    config.cluster.npus, config.cluster.hardware = npus, hardware.name
    check_minibatches(config)
    for group in ("stalesync", "reward"):
        Checks(group, getattr(config, group)).declared()
    Checks("reward", config.reward).used(config)
    if "network_gb_s" in options:
        hardware = with_network(hardware, 1e9 * _number("network_gb_s", options["network_gb_s"]))
    if (scaling := options.get("scaling", "weak")) not in ("weak", "strong"):
        raise ValueError(f"scaling={scaling!r}: expected one of weak, strong")
    drafts = drafts_of(config.rollout.drafts, options)
    if config.rollout.drafts.is_on:
        notes.append(f"drafts: acceptance {drafts}" if drafts else PUBLISHED_ACCEPTANCE)
    return Scenario(
        replace(preset.shape, adapters=config.training.lora.adapters),
        hardware,
        config,
        train=layout_of(parsed, config, "train"),
        infer=layout_of(parsed, config, "infer"),
        trace=Path(options["trace"]) if "trace" in options else None,
        environment=environment_of(options),
        drafts=drafts,
        slow_dies=slow_dies_of(options),
        strong=scaling == "strong",
        notes=tuple(notes),
    )


def environment_of(options: Mapping[str, str]) -> EnvironmentSpec | None:
    """Return the environment of conversations; None where no option of it is given."""
    if not ENVIRONMENT.keys() & options.keys():
        return None
    stated = ENVIRONMENT | {name: options[name] for name in ENVIRONMENT if name in options}
    turns, tokens = (_whole(name, stated[name], least=1) for name in ("turns", "observation_tokens"))
    latency_s, spread, share = (_number(name, stated[name]) for name in [*ENVIRONMENT][2:])
    if share > 1:
        raise ValueError(f"branch_share={stated['branch_share']}: expected a share of the turns, at most 1")
    return EnvironmentSpec(turns, tokens, latency_s, spread, share)


def drafts_of(config: DraftsConfig, options: Mapping[str, str]) -> DraftSpec | None:
    """Return the drafts whose acceptance is that of recorded texts; None: there are no texts."""
    if "texts" not in options:
        return None
    if not config.is_on:
        raise ValueError(f"texts={options['texts']}: expected rollout.drafts.source=siblings, history or both")
    from stalesync.simulator.draft_texts import measured

    folder = Path(options["tokenizer"]) if "tokenizer" in options else None
    path, siblings, history = Path(options["texts"]), config.from_siblings, config.from_history
    return measured(path, siblings=siblings, history=history, tokenizer=folder)


def slow_dies_of(options: Mapping[str, str]) -> SlowDies:
    """Return which dies are slow."""
    share = _number("slow_share", options.get("slow_share", "0"))
    if share > 1:
        raise ValueError(f"slow_share={options['slow_share']}: expected a share of the dies, at most 1")
    bounds = [_number("slow_by", text) for text in options.get("slow_by", "0.05,0.3").split(",")]
    if len(bounds) > 2 or bounds != sorted(bounds):
        raise ValueError(f"slow_by={options['slow_by']}: expected one share, or the least and the most, as 0.05,0.3")
    return SlowDies(share, bounds[0], bounds[-1])


def with_network(hardware: Hardware, bytes_per_s: float) -> Hardware:
    """Return the hardware with a network between supernodes of which a die reaches this bandwidth."""
    peak = hardware.topology.bytes_per_s[-1]
    if not 0 < bytes_per_s <= peak:
        raise ValueError(f"network_gb_s={bytes_per_s / 1e9:g}: expected more than 0, at most {peak / 1e9:g}")
    reached = Figure(bytes_per_s / peak, "network_gb_s")
    return replace(hardware, reached=(*hardware.reached[:3], reached))


def _number(key: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < inf:
        raise ValueError(f"{key}={text}: expected a number of at least 0")
    return number


def _whole(key: str, text: str, least: int = 0) -> int:
    if not text.isdigit() or int(text) < least:
        raise ValueError(f"{key}={text}: expected whole numbers of at least {least}, such as {key}={least},{least + 1}")
    return int(text)

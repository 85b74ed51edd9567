"""Set up runs of one workload on growing clusters: the same work and layouts for each supernode.

    request ─► base (one supernode): layouts given or searched, KV capacity ─┬─► 1 supernode  ─► Config ─► Outcome
                                                                             └─► 16 supernodes ─► Config ─► Outcome

More supernodes mean more data parallelism and more engines; TP, EP and PP stay. Prompts of a step and cards that only
generate grow with them."""

import copy
from dataclasses import dataclass, fields, replace
from pathlib import Path

from fusion.colocate.config import OWN_CARDS
from fusion.costmodel.fitting import advice
from fusion.costmodel.hardware import Hardware
from fusion.costmodel.layouts import parse_layout
from fusion.costmodel.memory import estimate_memory
from fusion.costmodel.search import estimate_deployment, problems
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.model import Parallel
from fusion.model.options import InferLayoutConfig, LayoutConfig, TrainLayoutConfig
from stalesync.job.config import Config
from stalesync.job.cross_checks import check_order
from stalesync.job.workload import lengths_of as assumed_lengths
from stalesync.job.workload import setup_of
from stalesync.simulator.drafts import DraftSpec
from stalesync.simulator.environment import EnvironmentSpec
from stalesync.simulator.lengths import DrawnLengths, SimulatedLengths, TraceLengths
from stalesync.simulator.outcome import Outcome, outcome_of
from stalesync.simulator.run import SimulatedRun
from stalesync.simulator.setup import SimulationSetup
from stalesync.simulator.slow_dies import SlowDies


@dataclass(frozen=True)
class Scenario:
    """One supernode's work. ``config``: without deployment, layouts and staleness; ``train``, ``infer``: layouts as
    text, or auto; ``trace``: file of lengths, None: they are drawn; ``environment``: None: requests are no
    conversations; ``drafts``: None: those of the config; ``strong``: several supernodes share the prompts of one;
    ``notes``: what is assumed."""

    shape: Shape
    hardware: Hardware
    config: Config
    train: str = "auto"
    infer: str = "auto"
    trace: Path | None = None
    environment: EnvironmentSpec | None = None
    drafts: DraftSpec | None = None
    slow_dies: SlowDies = SlowDies()
    strong: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Case:
    """One run: number of supernodes, deployment and staleness bound."""

    supernodes: int
    deployment: str
    max_staleness: int


@dataclass(frozen=True)
class Base:
    """A deployment on one supernode: its plan, and the KV capacity of an attention rank."""

    setup: Setup
    infer_cards: int | None
    kv_tokens: int


def check_supernodes(scenario: Scenario, supernodes: int) -> None:
    """Raise ValueError if there are to be several supernodes, and ``cluster.npus`` is not a whole one."""
    npus, size = scenario.config.cluster.npus, scenario.hardware.topology.ranks_per_supernode
    if supernodes > 1 and (not scenario.hardware.has_supernodes or npus != size):
        expected = f"{size}, the dies of one" if scenario.hardware.has_supernodes else "cards that have supernodes"
        raise ValueError(
            f"supernodes={supernodes}: cluster.npus={npus} dies of {scenario.hardware.name}, expected {expected}"
        )


def base_of(scenario: Scenario, deployment: str) -> Base:
    """Choose the layouts of a deployment on one supernode: those given, else the best that fit. Raise ValueError, by
    key, if a layout does not fit the model, the dies or their memory."""
    config, shape = scenario.config, scenario.shape
    npus, infer_cards = config.cluster.npus - config.fusion.score_cards, None
    if deployment in OWN_CARDS:
        infer_cards = npus // 2 if config.fusion.infer_cards is None else config.fusion.infer_cards
    train_dies = npus - (infer_cards or 0)
    infer_dies = (infer_cards or 0) if deployment == "separate" else npus
    if train_dies < 1 or infer_dies < 1:
        raise ValueError(f"fusion.infer_cards={infer_cards}: expected fewer than cluster.npus={npus}")
    setup = setup_of(config, shape, hardware=scenario.hardware, dies=config.cluster.npus)
    infer_first = train_dies if deployment == "separate" else 0
    setup = setup.with_layouts(Parallel(train_dies), Parallel(infer_dies), infer_first)
    if "auto" in (scenario.train, scenario.infer):
        name = "colocated" if deployment == "full" else deployment
        best = estimate_deployment(setup, name, train_dies=train_dies, infer_dies=infer_dies)
        if best is None:
            raise ValueError(f"model: no layout of {shape.name} fits fusion={deployment} on {npus} dies")
        train, infer = best.train, best.infer
    if scenario.train != "auto":
        train = parse_layout("train", scenario.train, world=train_dies, shape=shape)
    if scenario.infer != "auto":
        infer = parse_layout("infer", scenario.infer, world=infer_dies, shape=shape)
    setup = setup.with_layouts(train, infer, setup.infer_first)
    sizes = estimate_memory(setup)
    if wrong := problems(setup, sizes):
        wrong_text = "; ".join([*wrong, advice(setup)])
        raise ValueError(f"train, infer: the layouts do not fit fusion={deployment}: {wrong_text}")
    return Base(setup, infer_cards, sizes.kv_tokens)


def simulate(scenario: Scenario, base: Base, case: Case) -> Outcome:
    """Simulate one run; raise ValueError, by key, if the layouts do not fit the cards, or the order not the bound, and
    RuntimeError for an error of the simulator's own."""
    config = config_of(scenario, base, case)
    check_order(config)
    setup = SimulationSetup.of(
        config,
        kv_tokens=base.kv_tokens,
        environment=scenario.environment,
        hardware=scenario.hardware,
        slow_dies=scenario.slow_dies,
        drafts=scenario.drafts,
    )
    run = SimulatedRun(setup, lengths_of(scenario))
    try:
        run.run()
        return outcome_of(run)
    except ValueError as error:  # which the caller would take for a wrong key
        raise RuntimeError("the simulator failed") from error


def config_of(scenario: Scenario, base: Base, case: Case) -> Config:
    """Return the config of a run on several supernodes."""
    config, factor = copy.deepcopy(scenario.config), case.supernodes
    config.cluster.npus *= factor
    work = 1 if scenario.strong else factor
    config.data.prompts_per_step *= work
    config.fusion.deployment = case.deployment
    config.fusion.infer_cards = None if base.infer_cards is None else base.infer_cards * factor
    config.fusion.score_cards *= factor
    config.stalesync.max_staleness = case.max_staleness
    if config.stalesync.train_tokens is not None:
        config.stalesync.train_tokens = config.stalesync.train_tokens * work if case.max_staleness else None
    train, infer = base.setup.train, base.setup.infer
    config.parallel.train = TrainLayoutConfig(**_sizes(train), cp=train.cp)
    config.parallel.infer = InferLayoutConfig(**_sizes(infer), dcp=infer.dcp)
    return config


def lengths_of(scenario: Scenario) -> SimulatedLengths:
    """Return the source of prompts, from its start; raise ValueError if the trace cannot be read, or its groups have
    another size."""
    config, cap = scenario.config, scenario.config.rollout.max_response_length
    if (environment := scenario.environment) is not None:
        cap -= environment.observed
        if cap < environment.turns:
            raise ValueError(
                f"turns={environment.turns}: with observation_tokens={environment.observation_tokens} they do not fit "
                f"rollout.max_response_length={config.rollout.max_response_length}"
            )
    prompt_tokens, size = config.data.max_prompt_length, config.algorithm.group_size
    if scenario.trace is not None:
        trace = TraceLengths.read(scenario.trace, prompt_tokens=prompt_tokens, max_response_tokens=cap)
        if trace.group_size != size:
            raise ValueError(
                f"algorithm.group_size={size}: the groups of trace={scenario.trace} have {trace.group_size}"
            )
        return trace
    return DrawnLengths(replace(assumed_lengths(config), cap=cap), size, prompt_tokens, rows=config.data.rows)


def _sizes(layout: Parallel) -> dict[str, int]:
    return {item.name: getattr(layout, item.name) for item in fields(LayoutConfig)}

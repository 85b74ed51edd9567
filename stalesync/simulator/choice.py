"""Choose deployment, split of the cards and staleness bound for a job, by simulating the candidates.

    deployments as ranked by the cost model ─ candidates ─► splits of each for every bound ─ simulate ─► `Option`s
    Options ─ choose ─► the fastest; of those as fast within `MARGIN`, the one with the smaller bound

`choose` and `candidates` are pure. Invariants (property-tested): no option is faster than the chosen one by more than
`MARGIN`; none with a smaller bound is as fast as the fastest within `MARGIN`; the order of options does not matter."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rich.console import Group, RenderableType
from rich.text import Text

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.layouts import layout_text
from fusion.costmodel.memory import estimate_memory
from fusion.costmodel.report import table_of
from fusion.costmodel.search import DeploymentEstimate, keys_of, rank_deployments
from fusion.costmodel.setup import Setup
from fusion.npu.config import DeviceConfig
from stalesync.job.config import Config
from stalesync.job.cross_checks import check_minibatches
from stalesync.simulator.cluster import Base, Case, Scenario, simulate
from stalesync.simulator.outcome import LOSSES

MARGIN = 0.05
"""Share by which speeds must differ to count: to which the simulator is held by runs on paced cards"""
STEPS = {0: 3, 1: 10}
"""Staleness bound of the candidates → simulated steps: running ahead, fewer favour those whose sides take turns"""
MAX_SAMPLES = 4096
"""Samples of a step that are simulated at most: about half a minute for all candidates"""


@dataclass(frozen=True)
class Option:
    """A simulated candidate. ``lost``: share of the cards' time by kind (`LOSSES`)."""

    plan: DeploymentEstimate
    max_staleness: int
    tokens_per_s: float
    step_s: float
    lost: dict[str, float]

    @property
    def name(self) -> str:
        return f"{self.plan.deployment} at staleness {self.max_staleness}"

    @property
    def keys(self) -> list[str]:
        """Return the config keys of scripts/train.py that choose it."""
        return [*keys_of(self.plan), f"stalesync.max_staleness={self.max_staleness}"]


@dataclass(frozen=True)
class Choice:
    """``runner_up``: the fastest option of another deployment; None: there is none. ``reasons``: sentences."""

    best: Option
    runner_up: Option | None
    reasons: tuple[str, ...]


def candidates(deployments: Sequence[DeploymentEstimate], mean_share: float) -> list[tuple[DeploymentEstimate, int]]:
    """Return splits of each deployment for every bound: that of the least seconds of a synchronous step, and running
    ahead, where the sides overlap, also the one whose longer side is the shortest. ``mean_share``: mean over maximum of
    the lengths of responses: of generation that runs ahead, the mean counts where engines never lack requests."""
    chosen = []
    for name in dict.fromkeys(plan.deployment for plan in deployments):
        splits = [plan for plan in deployments if plan.deployment == name]
        on_policy = min(splits, key=lambda plan: plan.step_s)
        ahead = min(splits, key=lambda plan: max(plan.generate_s * mean_share, plan.train_s))
        chosen.append((on_policy, 0))
        chosen += [(plan, bound) for bound in STEPS if bound for plan in dict.fromkeys((on_policy, ahead))]
    return chosen


def choose(options: Iterable[Option]) -> Choice:
    """Choose among options, at least one, with reasons."""
    ranked = sorted(options, key=lambda one: (-one.tokens_per_s, one.max_staleness, one.name))
    fastest = ranked[0]
    best = min(
        (one for one in ranked if one.tokens_per_s * (1 + MARGIN) >= fastest.tokens_per_s),
        key=lambda one: (one.max_staleness, -one.tokens_per_s, one.name),
    )
    others = [one for one in ranked if one.plan.deployment != best.plan.deployment]
    reasons = [f"{best.tokens_per_s:,.0f} tokens/s"]
    if best.max_staleness < fastest.max_staleness:
        reasons.append(f"{_ratio(fastest, best)}: on-policy costs next to nothing here")
    on_policy = next((one for one in ranked if not one.max_staleness), None)
    if best.max_staleness and on_policy is not None:
        reasons.append(f"{_ratio(best, on_policy)}, the fastest on-policy: what running ahead brings")
    if others:
        close = abs(best.tokens_per_s / others[0].tokens_per_s - 1) <= MARGIN
        error = f", which is within the simulator's error of {MARGIN:.0%}: measure both" * close
        reasons.append(f"{_ratio(best, others[0])}, the runner-up{error}")
    kind = max(best.lost, key=lambda kind: best.lost[kind])
    reasons.append(f"it loses most of the cards' time, {best.lost[kind]:.0%}, as {LOSSES[kind]}")
    return Choice(best, others[0] if others else None, tuple(reasons))


def _ratio(one: Option, other: Option) -> str:
    return f"{one.name} is {one.tokens_per_s / other.tokens_per_s:.2f} x as fast as {other.name}"


def recommend(
    setup: Setup, config: Config, name: str, deployments: Sequence[DeploymentEstimate]
) -> tuple[list[Option], Choice]:
    """Simulate the candidates for a job, and choose. ``name``: of the model's shape or folder.
    Raise ValueError, by key: the config cannot be simulated."""
    if setup.workload.samples > MAX_SAMPLES:
        raise ValueError(f"{setup.workload.samples:,} samples a step: at most {MAX_SAMPLES:,} here; use simulate.py")
    config = copy.deepcopy(config)
    config.device, config.run.seed = DeviceConfig("emulated", pace=name, pace_tokens=1), 0
    config.cluster.npus, config.cluster.hardware = setup.dies, setup.hardware.name
    check_minibatches(config)
    if setup.dies <= setup.hardware.topology.ranks_per_node:  # which is divided, as no side has a whole one
        deployments = rank_deployments(setup, multiple=1)

    def option(plan: DeploymentEstimate, bound: int, hardware: Hardware) -> Option:
        first = plan.train.world if plan.deployment == "separate" else 0
        planned = setup.with_layouts(plan.train, plan.infer, first)
        config.run.steps = STEPS[bound]
        base = Base(planned, plan.infer_cards or None, estimate_memory(planned).kv_tokens)
        outcome = simulate(Scenario(setup.shape, hardware, config), base, Case(1, plan.deployment, bound))
        return Option(plan, bound, outcome.tokens_per_s, outcome.step_s, outcome.lost)

    mean_share = setup.workload.response / setup.workload.longest
    options = [option(plan, bound, setup.hardware) for plan, bound in candidates(deployments, mean_share)]
    chosen = choose(options)
    least = setup.hardware.with_least_overhead
    if chosen.runner_up is not None and least is not None:
        best, other = (option(one.plan, one.max_staleness, least) for one in (chosen.best, chosen.runner_up))
        *reasons, limit = chosen.reasons
        chosen = replace(chosen, reasons=(*reasons, with_least_overhead(best, other), limit))
    return options, chosen


def with_least_overhead(best: Option, other: Option) -> str:
    """State the best option's speed over the runner-up's, both simulated with the least overhead of a layer that a
    published run implies."""
    ratio = best.tokens_per_s / other.tokens_per_s
    depends = ": which is faster depends on it" * (ratio < 1)
    return f"that is {ratio:.2f} x with the least overhead of a layer that a published run implies{depends}"


def render(options: Sequence[Option], choice: Choice) -> RenderableType:
    """Render the simulated options, the chosen one with its reasons, and the runner-up."""
    table = table_of("deployment", "dies that train", "that generate", "staleness", "tokens/s", "step s")
    for one in sorted(options, key=lambda one: -one.tokens_per_s):
        plan, figures = one.plan, (f"{one.tokens_per_s:,.0f}", f"{one.step_s:,.1f}")
        table.add_row(plan.deployment, str(plan.train.world), str(plan.infer.world), str(one.max_staleness), *figures)
    lines = [f"Recommended: {' '.join(choice.best.keys)}", *(f"- {reason}" for reason in choice.reasons)]
    if choice.runner_up is not None:
        lines.append(f"Runner-up: {' '.join(choice.runner_up.keys)}")
    return Group(Text("Deployments, simulated for this job", style="bold"), table, Text("\n".join(lines), style="bold"))


def as_dict(options: Sequence[Option], choice: Choice) -> dict[str, object]:
    """Return the options and the choice as plain data."""
    rows = [
        {"deployment": one.plan.deployment, "train": layout_text(one.plan.train), "infer": layout_text(one.plan.infer)}
        | {"train_dies": one.plan.train.world, "infer_dies": one.plan.infer.world, "max_staleness": one.max_staleness}
        | {"tokens_per_s": one.tokens_per_s, "step_s": one.step_s, "lost": one.lost, "keys": one.keys}
        for one in options
    ]
    ups = None if choice.runner_up is None else choice.runner_up.keys
    return {"options": rows, "best": choice.best.keys, "runner_up": ups, "reasons": list(choice.reasons)}

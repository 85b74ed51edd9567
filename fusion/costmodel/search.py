"""Rank layouts, deployments and numbers of dies by the seconds of a step of the loop.

A layout that does not fit is never recommended: every phase has to fit the HBM of a die, a longest sequence the KV
cache, the optimizer state the host's memory. Of those that fit, training layouts are ranked by `train_s`, generation
layouts by `generate_s`, and the best pairs by the whole step, with their switches planned exactly."""

from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import product
from math import gcd, lcm

from fusion.costmodel.layouts import AXES
from fusion.costmodel.memory import WEIGHT_BYTES, MemoryEstimate, estimate_memory, moved_share, stage_weights
from fusion.costmodel.setup import Setup
from fusion.costmodel.step_time import generate_s, reference_s, train_s
from fusion.costmodel.switch_time import Switch, pessimistic, to_infer, to_train
from fusion.costmodel.traffic import Traffic, switch_traffic
from fusion.ep_switch.topology import LEVELS
from fusion.model import Parallel
from fusion.telemetry.memory import GIB, human_bytes


@dataclass(frozen=True)
class SetupEstimate:
    """One setup, with exact traffic of both switches."""

    setup: Setup
    memory: MemoryEstimate
    moved: tuple[Traffic, Traffic]
    """Traffic of a switch to generation, and of one back."""
    switches: tuple[Switch, Switch]
    pessimistic: tuple[Switch, Switch]
    """The same at the bandwidth that published updates of weights achieve."""
    problems: tuple[str, ...]
    train_s: float
    generate_s: float

    @property
    def switch_s(self) -> float:
        return self.switches[0].seconds + self.switches[1].seconds

    @property
    def step_s(self) -> float:
        return self.train_s + self.generate_s + self.switch_s


@dataclass(frozen=True)
class DeploymentEstimate:
    """One deployment with its best layouts. ``reference_s``: seconds that a reference model adds to the step."""

    deployment: str
    train: Parallel
    infer: Parallel
    generate_s: float
    train_s: float
    switch_s: float
    reference_s: float

    @property
    def step_s(self) -> float:
        return self.generate_s + self.train_s + self.switch_s

    @property
    def infer_cards(self) -> int:
        """Number of dies that only generate."""
        return self.infer.world - (0 if self.deployment == "separate" else self.train.world)


def keys_of(plan: DeploymentEstimate) -> list[str]:
    """Return the config keys of scripts/train.py that choose a deployment."""
    keys = [f"fusion.deployment={plan.deployment}"]
    keys += [f"fusion.infer_cards={plan.infer_cards}"] if plan.infer_cards else []
    for name, layout in (("train", plan.train), ("infer", plan.infer)):
        sizes = {axis: getattr(layout, axis) for axis in AXES}
        keys += [f"parallel.{name}.{axis}={size}" for axis, size in sizes.items() if size > 1]
    return keys


@dataclass(frozen=True)
class Ranking:
    """Pairs of layouts and deployments, best first. ``num_candidates``: layouts of training and of generation that were
    considered; ``refused``: reason → layouts that were left out for it."""

    pairs: tuple[SetupEstimate, ...]
    deployments: tuple[DeploymentEstimate, ...]
    num_candidates: tuple[int, int]
    refused: dict[str, int] = field(default_factory=dict)


def estimate(setup: Setup) -> SetupEstimate:
    """Estimate memory, switches and step of one pair of layouts."""
    topology, sizes = setup.hardware.topology, estimate_memory(setup)
    train, infer = setup.sides
    share = moved_share(setup)
    there = switch_traffic(setup.shape, train, infer, topology=topology).times(share)
    back = switch_traffic(setup.shape, infer, train, topology=topology).times(share)
    slow = replace(setup, hardware=pessimistic(setup.hardware))
    switches, slow_switches = ((to_infer(side, there, sizes), to_train(side, back, sizes)) for side in (setup, slow))
    return SetupEstimate(
        setup=setup,
        memory=sizes,
        moved=(there, back),
        switches=switches,
        pessimistic=slow_switches,
        problems=problems(setup, sizes),
        train_s=train_s(setup),
        generate_s=generate_s(setup, sizes.kv_tokens),
    )


def problems(setup: Setup, sizes: MemoryEstimate) -> tuple[str, ...]:
    """List what does not fit, with both numbers; empty if everything fits."""
    messages = phase_problems(setup, sizes)
    longest = setup.workload.longest_sample
    if sizes.kv_tokens < longest:
        messages.append(f"the KV cache holds {sizes.kv_tokens:,} tokens, the longest sequence has {longest:,}")
    if sizes.host_bytes > setup.hardware.host_bytes.value:
        room = setup.hardware.host_bytes.value / GIB
        messages.append(f"the optimizer state of a node is {sizes.host_bytes / GIB:.0f} GiB, its host has {room:.0f}")
    return tuple(messages)


def phase_problems(setup: Setup, sizes: MemoryEstimate) -> list[str]:
    """List the phases that do not fit the HBM of a die, with what they take of it and the largest owner."""
    messages, usable = [], setup.hardware.usable_bytes
    for phase, owners in sizes.phases.items():
        if sizes.total(phase) > usable:
            owner = max(owners, key=lambda owner: owners[owner])
            messages.append(
                f"{phase} takes {human_bytes(sizes.total(phase))} of {human_bytes(usable)} a die, "
                f"{owner} {human_bytes(owners[owner])}"
            )
    return messages


def rank(setup: Setup, fixed: tuple[Parallel | None, Parallel | None] = (None, None), num_exact: int = 2) -> Ranking:
    """Rank layouts and deployments for the dies and the model of ``setup``.
    ``fixed``: layouts of training and of generation that are given; None: search.
    ``num_exact``: the best layouts of each side, of which every pair is planned exactly."""
    world, refused = setup.train.world, Counter[str]()
    trains = [fixed[0]] if fixed[0] else candidate_layouts(setup, world, training=True)
    infers = [fixed[1]] if fixed[1] else candidate_layouts(setup, world, training=False)
    best_train = _best(setup, trains, training=True, refused=refused)[:num_exact]
    best_infer = _best(setup, infers, training=False, refused=refused)[:num_exact]
    chosen = [(train, infer) for train in best_train for infer in best_infer]
    if setup.shape.adapters:  # with equal layouts a switch moves nothing
        chosen += [(train, train) for train in trains if train in infers and (train, train) not in chosen]
    pairs = [estimate(setup.with_layouts(*pair)) for pair in chosen]
    pairs.sort(key=lambda pair: (len(pair.problems) > 0, pair.step_s))
    return Ranking(
        pairs=tuple(pairs),
        deployments=tuple(rank_deployments(setup)),
        num_candidates=(len(trains), len(infers)),
        refused=dict(refused),
    )


def _best(setup: Setup, candidates: list[Parallel], training: bool, refused: Counter[str]) -> list[Parallel]:
    """Return the layouts of one side that fit, best first; if none does, the one that exceeds HBM by the least."""
    fitting, closest = [], []
    phase = "train" if training else "infer"
    for parallel in candidates:
        parallel = with_context(setup, parallel) if training else with_shared_kv(setup, parallel)
        side = setup.with_layouts(parallel, setup.infer) if training else setup.with_layouts(setup.train, parallel)
        sizes = estimate_memory(side)
        over = sizes.total(phase) - setup.hardware.usable_bytes
        seconds = train_s(side) if training else generate_s(side, sizes.kv_tokens)
        closest.append((over, str(parallel), parallel))
        if over > 0:
            refused[f"{phase} does not fit into HBM"] += 1
        elif seconds == float("inf"):
            refused["no room for the KV cache of a longest sequence"] += 1
        else:
            fitting.append((seconds, str(parallel), parallel))
    chosen = sorted(fitting) or sorted(closest)[:1]
    return [parallel for *_, parallel in chosen]


def rank_deployments(setup: Setup, multiple: int | None = None) -> list[DeploymentEstimate]:
    """Rank the deployments over the same dies, each with the best layouts for its cards; the fastest first.
    ``multiple``: of dies by which the sides of `separate` and `hybrid` are divided; None: whole nodes."""
    world = setup.train.world
    node = multiple or setup.hardware.topology.ranks_per_node
    estimates = [estimate_deployment(setup, "colocated", train_dies=world, infer_dies=world)]
    for dies in sorted({part // node * node for part in (world // 4, world // 2, 3 * world // 4)} - {0}):
        estimates.append(estimate_deployment(setup, "separate", train_dies=dies, infer_dies=world - dies))
        estimates.append(estimate_deployment(setup, "hybrid", train_dies=dies, infer_dies=world))
    return sorted((deployment for deployment in estimates if deployment is not None), key=lambda d: d.step_s)


def estimate_deployment(setup: Setup, name: str, *, train_dies: int, infer_dies: int) -> DeploymentEstimate | None:
    """Estimate a deployment with its best layouts; None if nothing fits. In `hybrid` no engine spans dies that train
    and dies that do not."""
    first = train_dies if name == "separate" else 0
    blank = setup.with_layouts(Parallel(train_dies), Parallel(infer_dies), first)
    refused = Counter[str]()
    trains = _best(blank, candidate_layouts(setup, train_dies, training=True), training=True, refused=refused)
    if not trains:
        return None
    trained = blank.with_layouts(trains[0], blank.infer, first)
    divided = gcd(train_dies, infer_dies - train_dies) if name == "hybrid" else infer_dies
    engines = [
        layout
        for layout in candidate_layouts(setup, infer_dies, training=False)
        if divided % lcm(layout.tp, layout.ep * layout.etp) == 0
    ]
    infers = _best(trained, engines, training=False, refused=refused) if engines else []
    if not infers:
        return None
    chosen = trained.with_layouts(trains[0], infers[0], first)
    sizes = estimate_memory(chosen)
    if problems(chosen, sizes):
        return None
    own = WEIGHT_BYTES * stage_weights(setup.shape, chosen.train, 0).numel
    return DeploymentEstimate(
        deployment=name,
        train=chosen.train,
        infer=chosen.infer,
        generate_s=generate_s(chosen, sizes.kv_tokens),
        train_s=train_s(chosen),
        switch_s=_switch_bound_s(chosen, sizes),
        reference_s=reference_s(chosen) + own / setup.hardware.back_bytes_per_s.value,
    )


def _switch_bound_s(setup: Setup, sizes: MemoryEstimate) -> float:
    """Bound both switches by bytes alone: the longer of an engine's weights over the wire and the offload, then the
    onload."""
    hardware = setup.hardware
    weights = WEIGHT_BYTES * stage_weights(setup.shape, setup.infer, 0).numel
    # Links inside a supernode are one port: its level counts even where all dies are in one node.
    nodes = hardware.topology.level(0, setup.dies - 1)
    wire_s = weights / hardware.link_bytes_per_s(LEVELS.index("supernode") if hardware.has_supernodes else nodes)
    states = sizes.states_bytes if setup.shared and setup.fusion.offload == "switch" else 0.0
    return max(wire_s, states / hardware.out_bytes_per_s.value) + states / hardware.back_bytes_per_s.value


def candidate_layouts(setup: Setup, world: int, training: bool) -> list[Parallel]:
    """List the layouts to rank: sizes that divide dies and model, TP within a node, no pipeline for generation; without
    context parallelism, which `with_context` and `with_shared_kv` add where samples need it."""
    config, node = setup.shape.config, setup.hardware.topology.ranks_per_node
    tps = [n for n in (1, 2, 4, 8, 16) if n <= node and world % n == 0]
    pps = [n for n in range(1, 17) if world % n == 0] if training else [1]
    eps = [n for n in (1, 2, 4, 8, 16, 32, 64, 96, 128, 256) if world % n == 0]
    layouts = []
    for tp, pp, ep in product(tps, pps, eps):
        if world // pp % tp == 0 and world // pp % ep == 0:
            parallel = Parallel(world, tp=tp, ep=ep, pp=pp)
            if parallel.misfit(config) is None:
                layouts.append(parallel)
    return layouts


def with_context(setup: Setup, parallel: Parallel) -> Parallel:
    """Return a layout of training with the least context parallelism with which it fits; as it is where none helps, or
    where smaller micro-batches would hold the longest sample, too."""
    if setup.training.token_budget // 2 >= setup.workload.longest_sample:
        return parallel
    for cp in (1, *context_sizes(setup, parallel)):
        layout = replace(parallel, cp=cp)
        sizes = estimate_memory(setup.with_layouts(layout, setup.infer))
        over = sizes.total("train") - setup.hardware.usable_bytes
        if over <= 0:
            return layout
        if over >= sizes.phases["train"]["activations"]:
            break
    return parallel


def with_shared_kv(setup: Setup, parallel: Parallel) -> Parallel:
    """Return a layout of generation with the least decode context parallelism with which the KV cache holds a longest
    sample; as it is where none helps."""
    for dcp in (parallel.dcp, *shared_kv_sizes(setup, parallel)):
        layout = replace(parallel, dcp=dcp)
        if estimate_memory(setup.with_layouts(setup.train, layout)).kv_tokens >= setup.workload.longest_sample:
            return layout
    return parallel


def shared_kv_sizes(setup: Setup, parallel: Parallel) -> list[int]:
    """List the larger sizes of decode context parallelism that a layout may have."""
    copies = setup.shape.config.attention.kv_copies(parallel.tp) if setup.shares_kv else 1
    return [dcp for dcp in range(parallel.dcp + 1, copies + 1) if copies % dcp == 0]


def context_sizes(setup: Setup, parallel: Parallel) -> list[int]:
    """List the sizes of context parallelism above 1 that a layout may have, within a supernode or, where there are
    none, a node."""
    dies = setup.hardware.topology.ranks_per_supernode
    return [
        cp
        for cp in range(2, parallel.dp + 1)
        if parallel.dp % cp == 0
        and parallel.tp * cp <= dies
        and replace(parallel, cp=cp).misfit(setup.shape.config) is None
    ]

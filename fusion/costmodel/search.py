"""Which layouts, which deployment, how many dies for what: ranked by the seconds of a step of the loop.

A layout that does not fit is never recommended: every phase within the HBM of a die, a longest sequence within the KV
cache, the optimizer state within the host's memory. Among those that fit training layouts are ranked by `train_s`,
layouts of generation by `generate_s`, and the best few pairs by the whole step, their switches planned exactly.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import gcd, lcm

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.memory import WEIGHT, Memory, held, memory
from fusion.costmodel.setup import Setup
from fusion.costmodel.step_time import generate_s, layouts, reference_s, train_s
from fusion.costmodel.switch_time import Switch, to_infer, to_train
from fusion.costmodel.traffic import Traffic, traffic
from fusion.ep_switch.topology import LEVELS
from fusion.model import Parallel

GIB = 2.0**30


@dataclass(frozen=True)
class Estimate:
    """One setup, planned exactly in both directions."""

    setup: Setup
    memory: Memory
    moved: tuple[Traffic, Traffic]
    """To generate, and back."""
    switches: tuple[Switch, Switch]
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
class Split:
    """One deployment with its best layouts. ``reference_s``: what a reference model adds to the step."""

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


@dataclass(frozen=True)
class Ranking:
    """Pairs of layouts, best first, and the deployments. ``looked_at``, ``refused``: layouts, and why some are out."""

    pairs: tuple[Estimate, ...]
    splits: tuple[Split, ...]
    looked_at: tuple[int, int]
    refused: dict[str, int] = field(default_factory=dict)


def estimate(setup: Setup) -> Estimate:
    """Everything about one pair of layouts."""
    topology, size = setup.hardware.topology, memory(setup)
    train, infer = setup.sides
    there, back = traffic(setup.shape, train, infer, topology), traffic(setup.shape, infer, train, topology)
    return Estimate(
        setup,
        size,
        (there, back),
        (to_infer(setup, there, size), to_train(setup, back, size)),
        problems(setup, size),
        train_s(setup),
        generate_s(setup, size.kv_tokens),
    )


def problems(setup: Setup, size: Memory) -> tuple[str, ...]:
    """What does not fit, with both numbers; nothing if all does."""
    found, usable = [], setup.hardware.usable_bytes
    for phase in size.phases:
        if size.total(phase) > usable:
            owner = max(size.phases[phase], key=lambda owner: size.phases[phase][owner])
            found.append(
                f"{phase} takes {size.total(phase) / GIB:.0f} GiB of {usable / GIB:.0f} a die, "
                f"{owner} {size.phases[phase][owner] / GIB:.0f}"
            )
    longest = int(setup.workload.prompt) + setup.workload.longest
    if size.kv_tokens < longest:
        found.append(f"the KV cache holds {size.kv_tokens:,} tokens, the longest sequence has {longest:,}")
    if size.host_bytes > setup.hardware.host_bytes.value:
        room = setup.hardware.host_bytes.value / GIB
        found.append(f"the optimizer state of a node is {size.host_bytes / GIB:.0f} GiB, its host has {room:.0f}")
    return tuple(found)


def rank(setup: Setup, fixed: tuple[Parallel | None, Parallel | None] = (None, None), few: int = 2) -> Ranking:
    """Searches layouts for the dies and model of ``setup``; a layout that is ``fixed`` is kept.

    Args:
        few: layouts of each side whose pairs are planned exactly.
    """
    world, refused = setup.train.world, Counter[str]()
    trains = [fixed[0]] if fixed[0] else layouts(setup, world, training=True)
    infers = [fixed[1]] if fixed[1] else layouts(setup, world, training=False)
    best_train = _best(setup, trains, training=True, refused=refused)[:few]
    best_infer = _best(setup, infers, training=False, refused=refused)[:few]
    pairs = [estimate(setup.with_layouts(t, i)) for t in best_train for i in best_infer]
    pairs.sort(key=lambda pair: (len(pair.problems) > 0, pair.step_s))
    return Ranking(tuple(pairs), tuple(_splits(setup)), (len(trains), len(infers)), dict(refused))


def _best(setup: Setup, candidates: list[Parallel], training: bool, refused: Counter[str]) -> list[Parallel]:
    """The layouts of one side that fit, best first; if none does, the one that comes closest."""
    fitting, closest = [], []
    phases = ("train",) if training else ("infer",)
    for parallel in candidates:
        side = setup.with_layouts(parallel, setup.infer) if training else setup.with_layouts(setup.train, parallel)
        size = memory(side)
        over = max(size.total(phase) for phase in phases) - setup.hardware.usable_bytes
        seconds = train_s(side) if training else generate_s(side, size.kv_tokens)
        closest.append((over, str(parallel), parallel))
        if over > 0:
            refused[f"{phases[0]} does not fit into HBM"] += 1
        elif seconds == float("inf"):
            refused["no room for the KV cache of a longest sequence"] += 1
        else:
            fitting.append((seconds, str(parallel), parallel))
    chosen = sorted(fitting) or sorted(closest)[:1]
    return [parallel for *_, parallel in chosen]


def _splits(setup: Setup) -> list[Split]:
    """Deployments over the same dies, each with the layouts that suit its cards best; the fastest first."""
    world, node = setup.train.world, setup.hardware.topology.ranks_per_node
    found = [_split(setup, "colocated", world, world, 0)]
    for dies in sorted({part // node * node for part in (world // 4, world // 2, 3 * world // 4)} - {0}):
        found.append(_split(setup, "separate", dies, world - dies, dies))
        found.append(_split(setup, "hybrid", dies, world, 0))
    return sorted((split for split in found if split is not None), key=lambda split: split.step_s)


def _split(setup: Setup, deployment: str, train_dies: int, infer_dies: int, first: int) -> Split | None:
    """The deployment with its best layouts, the switch bounded by its bytes; None if nothing fits. In `hybrid` no
    engine has dies that train and dies that do not."""
    blank = setup.with_layouts(Parallel(train_dies), Parallel(infer_dies), first)
    out: Counter[str] = Counter()
    trains = _best(blank, layouts(setup, train_dies, training=True), training=True, refused=out)
    if not trains:
        return None
    chosen = blank.with_layouts(trains[0], blank.infer, first)
    room = gcd(train_dies, infer_dies - train_dies) if deployment == "hybrid" else infer_dies
    engines = [p for p in layouts(setup, infer_dies, training=False) if room % lcm(p.tp, p.ep * p.etp) == 0]
    infers = _best(chosen, engines, training=False, refused=out) if engines else []
    if not infers:
        return None
    chosen = chosen.with_layouts(trains[0], infers[0], first)
    size = memory(chosen)
    if problems(chosen, size):
        return None
    hardware, weights = setup.hardware, WEIGHT * held(setup.shape, chosen.infer, 0).numel
    wire = weights / hardware.link_bytes_per_s(_outermost(hardware, chosen.dies))
    states = size.states_bytes if chosen.shared and setup.fusion.offload == "switch" else 0.0
    away, back = states / hardware.out_bytes_per_s.value, states / hardware.back_bytes_per_s.value
    own = WEIGHT * held(setup.shape, chosen.train, 0).numel
    reference = reference_s(chosen) + own / hardware.back_bytes_per_s.value
    seconds = generate_s(chosen, size.kv_tokens), train_s(chosen), max(wire, away) + back
    return Split(deployment, chosen.train, chosen.infer, *seconds, reference)


def _outermost(hardware: Hardware, dies: int) -> int:
    """The level of link that bounds a switch between all dies. Links inside a supernode are one port: its level counts
    even where the dies are all of one node."""
    return LEVELS.index("supernode") if hardware.has_supernodes else hardware.topology.level(0, dies - 1)

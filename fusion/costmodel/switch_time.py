"""How long a switch takes, part by part, and what limits it.

    to generate   pack │ wire ░░░░░░░░░░░░░│        the longer of the two rows: the host link and the wire are different
                  offload ░░░░░░░░░│                links, packing runs behind the wire bucket by bucket
    to train      wire ░░░░░░░│                    units from the wire, or rounded from the die's own masters on the
                  masters ░░░░│                    host, so that both end early (`fusion.colocate.weights.masters`)
                                onload ░░░░░░░     the optimizer follows beside the first micro-batches: not waited for

A die's wire time is the longer of what it sends and what it receives, each link class at the bandwidth it reaches. The
links inside a supernode are one port, the network between supernodes is another. Every round of buckets adds what an
exchange takes however little it moves.

`published` gives the same figures for another way of doing it, which was measured and published: DeepSeek-R1 on 128
Atlas A3 cards (256 dies). It is the check on the figures of `fusion.costmodel.hardware`. None is fitted to it, but the
speed of giving HBM back was measured on the same run, and is most of its offload; reshard rests on figures of others.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import numpy as np

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.memory import WEIGHT, Memory, held
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.costmodel.traffic import Traffic
from fusion.ep_switch.topology import LEVELS
from fusion.ep_switch.unit_sources import Part, plan_return
from fusion.model import Parallel
from fusion.model.weights import UNITS_A_BUCKET

PUBLISHED = {"reshard": 11.5, "offload": 5.5}
"""Seconds of the A3 run (cann-recipes-train, docs/llm_rl/deepseek_rl_train_optimization.md, 1.4.1: real weights)."""


PIECES = 64
"""In how many equal parts a die's weights of a kind are dealt out to the wire and the host."""


@dataclass(frozen=True)
class Switch:
    """One direction of a switch: part → seconds, in the order of the drawing above; parts overlap, `seconds` is all."""

    parts: dict[str, float]
    seconds: float
    limit: str
    onload_s: float = 0.0
    """Of the optimizer's way back beside training, which `seconds` leaves out."""


@dataclass(frozen=True)
class Wire:
    """Seconds on the wire of the busiest die of each kind."""

    by_level: tuple[float, ...]
    seconds: float
    """Of the die that takes longest, rounds included."""
    rounds: int
    busiest: str
    """What makes that die the last: `sending` or `receiving`."""


def wire(moved: Traffic, hardware: Hardware, bucket_bytes: int) -> Wire:
    """The wire time of a switch. A round moves half a bucket of every die (`fusion.ep_switch.plan`)."""
    speed = np.array([hardware.link_bytes_per_s(level) for level in range(len(LEVELS))])[:, None]
    ends = {"sending": moved.sent / speed, "receiving": moved.received / speed}
    taken = {end: np.maximum(seconds[:-1].sum(0), seconds[-1]) for end, seconds in ends.items()}
    busiest = max(taken, key=lambda end: taken[end].max())
    most = max(moved.sent.sum(0).max(), moved.received.sum(0).max())
    rounds = ceil(most / (bucket_bytes / 2))
    by_level = np.maximum(ends["sending"], ends["receiving"]).max(1)
    total = float(taken[busiest].max()) + rounds * hardware.collective_s.value
    return Wire(tuple(float(s) for s in by_level), total, rounds, busiest)


def to_infer(setup: Setup, moved: Traffic, memory: Memory) -> Switch:
    """From training to generation."""
    hardware, line = setup.hardware, wire(moved, setup.hardware, setup.fusion.bucket_bytes)
    pack = _pack(moved, hardware)
    leaves = setup.shared and setup.fusion.offload == "switch"
    offload = memory.states_bytes / hardware.out_bytes_per_s.value if leaves else 0.0
    parts = {"pack and copy": pack} | _named(line) | {"offload": offload}
    rows = {"packing": pack, f"the wire, {line.busiest}": line.seconds, "the host link, offloading": offload}
    found = _longest(parts, rows)
    if memory.overlap or not leaves:
        return found
    return Switch(parts, offload + max(pack, line.seconds), "HBM: the optimizer state leaves before weights move")


def to_train(setup: Setup, moved: Traffic, memory: Memory) -> Switch:
    """From generation to training; units come over the wire or from the die's own masters, whichever is earlier."""
    hardware, shape, train = setup.hardware, setup.shape, setup.train
    line = wire(moved, hardware, setup.fusion.bucket_bytes)
    away = setup.shared and setup.fusion.offload != "none"
    here = max((held(shape, train, stage) for stage in range(train.pp)), key=lambda h: h.numel)
    received = float(moved.received.sum(0).max())
    parts = []
    for numel, replicas in ((here.dense, train.dp), (here.expert, train.edp)):
        size, covered = numel / PIECES, round(PIECES * _covered(replicas)) if away else 0
        arrives = int(received * size / max(1, here.numel))
        parts += [Part(arrives, int(4 * size) if piece < covered else None) for piece in range(PIECES)]
    speed = received / max(line.seconds, 1e-12) if received else 1e9
    plan = plan_return(parts, speed, hardware.back_bytes_per_s.value)
    from_host = sum(part.wire_bytes for part, source in zip(parts, plan.sources, strict=True) if source == "host")
    pack = _pack(moved, hardware)
    name = f"wire ({from_host / received:.0%} from masters instead)" if from_host else "wire"
    found = _longest(
        {"pack and copy": pack, name: plan.wire_s, "masters": plan.host_s},
        {"packing": pack, "the wire": plan.wire_s, "the host link, masters": plan.host_s},
    )
    leaves = setup.shared and setup.fusion.offload == "switch"
    onload = memory.states_bytes / hardware.back_bytes_per_s.value if leaves else 0.0
    return Switch(found.parts | {"onload, beside training": onload}, found.seconds, found.limit, onload)


def adopt_s(setup: Setup) -> float:
    """A die copies weights that have arrived beside its engine into the model, from its host or from its own HBM."""
    hardware, infer = setup.hardware, setup.infer
    nbytes = WEIGHT * max(held(setup.shape, infer, stage).numel for stage in range(infer.pp))
    if setup.fusion.double_buffer:
        return 2 * nbytes / hardware.hbm_bytes_per_s.value
    return nbytes / hardware.back_bytes_per_s.value


def _covered(replicas: int) -> float:
    """Part of a die's weights whose units lie whole in its own share of the masters. A share is one in so many of a
    bucket, a unit an eighth of one, and what lies across a border is in nobody's share."""
    return 1.0 if replicas == 1 else max(0.0, 1 - replicas / UNITS_A_BUCKET) / replicas


def published(setup: Setup) -> dict[str, float]:
    """Seconds of `reshard` and `offload` as the A3 run did them: all-gather and blocking copies.

    Reshard: every parameter is broadcast over its pipeline group, then gathered whole: dense ones over TP, experts over
    EP, on every die, tensor by tensor. Offload: the training weights go out through pageable memory (`.cpu()`, then
    `.pin_memory()`) and come back from pinned memory, and what a switch has used is given back (`empty_cache`): those
    weights and one layer's gathered experts. Gradients are dropped; the optimizer state is swapped inside the step and
    is in neither figure. The authors do not list what their offload figure contains: this is what the released code
    does between training and generation. The `empty_cache` after generation they count to their rollout.
    """
    shape, train, hardware = setup.shape, setup.train, setup.hardware
    slowest = hardware.link_bytes_per_s(LEVELS.index("supernode"))
    here = WEIGHT * max(held(shape, train, stage).numel for stage in range(train.pp))
    tensors = sum(len(layer.tensors) for layer in shape.layers)
    reshard = _gathered_bytes(shape, train) / slowest + 2 * tensors * hardware.collective_s.value
    experts = max(layer.numel["expert"] for layer in shape.layers) * WEIGHT
    out = here * (1 / hardware.out_bytes_per_s.value + 2 / hardware.host_copy_bytes_per_s.value)
    back = here / hardware.back_bytes_per_s.value
    return {"reshard": reshard, "offload": out + back + (here + experts) / hardware.unmap_bytes_per_s.value}


def _gathered_bytes(shape: Shape, train: Parallel) -> float:
    """Bytes that a die receives by broadcasts over PP and gathers over TP and EP of the whole model."""
    total = 0.0
    for numel, ranks in ((shape.dense, train.tp), (shape.routed, train.ep * train.etp)):
        total += WEIGHT * numel / ranks * (train.pp - 1) / train.pp
        total += WEIGHT * numel * (ranks - 1) / ranks
    return total


def _pack(moved: Traffic, hardware: Hardware) -> float:
    """Reading and writing what is packed, unpacked and copied inside the die that has most of it."""
    through = moved.sent.sum(0) + moved.received.sum(0) + moved.copied
    return float(2 * through.max() / hardware.hbm_bytes_per_s.value)


def _named(line: Wire) -> dict[str, float]:
    return {f"wire, {level}": s for level, s in zip(LEVELS, line.by_level, strict=True) if s > 0}


def _longest(shown: dict[str, float], rows: dict[str, float]) -> Switch:
    limit = max(rows, key=lambda name: rows[name])
    return Switch(shown, rows[limit], limit)

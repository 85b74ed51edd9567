"""Estimate the seconds of a switch by part, and its bottleneck.

    to generate   pack │ wire ░░░░░░░░░░░░░│        the longer of the two rows: host link and wire are separate links,
                  offload ░░░░░░░░░│                and packing overlaps with the wire bucket by bucket
    to train      wire ░░░░░░░│                     each unit comes over the wire or is rounded from the die's own
                  masters ░░░░│                     masters on the host (`fusion.ep_switch.unit_sources`)
                                onload ░░░░░░░      loading the optimizer state overlaps with the first micro-batches

A die's wire time is the longer of sending and receiving, each class of links at the bandwidth it reaches. The links
inside a supernode are one port, the network between supernodes is another. Every round of buckets adds one latency.

`published` estimates the same for a different implementation that was measured and published: DeepSeek-R1 on 128 Atlas
A3 cards (256 dies). It validates the constants of `fusion.costmodel.hardware`. None is fitted to it, but the rate of
releasing HBM was measured on the same run and makes up most of its offload; reshard rests on constants from elsewhere.
"""

from dataclasses import dataclass, replace
from math import ceil

import numpy as np

from fusion.costmodel.hardware import Figure, Hardware
from fusion.costmodel.memory import WEIGHT_BYTES, MemoryEstimate, largest_weight_bytes, moved_share, stage_weights
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.costmodel.traffic import Traffic
from fusion.ep_switch.topology import LEVELS
from fusion.ep_switch.unit_sources import TrainedPart, plan_return
from fusion.model import Parallel
from fusion.model.bucket_plan import UNITS_A_BUCKET

PUBLISHED = {"reshard": 11.5, "offload": 5.5}
"""Seconds of the A3 run (cann-recipes-train, docs/llm_rl/deepseek_rl_train_optimization.md, 1.4.1: real weights)."""
ACHIEVED = Figure(
    2.7e9,
    "DeepSeek-V3 in FP8 to 256 H100s in 7.7 s, if an engine has 32; GLM-5 to 128 in 8.5 s, if one has 16: 5.5 GB/s",
    assumed=True,
)
"""Bytes/s of a receiving card in published updates of engines' weights, the lowest found: the pessimistic estimate"""
PIECES = 64
"""Number of equal pieces of a die's dense and expert weights that are assigned to the wire or the host."""


@dataclass(frozen=True)
class Switch:
    """One direction of a switch."""

    parts: dict[str, float]
    """Part → seconds, in the order of the drawing above; parts overlap."""
    seconds: float
    """Duration of the whole switch."""
    limit: str
    """The bottleneck."""
    onload_s: float = 0.0
    """Duration of loading the optimizer state, which overlaps with training and is not part of `seconds`."""


@dataclass(frozen=True)
class WireTime:
    """Seconds on the wire. ``by_level``: of the busiest die of each level of links."""

    by_level: tuple[float, ...]
    seconds: float
    """Duration on the slowest die, latencies of the rounds included."""
    rounds: int
    busiest: str
    """Bottleneck of that die: `sending` or `receiving`."""


def wire(moved: Traffic, hardware: Hardware, bucket_bytes: int) -> WireTime:
    """Estimate the wire time of a switch. A round moves half a bucket of every die (`fusion.ep_switch.plan`)."""
    speed = np.array([hardware.link_bytes_per_s(level) for level in range(len(LEVELS))])[:, None]
    ends = {"sending": moved.sent / speed, "receiving": moved.received / speed}
    taken = {end: np.maximum(seconds[:-1].sum(0), seconds[-1]) for end, seconds in ends.items()}
    busiest = max(taken, key=lambda end: taken[end].max())
    max_nbytes = max(moved.sent.sum(0).max(), moved.received.sum(0).max())
    rounds = ceil(max_nbytes / (bucket_bytes / 2))
    by_level = np.maximum(ends["sending"], ends["receiving"]).max(1)
    total = float(taken[busiest].max()) + rounds * hardware.collective_s.value
    return WireTime(by_level=tuple(float(s) for s in by_level), seconds=total, rounds=rounds, busiest=busiest)


def to_infer(setup: Setup, moved: Traffic, memory: MemoryEstimate) -> Switch:
    hardware, wire_time = setup.hardware, wire(moved, setup.hardware, setup.fusion.bucket_bytes)
    pack = _pack(moved, hardware)
    leaves = setup.shared and setup.fusion.offload == "switch"
    offload = memory.states_bytes / hardware.out_bytes_per_s.value if leaves else 0.0
    by_level = {f"wire, {level}": s for level, s in zip(LEVELS, wire_time.by_level, strict=True) if s > 0}
    parts = {"pack and copy": pack} | by_level | {"offload": offload}
    rows = {"packing": pack, f"the wire, {wire_time.busiest}": wire_time.seconds, "the host link, offloading": offload}
    switch = _longest(parts, rows)
    if memory.overlap or not leaves:
        return switch
    return Switch(parts, offload + max(pack, wire_time.seconds), "HBM: the optimizer state leaves before weights move")


def to_train(setup: Setup, moved: Traffic, memory: MemoryEstimate) -> Switch:
    """Estimate the switch from generation to training; each unit comes over the wire or from the die's own masters."""
    hardware, shape, train = setup.hardware, setup.shape, setup.train
    wire_time = wire(moved, hardware, setup.fusion.bucket_bytes)
    away = setup.shared and setup.fusion.offload != "none" and shape.adapters is None  # a base has no masters
    here = max((stage_weights(shape, train, stage) for stage in range(train.pp)), key=lambda h: h.numel)
    received = float(moved.received.sum(0).max())
    parts = []
    for numel, replicas in ((here.dense, train.dp), (here.expert, train.edp)):
        size, covered = numel / PIECES, round(PIECES * _covered(replicas)) if away else 0
        arrives = int(received * size / max(1, here.numel))
        parts += [TrainedPart(arrives, int(4 * size) if piece < covered else None) for piece in range(PIECES)]
    speed = received / max(wire_time.seconds, 1e-12) if received else 1e9
    plan = plan_return(parts, speed, hardware.back_bytes_per_s.value)
    from_host = sum(part.wire_bytes for part, source in zip(parts, plan.sources, strict=True) if source == "host")
    pack = _pack(moved, hardware)
    name = f"wire ({from_host / received:.0%} from masters instead)" if from_host else "wire"
    switch = _longest(
        {"pack and copy": pack, name: plan.wire_s, "masters": plan.host_s},
        {"packing": pack, "the wire": plan.wire_s, "the host link, masters": plan.host_s},
    )
    leaves = setup.shared and setup.fusion.offload == "switch"
    onload = memory.states_bytes / hardware.back_bytes_per_s.value if leaves else 0.0
    return replace(switch, parts=switch.parts | {"onload, beside training": onload}, onload_s=onload)


def pessimistic(hardware: Hardware) -> Hardware:
    """Return the hardware with links between cards that reach no more than published updates of weights achieve."""
    peaks, card = hardware.topology.bytes_per_s, LEVELS.index("card")
    shares = tuple(
        share if level == card else replace(share, value=min(share.value, ACHIEVED.value / peak))
        for level, (peak, share) in enumerate(zip(peaks, hardware.reached, strict=True))
    )
    return replace(hardware, reached=shares)


def parked_s(setup: Setup, source: Parallel) -> float:
    """Estimate the seconds that a switch from a layout takes longer where no order keeps the bound on memory, so that
    the source waits in host memory (`fusion.ep_switch.plan`): it leaves before the first round, and returns in them."""
    nbytes, hardware = largest_weight_bytes(setup.shape, source), setup.hardware
    return nbytes / hardware.out_bytes_per_s.value + nbytes / hardware.back_bytes_per_s.value


def adopt_s(setup: Setup) -> float:
    """Estimate an engine's pause while its die copies received weights into the model, from its host or its HBM."""
    hardware, infer = setup.hardware, setup.infer
    nbytes = largest_weight_bytes(setup.shape, infer) * moved_share(setup)
    if setup.fusion.double_buffer:
        return 2 * nbytes / hardware.hbm_bytes_per_s.value
    return nbytes / hardware.back_bytes_per_s.value


def _covered(replicas: int) -> float:
    """Estimate the share of a die's weights whose units are wholly in its own shard of the masters. A shard is
    1/replicas of a bucket, a unit 1/8 of one; a unit across a border is in no shard."""
    return 1.0 if replicas == 1 else max(0.0, 1 - replicas / UNITS_A_BUCKET) / replicas


def published(setup: Setup) -> dict[str, float]:
    """Estimate the seconds of `reshard` and `offload` as the A3 run implemented them: all-gather, blocking copies.

    Reshard: every parameter is broadcast over its pipeline group, then gathered whole: dense ones over TP, experts over
    EP, on every die, tensor by tensor. Offload: the training weights go out through pageable memory (`.cpu()`, then
    `.pin_memory()`) and return from pinned memory, and the HBM that a switch used is released (`empty_cache`): those
    weights and one layer's gathered experts. Gradients are dropped; the optimizer state is swapped inside the step and
    is in neither figure. The authors do not list what their offload figure contains: this is what the released code
    does between training and generation. They attribute the `empty_cache` after generation to their rollout."""
    shape, train, hardware = setup.shape, setup.train, setup.hardware
    slowest = hardware.link_bytes_per_s(LEVELS.index("supernode"))
    here = largest_weight_bytes(shape, train)
    tensors = sum(shape.num_tensors(kind) for kind in shape.kind_of)
    reshard = _gathered_bytes(shape, train) / slowest + 2 * tensors * hardware.collective_s.value
    experts = max(shape.routed_of(kind) for kind in shape.kind_of) * WEIGHT_BYTES
    out = here * (1 / hardware.out_bytes_per_s.value + 2 / hardware.host_copy_bytes_per_s.value)
    back = here / hardware.back_bytes_per_s.value
    return {"reshard": reshard, "offload": out + back + (here + experts) / hardware.unmap_bytes_per_s.value}


def _gathered_bytes(shape: Shape, train: Parallel) -> float:
    """Count the bytes that a die receives in broadcasts over PP and gathers over TP and EP of the whole model."""
    total = 0.0
    for numel, ranks in ((shape.dense, train.tp), (shape.routed, train.ep * train.etp)):
        total += WEIGHT_BYTES * numel / ranks * (train.pp - 1) / train.pp
        total += WEIGHT_BYTES * numel * (ranks - 1) / ranks
    return total


def _pack(moved: Traffic, hardware: Hardware) -> float:
    """Estimate the seconds of reading and writing what is packed, unpacked and copied, in the busiest die."""
    through = moved.sent.sum(0) + moved.received.sum(0) + moved.copied
    return float(2 * through.max() / hardware.hbm_bytes_per_s.value)


def _longest(shown: dict[str, float], rows: dict[str, float]) -> Switch:
    limit = max(rows, key=lambda name: rows[name])
    return Switch(shown, rows[limit], limit)

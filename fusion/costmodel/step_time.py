"""What a step of the loop costs besides the switch: enough to rank layouts and deployments, not a promise.

    train       operations at `train_reached` of the peak and the bytes of TP (gather, reduce-scatter) and EP (dispatch
                and combine) of every pass; experts wait for the die that got most tokens, stages for the one with
                most layers, and 1F1B has its bubble
    generate    waves of as many sequences as the KV cache holds, each as long as the longest response; a decode step
                reads the die's weights and KV cache once, exchanges tokens twice a sparse layer, and takes `layer_s` a
                layer more

`train_reached` and `layer_s` are calibrated on one published run: DeepSeek-R1 on 128 Atlas A3 cards with TP4 EP8 PP8
and TP2 EP128 x 2, whose update took 319.3 s and whose rollout 373.65 s (cann-recipes-train). EXPERT_SPREAD is assumed:
the standard deviation of an expert's load beside its mean; the fewer experts a die has, the more it is felt. They are
the same for all models.
"""

from __future__ import annotations

from math import log, sqrt

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.layouts import misfit
from fusion.costmodel.memory import WEIGHT, held
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.model import Parallel

EXPERT_SPREAD = 0.25


def train_s(setup: Setup) -> float:
    """Seconds of one update over all samples of a step, forward, backward and recomputation."""
    shape, train, hardware = setup.shape, setup.train, setup.hardware
    tokens, passes = setup.workload.tokens, 4 if setup.training.recompute else 3
    spread = train.ep * train.etp
    crowded = crowding(shape, train)
    routed = shape.routed * shape.top_k / max(1, shape.experts)
    met = shape.active + routed * (crowded - 1)
    compute = 2 * passes * met * tokens / (train.world * hardware.flops.value * hardware.train_reached.value)
    count = len(shape.layers)
    longest = len(train.layers(count, 0)) * train.pp / count
    micro_batches = max(1.0, tokens / train.dp / setup.training.token_budget)
    bubble = 1 + (train.pp - 1) / micro_batches
    per_die = tokens / train.dp * len(train.layers(count, 0)) * shape.hidden_size * WEIGHT * passes
    tp = 4 * per_die * (train.tp - 1) / train.tp / reach(hardware, train.tp)
    sparse = sum(layer.experts > 0 for layer in shape.layers) / count
    ep = 2 * shape.top_k * sparse * crowded * per_die / train.tp * (1 - 1 / spread) / reach(hardware, spread)
    return (compute * longest + tp + ep) * bubble


def crowding(shape: Shape, parallel: Parallel) -> float:
    """How much more than its share the die gets whose experts are wanted most."""
    if not shape.experts or parallel.ep == 1:
        return 1.0
    return 1 + EXPERT_SPREAD * sqrt(2 * log(parallel.ep) * parallel.ep / shape.experts)


def generate_s(setup: Setup, kv_tokens: int) -> float:
    """Seconds to generate all samples of a step; infinite where not one sequence fits."""
    shape, infer, hardware, work = setup.shape, setup.infer, setup.hardware, setup.workload
    rows = infer.world // (infer.tp * infer.pp)
    sequences = work.samples / rows
    room = min(setup.rollout.max_seqs, kv_tokens / (work.prompt + work.response))
    if kv_tokens < work.prompt + work.longest:
        return float("inf")
    waves = max(1.0, sequences / room)
    weights = WEIGHT * max(held(shape, infer, stage).numel for stage in range(infer.pp))
    cached = min(sequences, room) * (work.prompt + work.response / 2) * shape.kv_bytes(infer.tp, infer.pp)
    sparse = sum(layer.experts > 0 for layer in shape.layers) if infer.ep > 1 else 0
    read = (weights + cached) * infer.pp / hardware.hbm_bytes_per_s.value
    exchanges = 2 * sparse + (2 * len(shape.layers) if infer.tp > 1 else 0) / 8
    launches = len(shape.layers) * hardware.layer_s.value
    return waves * work.longest * (read + exchanges * hardware.collective_s.value + launches)


def reference_s(setup: Setup) -> float:
    """Seconds of a forward pass over all samples, as the reference model on the dies that train makes it."""
    return train_s(setup) / (4 if setup.training.recompute else 3)


def reach(hardware: Hardware, ranks: int) -> float:
    """Bandwidth of a group of neighbouring dies: that of its slowest link."""
    return hardware.link_bytes_per_s(hardware.topology.level(0, ranks - 1) if ranks > 1 else 0)


def layouts(setup: Setup, world: int, training: bool) -> list[Parallel]:
    """Every layout worth a look: sizes that divide dies and model; TP inside a node, no pipeline to generate."""
    shape, node = setup.shape, setup.hardware.topology.ranks_per_node
    tps = [n for n in (1, 2, 4, 8, 16) if n <= node and world % n == 0]
    pps = [n for n in range(1, 17) if world % n == 0] if training else [1]
    eps = [n for n in (1, 2, 4, 8, 16, 32, 64, 96, 128, 256) if world % n == 0]
    found = []
    for tp in tps:
        for pp in pps:
            for ep in eps:
                if world // pp % tp == 0 and world // pp % ep == 0:
                    parallel = Parallel(world, tp, ep, pp)
                    if misfit(parallel, shape) is None:
                        found.append(parallel)
    return found

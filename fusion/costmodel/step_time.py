"""Estimate the seconds of training and generation in a step of the loop: accurate enough to rank layouts and
deployments, not to predict a run.

    train       operations at `train_reached` of the peak, plus the bytes of TP (gather, reduce-scatter), EP (dispatch,
                combine) and context parallel (rows for heads, and back) of every pass; bounded by the die whose experts
                get the most tokens and by the stage with the most layers; multiplied by the bubble of 1F1B
    generate    waves of as many sequences as the KV cache holds, each as long as the longest response; a decode step
                reads the die's weights and KV cache once, exchanges tokens twice per sparse layer, and takes `layer_s`
                more per layer
    both        take at least as long as the host launches their operations (`launches.py`)

`train_reached` is calibrated on one published run (cann-recipes-train): DeepSeek-R1 on 128 Atlas A3 cards with TP4 EP8
PP8 and TP2 EP128 x 2, whose update took 319.3 s. Its rollout took 373.65 s, of which the model took less than 60 %, and
hosts the rest: schedulers that agree over TCP before every step, which is not modelled. `layer_s` is calibrated on the
model's decode step there. EXPERT_SPREAD is assumed: the standard deviation of an expert's load relative to its mean,
which matters more the fewer experts a die has. The same values are used for every model."""

from math import log, sqrt

from fusion.costmodel.hardware import Hardware
from fusion.costmodel.launches import decode_floor_s, launches_of
from fusion.costmodel.memory import WEIGHT_BYTES, largest_weight_bytes
from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.model import Parallel

EXPERT_SPREAD = 0.25


def train_s(setup: Setup) -> float:
    """Estimate one update over all samples of a step: forward, backward and recomputation."""
    shape, train, hardware = setup.shape, setup.train, setup.hardware
    tokens, passes = setup.trained_rows, 4 if setup.training.recompute else 3
    load, config = expert_load_factor(shape, train), shape.config
    routed = shape.routed * config.top_k / max(1, config.num_experts)
    parameters = shape.active + routed * (load - 1)
    compute = 2 * passes * parameters * tokens / (train.world * hardware.flops.value * hardware.train_reached.value)
    layers, sparse = len(train.layers(config.num_layers, 0)), config.num_sparse_layers / config.num_layers
    longest = layers * train.pp / config.num_layers
    micro_batches = max(1.0, tokens / train.replicas / setup.training.token_budget)
    bubble = 1 + (train.pp - 1) / micro_batches
    sizes = dict(rows=tokens / train.dp * passes, layers=layers, sparse=sparse * layers, load=load)
    launches = launches_of(hardware.operators, train).of_passes(passes) * sparse * layers
    seconds = compute * longest + exchange_s(shape, hardware, train, **sizes)
    return max(seconds, micro_batches * launches * hardware.launch_s.value) * bubble


def exchange_s(
    shape: Shape, hardware: Hardware, parallel: Parallel, *, rows: float, layers: float, sparse: float, load: float
) -> float:
    """Estimate the seconds of what a die exchanges in its ``layers`` over TP, EP and context parallelism. ``rows``:
    tokens of a data-parallel rank, in all passes; ``sparse``: number of these layers that have experts, whose ``load``
    is that of `expert_load_factor`."""
    config, experts, tp_cp = shape.config, parallel.ep * parallel.etp, parallel.tp * parallel.cp
    row_bytes = rows * config.hidden_size * WEIGHT_BYTES
    tp = 4 * layers * row_bytes * (parallel.tp - 1) / parallel.tp
    ep = 2 * sparse * config.top_k * load * row_bytes / parallel.tp * (1 - 1 / experts)
    context = shape.attention.exchanged_elements(parallel.tp, parallel.cp)
    context += shape.attention.shared_elements(parallel.tp, parallel.dcp)
    context_bytes = layers * rows * WEIGHT_BYTES * context
    return (
        tp / group_bytes_per_s(hardware, parallel.tp)
        + ep / group_bytes_per_s(hardware, experts)
        + context_bytes / group_bytes_per_s(hardware, parallel.dcp if parallel.dcp > 1 else tp_cp)
    )


def expert_load_factor(shape: Shape, parallel: Parallel) -> float:
    """Estimate the load of the die whose experts get the most tokens, relative to the mean."""
    if not shape.config.num_experts or parallel.ep == 1:
        return 1.0
    return 1 + EXPERT_SPREAD * sqrt(2 * log(parallel.ep) * parallel.ep / shape.config.num_experts)


def generate_s(setup: Setup, kv_tokens: int) -> float:
    """Estimate the generation of all samples of a step; infinite where the longest sequence does not fit.
    ``kv_tokens``: capacity of an attention rank's KV cache."""
    shape, infer, hardware, work = setup.shape, setup.infer, setup.hardware, setup.workload
    rows = infer.world // (infer.tp * infer.pp)
    sequences = work.samples / rows
    room = min(setup.rollout.max_seqs, kv_tokens / (work.prompt + work.response))
    if kv_tokens < work.prompt + work.longest:
        return float("inf")
    waves = max(1.0, sequences / room)
    weights = largest_weight_bytes(shape, infer)
    kv_bytes = shape.kv_bytes(infer.tp, infer.pp, dcp=infer.dcp)
    cached = min(sequences, room) * (work.prompt + work.response / 2) * kv_bytes
    layers, sparse = shape.config.num_layers, shape.config.num_sparse_layers if infer.ep > 1 else 0
    read = (weights + cached) * infer.pp / hardware.hbm_bytes_per_s.value
    exchanges = 2 * sparse + (2 * layers * ((infer.tp > 1) + (infer.dcp > 1))) / 8
    step_s = read + exchanges * hardware.collective_s.value + layers * hardware.layer_s.value
    return waves * work.longest * max(step_s, decode_floor_s(shape, hardware, infer))


def reference_s(setup: Setup) -> float:
    """Estimate the reference model's forward pass over all samples, on the dies that train."""
    return train_s(setup) / (4 if setup.training.recompute else 3)


def group_bytes_per_s(hardware: Hardware, ranks: int) -> float:
    """Return the bandwidth of a group of neighbouring dies: that of its slowest link."""
    return hardware.link_bytes_per_s(hardware.topology.level(0, ranks - 1) if ranks > 1 else 0)

"""Bytes of every owner on a die, phase by phase, from shapes alone.

    train    weights, gradients (fp32, whole), optimizer (fp32 masters and moments, shared out to replicas), activations
    switch   the larger of both layouts' weights, four buckets, the optimizer state on its way out; gradients are gone
    infer    weights (twice with `fusion.double_buffer` on cards that only generate), activations of an engine step, and
             the KV cache: `rollout.kv_fraction` of what is left

What is stored is exact, but for padding; activations are a count of the largest tensors, good for a choice between
layouts. Each phase is that of the die of the pipeline stage where it takes most.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Layer, Shape
from fusion.model import Parallel
from fusion.npu.device import OWNERS

WEIGHT, GRADIENT = 2, 4
"""Bytes of an element: bf16 weights, fp32 gradients."""
STATES = 12
"""fp32 master and two moments of AdamW, in bytes an element."""
LOGITS = 10
"""Bytes of one logit in training: as computed, in fp32, its gradient."""


@dataclass(frozen=True)
class Held:
    """Elements of the weights on a die: ``dense`` (replicated over dp) and ``expert`` (replicated over edp)."""

    dense: int
    expert: int

    @property
    def numel(self) -> int:
        return self.dense + self.expert

    def states_bytes(self, parallel: Parallel) -> int:
        """Of the sharded optimizer."""
        return STATES * (-(-self.dense // parallel.dp) + -(-self.expert // parallel.edp))


@dataclass(frozen=True)
class Memory:
    """Phase → owner (of `fusion.npu`'s OWNERS) → bytes on the die where the phase takes most."""

    phases: dict[str, dict[str, float]]
    kv_tokens: int
    """What the KV cache of one attention rank holds."""
    states_bytes: float
    """Optimizer state of one die (the most of any): what an offload moves."""
    host_bytes: float
    """Optimizer state of one node, while it is away."""
    overlap: bool
    """Whether weights may change their layout while the optimizer state is still leaving; else it leaves first."""

    def total(self, phase: str) -> float:
        return sum(self.phases[phase].values())


def held(shape: Shape, parallel: Parallel, stage: int) -> Held:
    """What a die of a pipeline stage holds."""
    dense = expert = 0
    here = [shape.layers[i] for i in parallel.layers(len(shape.layers), stage)]
    times = Counter(map(id, here))  # layers of a kind are one object
    for layer in {id(layer): layer for layer in here}.values():
        dense += times[id(layer)] * _dense(layer, shape, parallel)
        expert += times[id(layer)] * (layer.numel["expert"] // (parallel.ep * parallel.etp))
    last = stage == parallel.pp - 1
    if stage == 0 or (last and shape.tied):
        dense += shape.embed.numel // parallel.tp
    if last:
        dense += sum(t.numel // (parallel.tp if t.cut == "tp" else 1) for t in shape.head)
    return Held(dense, expert)


def _dense(layer: Layer, shape: Shape, parallel: Parallel) -> int:
    kv = layer.numel["kv"] // min(parallel.tp, shape.kv_heads) if shape.kv_heads else 0
    return layer.numel["whole"] + layer.numel["tp"] // parallel.tp + kv


def memory(setup: Setup) -> Memory:
    shape, train, infer = setup.shape, setup.train, setup.infer
    stages = [_train_stage(setup, stage) for stage in range(train.pp)]
    training = max(stages, key=lambda owners: sum(owners.values()))
    generating = max([_infer_stage(setup, stage) for stage in range(infer.pp)], key=lambda owners: sum(owners.values()))
    states = max(held(shape, train, stage).states_bytes(train) for stage in range(train.pp))
    weights = [WEIGHT * max(held(shape, side, stage).numel for stage in range(side.pp)) for side in (train, infer)]
    stays = states if setup.shared and setup.fusion.offload == "none" else 0
    leaves = states if setup.shared and setup.fusion.offload == "switch" else 0
    buckets, usable = 4 * setup.fusion.bucket_bytes, setup.hardware.usable_bytes
    overlap = max(weights) + buckets + leaves <= usable
    switching: dict[str, float] = {
        "weights": max(weights),
        "optimizer": stays + (leaves if overlap else 0),
        "buckets": buckets,
    }
    generating["optimizer"] = stays
    if setup.fusion.double_buffer and not setup.shared:
        generating["weights"] *= 2
    generating["kv"] = max(0.0, (usable - sum(generating.values())) * setup.rollout.kv_fraction)
    phases = {"train": training, "switch": switching, "infer": generating}
    return Memory(
        {phase: {owner: float(owners.get(owner, 0)) for owner in OWNERS} for phase, owners in phases.items()},
        kv_tokens=int(generating["kv"] // shape.kv_bytes(infer.tp, infer.pp)),
        states_bytes=float(states),
        host_bytes=float(states * setup.hardware.topology.ranks_per_node * (setup.fusion.offload != "none")),
        overlap=overlap,
    )


def _train_stage(setup: Setup, stage: int) -> dict[str, float]:
    shape, train = setup.shape, setup.train
    here = held(shape, train, stage)
    states = here.states_bytes(train)
    return {
        "weights": WEIGHT * here.numel,
        "gradients": GRADIENT * here.numel,
        "optimizer": min(states, 4 * setup.fusion.bucket_bytes) if setup.fusion.offload == "stream" else states,
        "activations": _training_activations(setup, stage),
    }


def _infer_stage(setup: Setup, stage: int) -> dict[str, float]:
    shape, infer, rollout = setup.shape, setup.infer, setup.rollout
    layers = [shape.layers[i] for i in infer.layers(len(shape.layers), stage)]
    working = max(layer_bytes(shape, layer, infer, rollout.max_batch_tokens) for layer in layers)
    logits = rollout.max_seqs * shape.vocab_size // infer.tp * 8 if stage == infer.pp - 1 else 0
    return {"weights": WEIGHT * held(shape, infer, stage).numel, "activations": working + logits}


def _training_activations(setup: Setup, stage: int) -> float:
    """1F1B keeps as many micro-batches as there are stages from here on; with recompute only the inputs of layers."""
    shape, train, tokens = setup.shape, setup.train, setup.training.token_budget
    layers = [shape.layers[i] for i in train.layers(len(shape.layers), stage)]
    working = [layer_bytes(shape, layer, train, tokens) for layer in layers]
    in_flight = train.pp - stage
    inputs = 2 * tokens // train.tp * shape.hidden_size * len(layers)
    kept = inputs + max(working) / in_flight if setup.training.recompute else inputs + sum(working)
    logits = tokens * shape.vocab_size // train.tp * LOGITS if stage == train.pp - 1 else 0
    return in_flight * kept + max(working) + logits


def layer_bytes(shape: Shape, layer: Layer, parallel: Parallel, tokens: int) -> float:
    """bf16 tensors that one layer keeps for ``tokens`` tokens of a data-parallel rank, on one die."""
    d, rows = shape.hidden_size, tokens / parallel.tp
    attention = rows * (4 * d + 2 * shape.qkv_width)
    if layer.experts:
        mlp = rows * shape.top_k * (2 * d + 3 * shape.expert_width / parallel.etp)
    else:
        mlp = rows * 3 * shape.mlp_width
    return 2 * (attention + mlp)

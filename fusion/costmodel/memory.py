"""Estimate the HBM of a die by phase and owner, from shapes alone.

    train    weights, gradients (fp32, not sharded), optimizer (fp32 masters and moments, sharded over replicas),
             activations
    switch   the larger of both layouts' weights, four buckets (none larger than the weights), the stacks of a layer's
             experts where cards store them as a whole, the optimizer state being offloaded; no gradients
    infer    weights (twice with `fusion.double_buffer` on cards that only generate), activations of an engine step, and
             the KV cache: `rollout.engine.kv_fraction` of the remaining HBM

Stored tensors are exact but for padding; activations count the largest tensors only, which suffices to choose between
layouts. Each phase is that of a die of the pipeline stage where the phase is largest."""

from dataclasses import dataclass

from fusion.costmodel.setup import Setup
from fusion.costmodel.shape import Shape
from fusion.model import Parallel
from fusion.model.bucket_plan import unit_bytes
from fusion.model.spec import Dense, Latent, LayerSpec, Sparse
from fusion.model.tiling import LOGIT_BYTES, TILE_BYTES, tile_shape
from fusion.npu.config import MAX_GATHERED_TOKENS, STACKING
from fusion.npu.memory import OWNERS

WEIGHT_BYTES, GRADIENT_BYTES = 2, 4
"""Bytes of an element: bf16 weights, fp32 gradients."""
STATE_BYTES = 12
"""fp32 master and two moments of AdamW, in bytes an element."""


@dataclass(frozen=True)
class StageWeights:
    """Elements of the weights on a die: ``dense`` (replicated over dp) and ``expert`` (replicated over edp)."""

    dense: int
    expert: int

    @property
    def numel(self) -> int:
        return self.dense + self.expert

    def states_bytes(self, parallel: Parallel) -> int:
        """Return the bytes of the optimizer's shard."""
        return STATE_BYTES * (-(-self.dense // parallel.dp) + -(-self.expert // parallel.edp))


@dataclass(frozen=True)
class MemoryEstimate:
    """HBM of a die by phase, and what depends on it."""

    phases: dict[str, dict[str, float]]
    """Phase → owner (of `fusion.npu`'s OWNERS) → bytes, on a die of the pipeline stage where the phase is largest."""
    kv_tokens: int
    """Capacity of one attention rank's KV cache."""
    states_bytes: float
    """Optimizer state of one die (the largest): the bytes of an offload."""
    host_bytes: float
    """Optimizer state of one node, in host memory while offloaded."""
    overlap: bool
    """Whether HBM holds both, so that weights are resharded while the optimizer state is offloaded; else after it."""

    def total(self, phase: str) -> float:
        return sum(self.phases[phase].values())


def stage_weights(shape: Shape, parallel: Parallel, stage: int) -> StageWeights:
    """Count the elements of the weights on a die of a pipeline stage."""
    dense = expert = 0
    for kind, layers in shape.kinds_of_stage(parallel, stage).items():
        dense += layers * shape.held(kind, parallel.tp)
        expert += layers * (shape.routed_of(kind) // (parallel.ep * parallel.etp))
    last = stage == parallel.pp - 1
    if stage == 0 or (last and shape.tied):
        dense += shape.held("embed", parallel.tp)
    if last:
        dense += shape.held("head", parallel.tp)
    return StageWeights(dense, expert)


def trained_weights(shape: Shape, parallel: Parallel, stage: int) -> StageWeights:
    """Count the elements on a die of a pipeline stage that have gradients: all, or those of adapters. What ranks that
    split an expert share of its adapters is counted whole, and so is the rest of them."""
    if shape.adapters is None:
        return stage_weights(shape, parallel, stage)
    dense = expert = 0
    for kind, layers in shape.kinds_of_stage(parallel, stage).items():
        of_rank, of_experts = shape.adapters_of(kind, parallel.tp)
        dense += layers * of_rank
        expert += layers * (of_experts // parallel.ep)
    return StageWeights(dense, expert)


def moved_share(setup: Setup) -> float:
    """Return the share of the weights that switches move: less than 1 where cards that only generate have a base."""
    if setup.shape.adapters is None or setup.shared:
        return 1.0
    return trained_weights(setup.shape, Parallel(), 0).numel / setup.shape.numel


def largest_weight_bytes(shape: Shape, parallel: Parallel) -> int:
    """Return the bytes of a die's weights in the pipeline stage that has most."""
    return WEIGHT_BYTES * max(stage_weights(shape, parallel, stage).numel for stage in range(parallel.pp))


def stack_bytes(setup: Setup) -> int:
    """Return the bytes of the stacks of a layer's experts on a die that do not fit a unit of storage, which a switch
    holds in both layouts at once, as `Layout.external_nbytes`; 0 where cards do not stack experts."""
    if setup.hardware.operators not in STACKING:
        return 0
    max_bytes, sizes = unit_bytes(setup.fusion.bucket_bytes), [0]
    for parallel in (setup.train, setup.infer):
        for kind in set(setup.shape.kind_of):
            stacks = [WEIGHT_BYTES * n // (parallel.ep * parallel.etp) for n in setup.shape.stacks_of(kind)]
            sizes.append(sum(size for size in stacks if size > max_bytes))
    return max(sizes)


def estimate_memory(setup: Setup) -> MemoryEstimate:
    """Estimate the HBM of every phase, and the capacity of the KV cache."""
    shape, train, infer = setup.shape, setup.train, setup.infer
    stages = [training_bytes(setup, stage) for stage in range(train.pp)]
    training = max(stages, key=lambda owners: sum(owners.values()))
    generating = max(
        [generation_bytes(setup, stage) for stage in range(infer.pp)], key=lambda owners: sum(owners.values())
    )
    states = max(trained_weights(shape, train, stage).states_bytes(train) for stage in range(train.pp))
    weights = [largest_weight_bytes(shape, side) for side in (train, infer)]
    stays = states if setup.shared and setup.fusion.offload == "none" else 0
    leaves = states if setup.shared and setup.fusion.offload == "switch" else 0
    buckets, usable = 4 * min(setup.fusion.bucket_bytes, max(weights)), setup.hardware.usable_bytes
    resharded = max(weights) + stack_bytes(setup)
    overlap = resharded + buckets + leaves <= usable
    switching: dict[str, float] = {
        "weights": resharded,
        "optimizer": stays + (leaves if overlap else 0),
        "buckets": buckets,
    }
    generating["optimizer"] = stays
    if setup.fusion.double_buffer and not setup.shared:
        generating["weights"] *= 1 + moved_share(setup)
    generating["weights"] += copied_latents_bytes(setup)
    generating["kv"] = max(0.0, (usable - sum(generating.values())) * setup.rollout.kv_fraction)
    phases = {"train": training, "switch": switching, "infer": generating}
    return MemoryEstimate(
        {phase: {owner: float(owners.get(owner, 0)) for owner in OWNERS} for phase, owners in phases.items()},
        kv_tokens=int(generating["kv"] // shape.kv_bytes(infer.tp, infer.pp, dcp=infer.dcp)),
        states_bytes=float(states),
        host_bytes=float(states * setup.hardware.topology.ranks_per_node * (setup.fusion.offload != "none")),
        overlap=overlap,
    )


def training_bytes(setup: Setup, stage: int) -> dict[str, float]:
    """Estimate the bytes by owner of a die of a pipeline stage while it trains."""
    shape, train = setup.shape, setup.train
    trained = trained_weights(shape, train, stage)
    states = trained.states_bytes(train)
    return {
        "weights": WEIGHT_BYTES * held_numel(shape, train, stage),
        "gradients": GRADIENT_BYTES * trained.numel,
        "optimizer": min(states, 4 * setup.fusion.bucket_bytes) if setup.fusion.offload == "stream" else states,
        "activations": _training_activations(setup, stage),
    }


def generation_bytes(setup: Setup, stage: int) -> dict[str, float]:
    """Estimate the bytes by owner of a die of a pipeline stage while it generates, without KV cache."""
    shape, infer, rollout = setup.shape, setup.infer, setup.rollout
    kinds = [shape.kinds[kind] for kind in shape.kinds_of_stage(infer, stage)]
    working = max(layer_bytes(shape, kind, infer, tokens=rollout.max_batch_tokens) for kind in kinds)
    logits = rollout.max_seqs * shape.config.vocab_size // infer.tp * 8 if stage == infer.pp - 1 else 0
    activations = working + logits + gathered_bytes(setup)
    return {"weights": WEIGHT_BYTES * held_numel(shape, infer, stage), "activations": activations}


def held_numel(shape: Shape, parallel: Parallel, stage: int) -> int:
    """Count the elements of the weights on a die of a pipeline stage, with adapters."""
    adapters = trained_weights(shape, parallel, stage).numel if shape.adapters else 0
    return stage_weights(shape, parallel, stage).numel + adapters


def copied_latents_bytes(setup: Setup) -> int:
    """Return the bytes of the copies of `kv_b_proj` that an engine on a die stores in another order, if it does."""
    latent, infer = setup.shape.config.attention, setup.infer
    if not (setup.copies_latents and isinstance(latent, Latent)):
        return 0
    rows = latent.num_heads * (latent.nope_dim + latent.value_dim) // infer.tp
    return WEIGHT_BYTES * setup.shape.config.num_layers * rows * latent.kv_rank // infer.pp


def gathered_bytes(setup: Setup) -> int:
    """Return the bytes of the latents that a decode step gathers from their blocks at a time, which CUDA cards do."""
    shape = setup.shape
    if not (setup.hardware.operators.startswith("cuda") and isinstance(shape.config.attention, Latent)):
        return 0
    longest = setup.workload.longest_sample
    tokens = max(longest, min(setup.rollout.max_seqs * longest, MAX_GATHERED_TOKENS))
    return WEIGHT_BYTES * shape.attention.kv_elements_of_rank(setup.infer.tp) * tokens


def _training_activations(setup: Setup, stage: int) -> float:
    """Estimate the bytes of activations: 1F1B keeps one micro-batch per stage from this one on; with recomputation only
    the inputs of layers."""
    shape, train = setup.shape, setup.train
    tokens = -(-setup.micro_batch_tokens // train.cp)  # of a rank
    kinds = shape.kinds_of_stage(train, stage)
    of_kind = {kind: layer_bytes(shape, shape.kinds[kind], train, tokens=tokens) for kind in kinds}
    working = [of_kind[kind] for kind in kinds.elements()]
    in_flight = train.pp - stage
    inputs = 2 * tokens // train.tp * shape.config.hidden_size * len(working)
    kept = inputs + max(working) / in_flight if setup.training.recompute else inputs + sum(working)
    ids = shape.config.vocab_size // train.tp
    logprobs = logprob_bytes(tokens, ids, shape.config.hidden_size) if stage == train.pp - 1 else 0
    return in_flight * kept + max(working) + logprobs


def logprob_bytes(rows: int, ids: int, channels: int, tile_bytes: int = TILE_BYTES) -> int:
    """Estimate the bytes that log-probabilities of a micro-batch add to its hidden states: a tile of logits, the rows
    that are trained with the sum of their gradients, and the gradients of a tile of the head and of the whole head."""
    tile_rows, tile_ids = tile_shape(rows, ids, tile_bytes)
    summed = (WEIGHT_BYTES + GRADIENT_BYTES) * (rows + tile_ids) * channels
    return LOGIT_BYTES * tile_rows * tile_ids + summed + WEIGHT_BYTES * ids * channels


def layer_bytes(shape: Shape, layer: LayerSpec, parallel: Parallel, tokens: int) -> float:
    """Count the bytes of the bf16 tensors that a layer keeps on a die for ``tokens`` tokens of a data-parallel rank."""
    d, rows = shape.config.hidden_size, tokens / parallel.tp
    attention = rows * (4 * d + 2 * shape.attention.width)
    if parallel.cp > 1:  # outputs before and after the exchange; keys and values as they are repeated
        of_ends, repeated = shape.attention.ends, shape.attention.repeated_elements(parallel.tp, parallel.cp)
        attention += rows * of_ends[1] + tokens * repeated
    match layer.mlp:
        case Sparse(width=width, router=router):
            mlp = rows * router.top_k * (2 * d + 3 * width / parallel.etp)
        case Dense(width=width):
            mlp = rows * 3 * width
    return 2 * (attention + mlp)

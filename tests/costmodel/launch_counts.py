"""Count what a card launches in a layer, and how often the host waits for it.

    a model of 1 and one of 3 layers ─► all operations of a step ─► their difference, halved

Counted on the emulated card, in bfloat16, by a dispatch mode: every operation that is neither a view nor an allocation
is a launch, and every collective. A vendor's operator is one, or as many as `DECLARED` states. The CUDA operators that
only a card has stand in for themselves: they return zeros of the right shape. The sizes of heads and experts are small:
they change no count.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fusion.npu.operators
from benchmarks.harness import Figures
from benchmarks.models import on_cards, randomise
from fusion.inference import EmbeddedEngine, Request, RolloutConfig, SamplingParams
from fusion.inference.config import EngineConfig
from fusion.inference.sequence import EngineStep, Sequence
from fusion.model import Mesh, ModelConfig, Parallel, Transformer
from fusion.npu import Device, open_device
from fusion.npu.operators import block_tokens, cuda, operators_of
from fusion.training import EmbeddedTrainEngine, Sequences, TrainingConfig
from fusion.training.algorithms import cross_entropy
from tests.costmodel import triton_stand_ins

EXPERTS, VOCABULARY = 128, 512
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=32,
    num_experts_per_tok=8,
    moe_intermediate_size=16,
    norm_topk_prob=True,
    tie_word_embeddings=False,
    max_position_embeddings=40960,
)
SHAPE = SIZES | dict(model_type="qwen3_moe", num_key_value_heads=4, head_dim=16, num_experts=EXPERTS)
LATENTS = SIZES | dict(
    model_type="deepseek_v3",
    num_key_value_heads=32,
    q_lora_rank=32,
    kv_lora_rank=16,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=16,
    n_routed_experts=EXPERTS,
    n_shared_experts=1,
    n_group=8,
    topk_group=4,
    first_k_dense_replace=0,
    routed_scaling_factor=2.5,
    num_nextn_predict_layers=0,
)

LAYOUTS = {"tp1": Parallel(), "tp2ep2": Parallel(2, tp=2, ep=2)}
TRITON = ("triton_attention", "triton_experts")
"""Modules of the table `cuda_fused` that need Triton"""
TABLES = ("cuda", "cuda_fused", "ascend", "plain")
"""Tables of operators; the last is composed of PyTorch's, what the others are compared with"""
DECLARED = {
    "launches::rms_norm_backward": 2,  # of the input, of the weight (ATen, layer_norm_kernel.cu)
    "launches::attend": 2,  # the kernel, and the fill of a random state that torch allocates
    "launches::attend_blocks": 3,  # also the sum of the splits (FlashAttention 2, flash_fwd_launch_template.h)
    "launches::attend_and_join": 2,  # `triton_attention.attend`
    "launches::attend_backward": 7,  # products, main kernel, conversion, accumulator, two sums over heads, fill
}
"""Operator that stands in for one of CUDA's → its launches, from its source"""
ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "_unsafe_view", "lift_fresh"}


class Launches(TorchDispatchMode):
    """Count launches by operation, and the operations for which the host waits."""

    def __init__(self) -> None:
        super().__init__()
        self.by_operation, self.waits = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        name = operation.name().partition(".")[0]
        reads = name.partition("::")[2] == "_local_scalar_dense" or "cpu" in _places(result)
        if reads and "npu" in _places(args):
            self.waits[name] += 1
        written = any(one.alias_info is not None and one.alias_info.is_write for one in operation._schema.arguments)
        is_collective = name.startswith("c10d::")
        is_view = not written and not is_collective and _storages(result) <= _storages((args, kwargs))
        on_card = "npu" in _places((args, kwargs, result))
        if on_card and not is_view and name.partition("::")[2] not in ALLOCATIONS:
            self.by_operation[name] += DECLARED.get(name, 1)
        return result


def _storages(tree: Any) -> set[int]:
    return {one.untyped_storage()._cdata for one in tree_leaves(tree) if isinstance(one, torch.Tensor)}


def _places(tree: Any) -> set[str]:
    return {one.device.type for one in tree_leaves(tree) if isinstance(one, torch.Tensor)}


@torch.library.custom_op("launches::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(x)


@torch.library.custom_op("launches::rms_norm_backward", mutates_args=())
def _rms_norm_backward(grad: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros_like(grad), torch.zeros_like(weight)


@torch.library.custom_op("launches::attend", mutates_args=())
def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(q)


@torch.library.custom_op("launches::attend_backward", mutates_args=())
def _attend_backward(
    grad: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.zeros_like(grad), torch.zeros_like(k), torch.zeros_like(v)


@torch.library.custom_op("launches::attend_blocks", mutates_args=())
def _attend_blocks(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(q)


_rms_norm.register_autograd(
    lambda ctx, grad: _rms_norm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)
_attend.register_autograd(
    lambda ctx, grad: _attend_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:]),
)


def _varlen_attn(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
    table = options.get("block_table")
    return _attend(q, k, v) if table is None else _attend_blocks(q, k, v, table)


@contextmanager
def card_with(table: str, index: int) -> Iterator[Device]:
    """An emulated card that calls the operators of ``table``."""
    device = open_device("emulated", index=index, capacity_bytes=8 << 30)
    before = device.operators
    try:
        with (
            patch.dict(sys.modules, {f"fusion.npu.operators.{name}": triton_stand_ins for name in TRITON}),
            patch.multiple(fusion.npu.operators, create=True, **dict.fromkeys(TRITON, triton_stand_ins)),
            patch.object(cuda, "varlen_attn", _varlen_attn),
            patch.object(cuda.Cuda, "rms_norm", lambda self, x, weight, eps: _rms_norm(x, weight)),
        ):
            device.operators = operators_of("emulated", table)
            yield device
    finally:
        device.operators = before


class OfALayer(NamedTuple):
    """What one layer of a model launches, by operation, and waits for; and the waits of a whole step."""

    by_operation: Counter[str]
    waits: Counter[str]
    waits_of_step: int


def of_a_layer(
    shape: dict[str, Any], device: Device, parallel: Parallel, run: Callable[[Transformer], Launches]
) -> OfALayer:
    counted, mesh = [], Mesh.create(parallel)
    for layers in (1, 3):
        config = ModelConfig.from_hf({**shape, "num_hidden_layers": layers})
        counted.append(run(randomise(Transformer(config, mesh, device, torch.bfloat16), std=0.1)))
    one, three = counted
    waits_of_step = sum(three.waits.values())
    for layer, whole in ((three.by_operation, one.by_operation), (three.waits, one.waits)):
        layer.subtract(whole)
        for name, count in list(layer.items()):
            layer[name] = count // 2
    return OfALayer(three.by_operation, three.waits, waits_of_step)


def on_ranks(layout: str, count: Callable[..., OfALayer], table: str, *args: Any) -> OfALayer:
    """Return the counts of the rank that launches most. ``count`` takes the card, the layout and ``args``."""
    parallel = LAYOUTS[layout]
    if parallel.world == 1:
        return _on_rank(0, None, count, table, parallel, args)
    return max(
        on_cards(_on_rank, parallel.world, count, table, parallel, args), key=lambda one: one.by_operation.total()
    )


def _on_rank(rank: int, _: Any, count: Callable[..., OfALayer], table: str, parallel: Parallel, args: Any) -> OfALayer:
    with card_with(table, index=7 - rank) as device:
        return count(device, parallel, *args)


def decode_step(model: Transformer, args: Namespace, table: str, context: int) -> Launches:
    """Decode one token of ``args.batch`` sequences with about ``context`` tokens in the cache."""
    size = block_tokens({"ascend": "npu"}.get(table, table), table)
    engine_config = EngineConfig(block_size=max(16, size), max_seqs=args.batch, prefix_cache=False)
    rollout = RolloutConfig(engine=engine_config)
    engine = EmbeddedEngine(model, model.mesh, model.device, rollout)
    size, a_sequence = engine_config.block_size, -(-context // engine_config.block_size)
    engine.cache.allocate(args.batch * a_sequence, context)
    engine.cache.clean(args.batch * a_sequence - 1)
    sequences = []
    for index in range(args.batch):
        prompt = tuple((index + at) % VOCABULARY for at in range(context - index))
        made = Sequence.of(Request(f"r{index}", prompt, SamplingParams()), SamplingParams(), ())
        made.computed, used = len(prompt) - 1, -(-len(prompt) // size)
        made.blocks = array("q", range(index * a_sequence, index * a_sequence + used))
        sequences.append(made)
    step = EngineStep(decodes=sequences, chunks=[], sampled=sequences)
    engine.forward(step)  # what is made once is made
    with Launches() as found:
        engine.forward(step)
    engine.cache.release()
    return found


def decode(args: Namespace) -> Figures:
    """Count a decode step of a model with grouped-query attention."""
    return {table: _decode(SHAPE, args, table) for table in TABLES}


def decode_mla(args: Namespace) -> Figures:
    """Count a decode step of a model with latent attention."""
    return {table: _decode(LATENTS, args, table) for table in TABLES}


def _decode(shape: dict[str, Any], args: Namespace, table: str) -> Figures:
    figures: Figures = {str(context): {} for context in args.contexts}
    for layout in LAYOUTS:
        found = {
            context: on_ranks(layout, _decode_layer, table, shape, args, table, context) for context in args.contexts
        }
        for context, one in found.items():
            figures[str(context)][layout] = one.by_operation.total()
            _print(args, one, table, layout, context)
        figures[layout] = max(one.by_operation.total() for one in found.values())
        waits = max(one.waits_of_step for one in found.values())
        figures["host_syncs"] = max(figures.get("host_syncs", 0), waits)
    return figures


def _decode_layer(
    device: Device, parallel: Parallel, shape: dict[str, Any], args: Namespace, table: str, context: int
) -> OfALayer:
    return of_a_layer(shape, device, parallel, lambda model: decode_step(model, args, table, context))


def train(args: Namespace) -> Figures:
    """Count forward and backward pass of one micro-batch."""
    figures: Figures = {}
    for table in TABLES:
        of_table: Figures = {}
        for layout, recompute in product(LAYOUTS, (False, True)):
            found = on_ranks(layout, _train_layer, table, args, recompute)
            of_table[f"{layout}_recompute" if recompute else layout] = found.by_operation.total()
            key = "host_syncs" if layout == "tp1" else f"host_syncs_{layout}"
            of_table[key] = max(of_table.get(key, 0), found.waits.total())
            _print(args, found, table, layout, recompute)
        for layout in LAYOUTS.keys() - {"tp1"}:
            found = on_ranks(layout, _train_layer, table, args, True, True)
            of_table[f"host_syncs_{layout}_replay"] = found.waits.total()
            _print(args, found, table, layout, "replay")
        figures[table] = of_table
    return figures


def _train_layer(
    device: Device, parallel: Parallel, args: Namespace, recompute: bool, replays: bool = False
) -> OfALayer:
    return of_a_layer(SHAPE, device, parallel, lambda model: training_pass(model, args, recompute, replays))


def _print(args: Namespace, found: OfALayer, *of: Any) -> None:
    if args.operations:
        print(*of, dict(found.by_operation.most_common()), dict(found.waits))


def training_pass(model: Transformer, args: Namespace, recompute: bool, replays: bool = False) -> Launches:
    """Train one micro-batch of sequences that all have different lengths. ``replays``: the routing of rows is given."""
    engine = EmbeddedTrainEngine(
        model, model.mesh, model.device, TrainingConfig(recompute=recompute, token_budget=1 << 20)
    )
    lengths = list(range(8, 8 + args.sequences))
    rows = sum(lengths)
    mask = torch.ones(rows, dtype=torch.bool)
    mask[torch.tensor([0, *lengths]).cumsum(0)[:-1]] = False
    columns = dict(advantages=torch.ones(rows), behaviour_logprobs=torch.zeros(rows))
    if replays:
        chosen = torch.rand(rows, model.num_sparse_layers, EXPERTS, generator=torch.Generator().manual_seed(0))
        columns["routing"] = chosen.topk(model.config.top_k).indices
    batch = Sequences(torch.arange(rows) % VOCABULARY, lengths, mask, **columns)
    with Launches() as found:
        engine.forward_backward(batch, cross_entropy)
    return found

"""State the documented limits of vendors' operators, which neither their schemas nor their Meta kernels check.

A limit is a number or a property of a call's arguments, with its bounds and its source. Where sources contradict each
other, the vendor's page holds; docs/operators.md lists these. What no page documents is not stated here."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)
FLOATS = (*HALVES, torch.float32)
PAGE = "Ascend/op-plugin 26.1.0, docs/zh/custom_APIs/torch_npu"
GROUPED_MM = "torch 2.13, torch.nn.functional.grouped_mm and its Meta kernel"
FLASH = "FlashAttention 2, csrc/flash_attn/flash_api.cpp, mha_varlen_fwd"
MAX_LISTED_WEIGHTS, MAX_GROUPS = 128, 1024
MAX_PACKED_SEQUENCES = 1024
MAX_DISPATCHED_EXPERTS, MAX_DISPATCHED_ROWS = 24, 512
HCCL_BUFFER_MB = 200
"""Size of a communicator's buffer where HCCL_BUFFSIZE states none"""
CUDA_PAGE = 256
"""Tokens of which a page of FlashAttention 2 has a multiple"""
Arguments = Mapping[str, Any]
"""The arguments of a call by the names of the operator's schema, with its defaults."""


@dataclass(frozen=True)
class Limit:
    """Bound ``value`` of a call: ``at_least``, ``at_most``, ``multiple_of`` a number, or ``one_of`` some values."""

    what: str
    value: Callable[[Arguments], Any]
    at_least: int | None = None
    at_most: int | None = None
    multiple_of: int = 1
    one_of: tuple[Any, ...] = ()
    source: str = PAGE

    def broken_by(self, arguments: Arguments) -> str | None:
        """Return what is wrong with a call, None if nothing is."""
        value = self.value(arguments)
        if self.one_of:
            within = value in self.one_of
        else:
            within = (self.at_least is None or value >= self.at_least) and (
                self.at_most is None or value <= self.at_most
            )
            within = within and value % self.multiple_of == 0
        return None if within else f"{self.what} = {value}, {self._bounds()} ({self.source})"

    def _bounds(self) -> str:
        if self.one_of:
            return f"expected {' or '.join(map(str, self.one_of))}"
        bounds = [] if self.at_least is None else [f"at least {self.at_least}"]
        bounds += [] if self.at_most is None else [f"at most {self.at_most}"]
        bounds += [] if self.multiple_of == 1 else [f"a multiple of {self.multiple_of}"]
        return f"expected {', '.join(bounds)}"


def _true(what: str, holds: Callable[[Arguments], bool], source: str = PAGE) -> Limit:
    return Limit(what, holds, one_of=(True,), source=source)


def _dtype(name: str, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Limit:
    return Limit(f"dtype of {name}", lambda a: a[name].dtype, one_of=dtypes)


def _contiguous(*names: str) -> tuple[Limit, ...]:
    return tuple(_true(f"{name} is contiguous", partial(_is_contiguous, name)) for name in names)


def _is_contiguous(name: str, a: Arguments) -> bool:
    return a[name].is_contiguous()


def _group_width(a: Arguments) -> int:
    return a["x"].shape[-1] // a["group_count"]


def _sharing_heads(a: Arguments) -> float:
    """Return how many heads share a key; latents, which all do, have a limit of their own."""
    return 1 if a["query_rope"] is not None else a["num_heads"] / a["num_key_value_heads"]


def _if_latents(value: Callable[[Arguments], Any]) -> Callable[[Arguments], Any]:
    """Return a value of calls with latents; None: of others."""
    return lambda a: None if a["query_rope"] is None else value(a)


LIMITS: dict[str, tuple[Limit, ...]] = {
    "npu_rms_norm": (_dtype("self"), Limit("dimensions of self", lambda a: a["self"].dim(), at_least=2, at_most=8)),
    "npu_add_rms_norm": (
        _dtype("x1"),
        _true("gamma has the dtype of x1", lambda a: a["gamma"].dtype == a["x1"].dtype),
        Limit("elements of x1", lambda a: a["x1"].numel(), at_least=1),
    ),
    "npu_rotary_mul": (
        _dtype("self"),
        # [B, S, N, D] with factors [1, S, 1, D]
        Limit("dimensions of self", lambda a: a["self"].dim(), one_of=(4,), source="torch_npu 2.10.0, _op_plugin_docs"),
        Limit("channels", lambda a: a["self"].shape[-1], at_most=894, multiple_of=2),
        Limit("sequences times heads", lambda a: a["self"].shape[0] * a["self"].shape[2], at_most=999),
    ),
    "npu_swiglu": (
        _dtype("self", FLOATS),
        Limit("last dimension of self", lambda a: a["self"].shape[-1], multiple_of=2),
    ),
    "npu_moe_gating_top_k_softmax_v2": (
        _dtype("x"),
        Limit("k", lambda a: a["k"], at_least=1, at_most=1024, source="CANN, aclnnMoeGatingTopKSoftmaxV2"),
        _true("k is at most the number of experts", lambda a: a["k"] <= a["x"].shape[-1]),
    ),
    "npu_moe_gating_top_k": (
        _dtype("x"),
        Limit("experts", lambda a: a["x"].shape[-1], at_most=2048),
        Limit("experts of a group", _group_width, at_least=3),
        Limit(
            "experts, groups padded to 32", lambda a: -(-_group_width(a) // 32) * 32 * a["group_count"], at_most=2048
        ),
        _true("k experts are in the chosen groups", lambda a: a["k"] <= _group_width(a) * a["k_group"]),
        _true("bias has the dtype of x", lambda a: a["bias"] is None or a["bias"].dtype == a["x"].dtype),
        Limit("renorm", lambda a: a["renorm"], one_of=(0,)),
    ),
    "npu_moe_distribute_dispatch_v2": (  # on Atlas A3; of npu_moe_distribute_combine_v2, too, which takes less of some
        _dtype("x", HALVES),
        _dtype("expert_ids", (torch.int32,)),
        Limit("EP ranks", lambda a: a["ep_world_size"], at_least=2, at_most=384),
        Limit("experts", lambda a: a["moe_expert_num"], at_most=512),
        Limit("experts of a card", lambda a: a["moe_expert_num"] // a["ep_world_size"], at_most=MAX_DISPATCHED_EXPERTS),
        Limit("tokens of a rank", lambda a: a["x"].shape[0], at_least=1, at_most=MAX_DISPATCHED_ROWS),
        Limit("channels", lambda a: a["x"].shape[1], at_least=1024, at_most=7168),
        Limit("k", lambda a: a["expert_ids"].shape[1], at_least=1, at_most=16),
    ),
    "npu_moe_init_routing_v2": (
        _dtype("x"),
        _dtype("expert_idx", (torch.int32,)),
        Limit("experts", lambda a: a["expert_num"], at_most=10240),
    ),
    "npu_moe_token_unpermute": (
        _dtype("permuted_tokens"),
        _dtype("sorted_indices", (torch.int32,)),
        Limit(
            "experts of a token",
            lambda a: 1 if a["probs"] is None else a["probs"].shape[1],
            at_most=512,
            source="CANN 9.1, aclnnMoeTokenUnpermute",
        ),
    ),
    "npu_grouped_matmul": (
        Limit("weights in a list", lambda a: len(a["weight"]), at_most=MAX_LISTED_WEIGHTS),
        Limit("groups", lambda a: len(a["group_list"]), at_least=1, at_most=MAX_GROUPS),
        _true("counts are of more than one group", lambda a: a["group_list_type"] == 0 or len(a["group_list"]) > 1),
        Limit("dtype of x", lambda a: a["x"][0].dtype, one_of=FLOATS),
        _true(
            "a list of weights is not float32",
            lambda a: a["group_type"] == 2 or a["weight"][0].dim() == 3 or a["x"][0].dtype in HALVES,
        ),
        Limit("last dimension of x", lambda a: _inner(a["x"][0]), at_most=65535),
        Limit("last dimension of a weight", lambda a: _inner(a["weight"][0]), at_most=65535),
        _true("x is not transposed, except to split k", lambda a: (a["group_type"] == 2) != a["x"][0].is_contiguous()),
    ),
    "npu_scatter_pa_kv_cache": (
        *_contiguous("key", "value", "key_cache", "value_cache", "slot_mapping"),
        _dtype("slot_mapping", (torch.int32, torch.int64)),
        _true("key has the dtype of the cache", lambda a: a["key"].dtype == a["key_cache"].dtype),
        Limit("cache_mode of a cache in ND", lambda a: a["cache_mode"], one_of=(None, "Norm")),
    ),
    "npu_fused_infer_attention_score": (
        _dtype("query", HALVES),
        *_contiguous("query", "key", "value"),
        _dtype("block_table", (torch.int32,)),
        _true("key and value have one shape", lambda a: a["key"].shape == a["value"].shape),
        Limit("sequences", lambda a: a["query"].shape[0], at_most=65536),
        Limit("heads", lambda a: a["num_heads"], at_most=256),
        Limit("heads that share a key", _sharing_heads, at_most=64),
        Limit("heads over latents", _if_latents(lambda a: a["num_heads"]), one_of=(None, *(1 << n for n in range(8)))),
        Limit(
            "channels of latents, rotated channels",
            _if_latents(lambda a: (a["query"].shape[-1], a["query_rope"].shape[-1])),
            one_of=(None, (512, 64)),
        ),
        Limit("channels", lambda a: a["query"].shape[-1], at_most=512, multiple_of=8),
        Limit("block size", lambda a: a["block_size"], at_least=16, at_most=512, multiple_of=16),
    ),
    "npu_transpose_batchmatmul": (
        _dtype("input"),
        Limit("matrices", lambda a: len(a["weight"]), at_least=1, at_most=65535),
        Limit("inner channels", lambda a: a["weight"].shape[1], multiple_of=16),
        Limit("channels of the result", lambda a: a["weight"].shape[2], at_most=65535, multiple_of=16),
        Limit(
            "inner channels, of all matrices where rows are turned",
            lambda a: a["input"].shape[2] * (a["input"].shape[1] if a["perm_x1"][0] == 1 else 1),
            at_most=65535,
        ),
    ),
    "npu_fusion_attention": (
        _dtype("query"),
        _true("key and value have one shape", lambda a: a["key"].shape == a["value"].shape),
        Limit("tokens", lambda a: a["query"].shape[0], at_most=1 << 20),
        Limit("sequences", lambda a: len(a["actual_seq_qlen"]), at_least=1, at_most=MAX_PACKED_SEQUENCES),
        Limit("heads", lambda a: a["head_num"], at_most=256),
        Limit("heads modulo those of keys", lambda a: a["head_num"] % a["key"].shape[1], one_of=(0,)),
        Limit("channels", lambda a: a["query"].shape[-1], at_most=768),
    ),
    "npu_apply_adam_w.out": (_dtype("grad"), *_contiguous("grad", "var", "m", "v")),
    "grouped_mm": (
        Limit("dtype of mat_a", lambda a: a["mat_a"].dtype, one_of=(torch.bfloat16,), source=GROUPED_MM),
        Limit("bytes of mat_a's rows", lambda a: _row_bytes(a["mat_a"]), multiple_of=16, source=GROUPED_MM),
        Limit("bytes of mat_b's rows", lambda a: _row_bytes(a["mat_b"]), multiple_of=16, source=GROUPED_MM),
    ),
    "varlen_attn": (
        Limit("dtype of query", lambda a: a["query"].dtype, one_of=HALVES, source=FLASH),
        Limit(
            "tokens of a page",
            lambda a: 0 if a["block_table"] is None else a["key"].shape[1],
            multiple_of=CUDA_PAGE,
            source=FLASH,
        ),
        Limit("channels", lambda a: a["query"].shape[-1], at_most=256, multiple_of=8, source=FLASH),
    ),
}
"""Operator → its limits: of `torch.ops.npu` by the schema's name, of `torch` by the function's."""


def _inner(matrix: Tensor) -> int:
    """Return the size of the dimension that is contiguous in memory."""
    return matrix.shape[-1] if matrix.stride(-1) == 1 else matrix.shape[-2]


def _row_bytes(matrix: Tensor) -> int:
    """Return the bytes between rows of the last two dimensions, which one of them lies along."""
    return max(matrix.stride()[-2:]) * matrix.element_size()


def rows_of_buffer(ranks: int, local_experts: int, top_k: int, hidden: int) -> int:
    """Return for how many rows of each rank the buffer of a communicator suffices (`npu_moe_distribute_combine_v2`)."""

    def aligned(num_bytes: int) -> int:
        return -(-num_bytes // 512) * 512

    bytes_of_row = 2 * (local_experts * ranks * aligned(2 * hidden + 64) + top_k * aligned(2 * hidden))
    return (int(os.environ.get("HCCL_BUFFSIZE", HCCL_BUFFER_MB)) << 20) // bytes_of_row


def beyond(operator: str, arguments: Arguments) -> list[str]:
    """Return what a call has beyond the operator's limits; empty if nothing."""
    return [message for limit in LIMITS[operator] if (message := limit.broken_by(arguments)) is not None]


def arguments_of(operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Return the arguments of a call of an `OpOverload` by name, with the schema's defaults."""
    named: dict[str, Any] = {}
    for place, argument in enumerate(operator._schema.arguments):
        default = argument.default_value if argument.has_default_value() else None
        named[argument.name] = args[place] if place < len(args) else kwargs.get(argument.name, default)
    return named

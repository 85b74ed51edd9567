"""Stand in for `triton_attention` and `triton_experts` of `fusion.npu.operators` where launches are counted: the same
functions, of which each is one operation, composed on the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch

from fusion.npu.operators.plain import Plain

PLAIN, TOKENS = Plain(), 64
Tensors = tuple[torch.Tensor, torch.Tensor]


class SortedRows(NamedTuple):
    sources: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor


@torch.library.custom_op("launches::add_rms_norm", mutates_args=())
def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> Tensors:
    return PLAIN.add_rms_norm(x, residual, weight, eps)


def norm_rope(qkv, q_norm, k_norm, cos, sin, kv_heads, eps):
    return _norm_rope(qkv, kv_heads)


@torch.library.custom_op("launches::norm_rope", mutates_args=())
def _norm_rope(qkv: torch.Tensor, kv_heads: int) -> Tensors:
    return qkv[:, : -2 * kv_heads].clone(), qkv[:, -2 * kv_heads : -kv_heads].clone()


def store(pool, slots, keys, values, repeated):
    _store(pool, keys)


@torch.library.custom_op("launches::store", mutates_args=("pool",))
def _store(pool: torch.Tensor, keys: torch.Tensor) -> None:
    pass


def attend(q, keys, values, blocks, lengths, longest, scale, *, invariant):
    return _attend(q)


@torch.library.custom_op("launches::attend_and_join", mutates_args=())
def _attend(q: torch.Tensor) -> torch.Tensor:
    return q.clone()


def gate(logits, top_k, *, normalise):
    return _gate(logits, top_k, normalise)


@torch.library.custom_op("launches::gate", mutates_args=())
def _gate(logits: torch.Tensor, top_k: int, normalise: bool) -> Tensors:
    gating = SimpleNamespace(top_k=top_k, normalise=normalise, scores="softmax", groups=1, scale=1.0, plain=True)
    return PLAIN.gate(logits, gating, None)  # type: ignore[arg-type]


def route(experts, count, start=0):
    return SortedRows(*_route(experts, count, start))


@torch.library.custom_op("launches::route", mutates_args=())
def _route(
    experts: torch.Tensor, count: int, start: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    turned = (experts - start) % count
    rows, k = experts.shape
    sources, order, counts = PLAIN.permute(torch.arange(rows).to(experts).unsqueeze(1), turned, count)
    places = torch.empty_like(order).index_copy_(0, order, torch.arange(rows * k).to(order))
    return sources.squeeze(1).to(torch.int32), places.to(torch.int32), counts, counts.cumsum(0, dtype=torch.int32)


@torch.library.custom_op("launches::gather", mutates_args=())
def gather(x: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
    return x.index_select(0, sources)


@torch.library.custom_op("launches::swiglu", mutates_args=())
def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    return PLAIN.swiglu(gate_up)


def unroute(y, places, weights, ends=None):
    return _unroute(y, places, weights)


@torch.library.custom_op("launches::unroute", mutates_args=())
def _unroute(y: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    y_NkD = y.nan_to_num().index_select(0, places).unflatten(0, weights.shape)
    return torch.bmm(weights.to(y.dtype).unsqueeze(1), y_NkD).squeeze(1)

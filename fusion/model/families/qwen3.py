"""Qwen3 and Qwen3-MoE (arXiv 2505.09388): RMS norms of every query and key head."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusion.model.families.base import (
    WINDOW,
    Defaults,
    Family,
    grouped_query,
    num_experts,
    stepped_layers,
    write_stepped_layers,
)
from fusion.model.hf_fields import Fields
from fusion.model.spec import Dense, GroupedQuery, LayerSpec, Router, Sparse

if TYPE_CHECKING:
    from fusion.model.config import ModelConfig

HEAD_DIM = 128
"""Of a dense model whose config has no `head_dim`; Qwen3MoeConfig has no such field, nor such a default."""


def _attention(fields: Fields, head_dim: int | None = None) -> GroupedQuery:
    bias = fields.flag("attention_bias", False)
    return grouped_query(fields, head_dim=head_dim, qk_norm="head", qkv_bias=bias, out_bias=bias)


def _read_dense(fields: Fields) -> tuple[LayerSpec, ...]:
    attention = _attention(fields, None if fields.has("head_dim") else HEAD_DIM)
    return (LayerSpec(attention, Dense(fields.size("intermediate_size"))),) * fields.size("num_hidden_layers")


def _read_sparse(fields: Fields) -> tuple[LayerSpec, ...]:
    router = Router(fields.size("num_experts_per_tok"), normalise=fields.flag("norm_topk_prob", False))
    experts = Sparse(num_experts(fields), fields.size("moe_intermediate_size"), router)
    return stepped_layers(fields, _attention(fields), experts)


def _write_dense(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.grouped_query.qkv_bias}


def _write_sparse(config: ModelConfig) -> dict[str, Any]:
    experts = config.experts
    return _write_dense(config) | {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.router.top_k,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": experts.router.normalise,
        **write_stepped_layers(config),
    }


QWEN3 = Family("qwen3", "Qwen3", _read_dense, _write_dense, inert=WINDOW, classifier=True)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    _read_sparse,
    _write_sparse,
    defaults=Defaults(router_aux_coef=0.001),
    inert=WINDOW,
    router_aux_field="router_aux_loss_coef",
    classifier=True,
)

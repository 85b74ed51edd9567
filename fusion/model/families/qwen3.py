"""Qwen3 and Qwen3-MoE (arXiv 2505.09388): RMS norms of every query and key head."""

from fusion.model.families.base import (
    WINDOW,
    Defaults,
    Family,
    equal_layers,
    grouped_query,
    num_experts,
    stepped_layers,
)
from fusion.model.hf_fields import Fields
from fusion.model.spec import Dense, GroupedQuery, LayerSpec, Router, Sparse

HEAD_DIM = 128
"""Channels of a head where the config of a dense model has no `head_dim`; Qwen3MoeConfig has no such default."""


def _attention(fields: Fields, head_dim: int | None = None) -> GroupedQuery:
    bias = fields.flag("attention_bias", False)
    return grouped_query(fields, head_dim=head_dim, qk_norm="head", qkv_bias=bias, out_bias=bias)


def _read_dense(fields: Fields) -> tuple[LayerSpec, ...]:
    attention = _attention(fields, None if fields.has("head_dim") else HEAD_DIM)
    return equal_layers(fields, attention, Dense(fields.size("intermediate_size")))


def _read_sparse(fields: Fields) -> tuple[LayerSpec, ...]:
    router = Router(fields.size("num_experts_per_tok"), normalise=fields.flag("norm_topk_prob", False))
    experts = Sparse(num_experts(fields), fields.size("moe_intermediate_size"), router)
    return stepped_layers(fields, _attention(fields), experts)


QWEN3 = Family("qwen3", "Qwen3", _read_dense, "attention_bias", inert=WINDOW, classifier=True)
QWEN3_MOE = Family(
    "qwen3_moe",
    "Qwen3Moe",
    _read_sparse,
    "attention_bias num_experts num_experts_per_tok moe_intermediate_size norm_topk_prob decoder_sparse_step "
    "mlp_only_layers",
    defaults=Defaults(router_aux_coef=0.001),
    inert=WINDOW,
    router_aux_field="router_aux_loss_coef",
    classifier=True,
)

"""Llama (arXiv 2307.09288) and Qwen2 (arXiv 2407.10671): dense layers without norms of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusion.model.families.base import WINDOW, Defaults, Family, grouped_query
from fusion.model.hf_fields import Fields
from fusion.model.spec import Dense, LayerSpec

if TYPE_CHECKING:
    from fusion.model.config import ModelConfig


def _read_llama(fields: Fields) -> tuple[LayerSpec, ...]:
    bias = fields.flag("attention_bias", False)
    attention = grouped_query(fields, qkv_bias=bias, out_bias=bias, max_positions=2048, kv_heads_optional=True)
    return (LayerSpec(attention, Dense(fields.size("intermediate_size"))),) * fields.size("num_hidden_layers")


def _read_qwen2(fields: Fields) -> tuple[LayerSpec, ...]:
    attention = grouped_query(fields, qkv_bias=True)
    return (LayerSpec(attention, Dense(fields.size("intermediate_size"))),) * fields.size("num_hidden_layers")


def _write_llama(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.grouped_query.out_bias, "mlp_bias": False}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return {"use_sliding_window": False}


LLAMA = Family(
    "llama",
    "Llama",
    _read_llama,
    _write_llama,
    defaults=Defaults(max_positions=2048, eos_token_id=2),
    only={"mlp_bias": (False,)},
    inert=frozenset({"pretraining_tp"}),
)
QWEN2 = Family("qwen2", "Qwen2", _read_qwen2, _write_qwen2, inert=WINDOW)

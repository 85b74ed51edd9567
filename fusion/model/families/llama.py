"""Llama (arXiv 2307.09288) and Qwen2 (arXiv 2407.10671): dense layers without norms of queries and keys."""

from fusion.model.families.base import WINDOW, Defaults, Family, equal_layers, grouped_query
from fusion.model.hf_fields import Fields
from fusion.model.spec import Dense, LayerSpec


def _read_llama(fields: Fields) -> tuple[LayerSpec, ...]:
    bias = fields.flag("attention_bias", False)
    attention = grouped_query(fields, qkv_bias=bias, out_bias=bias, max_positions=2048, kv_heads_optional=True)
    return equal_layers(fields, attention, Dense(fields.size("intermediate_size")))


def _read_qwen2(fields: Fields) -> tuple[LayerSpec, ...]:
    attention = grouped_query(fields, qkv_bias=True)
    return equal_layers(fields, attention, Dense(fields.size("intermediate_size")))


LLAMA = Family(
    "llama",
    "Llama",
    _read_llama,
    "attention_bias mlp_bias",
    defaults=Defaults(max_positions=2048, eos_token_id=2),
    only={"mlp_bias": (False,)},
    inert=frozenset({"pretraining_tp"}),
)
QWEN2 = Family("qwen2", "Qwen2", _read_qwen2, "use_sliding_window", inert=WINDOW)

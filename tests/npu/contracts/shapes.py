"""Shapes with which calls are checked: the models of recipes/shapes, and one of each family that has none there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from fusion.model import ModelConfig

SHAPES = Path(__file__).parents[3] / "recipes/shapes"
OTHERS: dict[str, dict[str, Any]] = {
    "llama_31_8b": dict(
        model_type="llama",
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
    "mixtral_8x7b": dict(
        model_type="mixtral",
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen15_moe_a27b": dict(
        model_type="qwen2_moe",
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=24,
        num_attention_heads=16,
        num_key_value_heads=16,
        num_experts=60,
        num_experts_per_tok=4,
        moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632,
    ),
    "glm_45_air": dict(
        model_type="glm4_moe",
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=10944,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        partial_rotary_factor=0.5,
        attention_bias=True,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        norm_topk_prob=True,
        first_k_dense_replace=1,
    ),
    "deepseek_v2": dict(
        model_type="deepseek_v2",
        vocab_size=102400,
        hidden_size=5120,
        intermediate_size=12288,
        num_hidden_layers=60,
        num_attention_heads=128,
        num_key_value_heads=128,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        n_routed_experts=160,
        n_shared_experts=2,
        num_experts_per_tok=6,
        moe_intermediate_size=1536,
        topk_method="group_limited_greedy",
        n_group=8,
        topk_group=3,
        routed_scaling_factor=16.0,
        first_k_dense_replace=1,
    ),
}
"""Fields of published config.json files"""


def shapes() -> dict[str, ModelConfig]:
    """Return all models by name."""
    files = {path.stem: yaml.safe_load(path.read_text())["config"] for path in sorted(SHAPES.glob("*.yaml"))}
    return {name: ModelConfig.from_hf(fields, name) for name, fields in (files | OTHERS).items()}

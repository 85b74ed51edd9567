"""Configs as their authors published them are read, and describe models of the published size."""

from __future__ import annotations

import math
from typing import Any

import pytest

from fusion.model import ModelConfig, global_params
from fusion.model.spec import Latent

V3 = dict(
    model_type="deepseek_v3",
    architectures=["DeepseekV3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    auto_map={"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
    aux_loss_alpha=0.001,
    bos_token_id=0,
    eos_token_id=1,
    ep_size=1,
    first_k_dense_replace=3,
    hidden_act="silu",
    hidden_size=7168,
    initializer_range=0.02,
    intermediate_size=18432,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=128,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=128,
    num_nextn_predict_layers=0,
    pretraining_tp=1,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-06,
    rope_scaling=dict(
        beta_fast=32,
        beta_slow=1,
        factor=40,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
        type="yarn",
    ),
    rope_theta=10000,
    routed_scaling_factor=2.5,
    scoring_func="sigmoid",
    seq_aux=True,
    tie_word_embeddings=False,
    topk_group=4,
    topk_method="noaux_tc",
    torch_dtype="bfloat16",
    transformers_version="4.33.1",
    use_cache=True,
    v_head_dim=128,
    vocab_size=129280,
)
"""The fields of the published config, without its quantization and its predictor of further tokens"""
V2_LITE = V3 | dict(
    model_type="deepseek_v2",
    architectures=["DeepseekV2ForCausalLM"],
    first_k_dense_replace=1,
    hidden_size=2048,
    intermediate_size=10944,
    moe_intermediate_size=1408,
    n_group=1,
    n_routed_experts=64,
    n_shared_experts=2,
    norm_topk_prob=False,
    num_attention_heads=16,
    num_experts_per_tok=6,
    num_hidden_layers=27,
    num_key_value_heads=16,
    q_lora_rank=None,
    rope_scaling=V3["rope_scaling"] | dict(mscale=0.707, mscale_all_dim=0.707),
    routed_scaling_factor=1.0,
    scoring_func="softmax",
    topk_group=1,
    topk_method="greedy",
    vocab_size=102400,
)
PANGU = dict(
    model_type="pangu_ultra_moe",
    vocab_size=153600,
    hidden_size=7680,
    intermediate_size=18432,
    moe_intermediate_size=2048,
    num_hidden_layers=61,
    num_attention_heads=128,
    sandwich_norm=True,
    num_dense_layers=3,
    num_routed_experts=256,
    num_mtp_layers=0,
)


@pytest.mark.parametrize(
    ("fields", "billions", "scale"),
    [
        (V3, 671.03, (0.1 * math.log(40) + 1) ** 2),
        (V2_LITE, 15.706, (0.0707 * math.log(40) + 1) ** 2),
        (PANGU, 719.1, 1),
    ],
    ids=["deepseek-v3", "deepseek-v2-lite", "pangu"],
)
def test_published_configs_have_the_published_number_of_parameters(
    fields: dict[str, Any], billions: float, scale: float
) -> None:
    config = ModelConfig.from_hf(fields)
    assert sum(map(math.prod, global_params(config).values())) / 1e9 == pytest.approx(billions, rel=1e-4)
    attention = config.attention
    assert isinstance(attention, Latent)
    assert attention.softmax_scale == pytest.approx(192**-0.5 * scale) and attention.rotary.attention_factor == 1.0
    assert attention.cached_width == 576

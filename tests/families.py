"""Tiny models of every family: fixed ones, and random ones for property tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fusion.model import ModelConfig
from fusion.model.families.pangu import OTHER_NAMES

SIZES = dict(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.2,
    max_position_embeddings=1024,
    eos_token_id=1,
    pad_token_id=0,
)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2)
YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64)
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
LATENT = dict(
    num_hidden_layers=3,
    num_key_value_heads=4,
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    moe_intermediate_size=32,
    num_experts_per_tok=2,
)
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": dict(head_dim=16, tie_word_embeddings=True),
    "qwen3_moe": dict(head_dim=16, moe_intermediate_size=32, mlp_only_layers=[1], num_hidden_layers=3, **EXPERTS),
    "llama": dict(head_dim=16, attention_bias=True, rope_parameters=YARN),
    "qwen2": dict(tie_word_embeddings=True),
    "mixtral": dict(num_local_experts=8, num_experts_per_tok=2, num_hidden_layers=1),
    "olmoe": dict(EXPERTS),
    "qwen2_moe": dict(moe_intermediate_size=32, shared_expert_intermediate_size=40, **EXPERTS),
    "glm4_moe": dict(
        num_hidden_layers=3,
        head_dim=16,
        attention_bias=True,
        use_qk_norm=True,
        moe_intermediate_size=32,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        num_nextn_predict_layers=0,
    ),
    "deepseek_v2": dict(
        LATENT,
        q_lora_rank=None,
        first_k_dense_replace=1,
        n_routed_experts=8,
        topk_method="group_limited_greedy",
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
    ),
    "deepseek_v3": dict(
        LATENT,
        num_hidden_layers=4,
        n_routed_experts=16,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5),
        num_nextn_predict_layers=0,
    ),
    "pangu_ultra_moe": dict(
        num_hidden_layers=4,
        num_key_value_heads=4,
        attention_q_lora_dim=24,
        attention_kv_lora_dim=16,
        attention_qk_dim=12,
        attention_qk_rope_dim=8,
        attention_v_dim=12,
        moe_intermediate_size=32,
        num_dense_layers=1,
        num_routed_experts=8,
        num_shared_experts=1,
        num_experts_per_tok=2,
        sandwich_norm=True,
        rope_theta=10000.0,
        num_mtp_layers=0,
    ),
}
"""model_type → the fields in which its tiny model differs from `SIZES`; together they use every kind of layer."""
MLA = ("deepseek_v2", "deepseek_v3", "pangu_ultra_moe")
"""Families with latent attention"""
PANGU_NAMES = {name: other for other, name in OTHER_NAMES.items()}


def family_fields(kind: str, **changes: Any) -> dict[str, Any]:
    """The fields of a `config.json`."""
    return SIZES | KINDS[kind] | changes | {"model_type": kind}


def family_hf(fields: dict[str, Any]) -> Any:
    """The transformers model of these fields with fixed weights, none of which is its initial 0 or 1."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from tests import pangu_reference  # noqa: F401, registers it

    fields = dict(fields)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith(("bias", "e_score_correction_bias")):
                tensor.uniform_(-0.5, 0.5)
            elif name.endswith("gate.weight"):
                tensor.normal_(std=0.3)
    return model


def family_checkpoint(folder: str | Path, kind: str, **changes: Any) -> str:
    """Writes `family_hf` to a folder and returns it."""
    family_hf(family_fields(kind, **changes)).save_pretrained(folder)
    return str(folder)


def with_predictors(fields: dict[str, Any], count: int) -> dict[str, Any]:
    """The fields of a config with so many layers that predict further tokens, under the family's name for it."""
    name = "num_mtp_layers" if fields["model_type"] == "pangu_ultra_moe" else "num_nextn_predict_layers"
    return fields | {name: count}


def add_predictors(folder: str | Path, count: int = 1) -> dict[str, Any]:
    """Adds layers that predict further tokens to a checkpoint, as DeepSeek-V3 and GLM-4.5 store them: each is a copy of
    the last layer with other values, and what is around it. Returns the tensors of the whole checkpoint."""
    import torch
    from safetensors.torch import load_file, save_file

    folder, random = Path(folder), torch.Generator().manual_seed(11)
    fields, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    last, hidden = fields["num_hidden_layers"] - 1, fields["hidden_size"]
    vocabulary = (fields["vocab_size"], hidden)
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for layer in range(last + 1, last + 1 + count):
        around = dict.fromkeys(("enorm", "hnorm", "shared_head.norm"), (hidden,))
        around |= {"eh_proj": (hidden, 2 * hidden), "shared_head.head": vocabulary, "embed_tokens": vocabulary}
        new = {f"model.layers.{layer}.{name}.weight": shape for name, shape in around.items()}
        start, renamed = f"model.layers.{last}.", f"model.layers.{layer}."
        new |= {name.replace(start, renamed): shape for name, shape in shapes.items() if name.startswith(start)}
        tensors |= {name: torch.randn(tuple(shape), generator=random) for name, shape in new.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(with_predictors(fields, count)))
    return tensors


def family_config(kind: str, **changes: Any) -> ModelConfig:
    return ModelConfig.from_hf(family_fields(kind, **changes))


@st.composite
def random_fields(draw: st.DrawFn, kind: str) -> dict[str, Any]:
    """Fields of a random tiny model of a family."""
    layers, heads, kv_heads = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2]))
    changes: dict[str, Any] = dict(
        hidden_size=draw(st.sampled_from([16, 32])),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=draw(st.booleans()),
    )
    if kind in MLA:
        changes |= dict(
            num_key_value_heads=heads,
            q_lora_rank=draw(st.sampled_from([None, 8, 24])),
            kv_lora_rank=draw(st.sampled_from([8, 16])),
            qk_nope_head_dim=draw(st.sampled_from([4, 12])),
            qk_rope_head_dim=draw(st.sampled_from([4, 8])),
            v_head_dim=draw(st.sampled_from([4, 10, 24])),
        )
    elif kind not in ("olmoe", "qwen2", "qwen2_moe"):
        changes["head_dim"] = draw(st.sampled_from([8, 16]))
    rotary = draw(st.sampled_from(["default", "linear", "yarn", "yarn-scaled", "llama3"]))
    base = dict(rope_theta=draw(st.sampled_from([100.0, 10000.0])))
    changes["rope_parameters"] = {
        "default": base | dict(rope_type="default"),
        "linear": base | dict(rope_type="linear", factor=2.0),
        "yarn": YARN | base,
        "yarn-scaled": YARN | base | dict(mscale=1.0, mscale_all_dim=0.5, beta_fast=16, truncate=False),
        "llama3": LLAMA3 | base,
    }[rotary]
    if kind == "pangu_ultra_moe":
        changes["rope_theta"] = changes.pop("rope_parameters")["rope_theta"]
    if kind in ("qwen3", "qwen3_moe", "llama", "olmoe", "glm4_moe"):
        changes["attention_bias"] = draw(st.booleans())
    if kind == "qwen2_moe":
        changes["qkv_bias"] = draw(st.booleans())
    if kind not in ("llama", "qwen2", "qwen3"):
        changes["num_experts_per_tok"] = draw(st.integers(1, 3))
    if kind in ("qwen3_moe", "olmoe", "qwen2_moe", "glm4_moe", "deepseek_v3", "pangu_ultra_moe"):
        changes["norm_topk_prob"] = draw(st.booleans())
    if kind in ("qwen3_moe", "qwen2_moe"):
        dense = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
        changes |= dict(mlp_only_layers=sorted(dense), decoder_sparse_step=1)
    if kind == "glm4_moe" or kind in MLA:
        groups, top_groups = draw(st.sampled_from([(1, 1), (2, 1), (4, 2)]))
        changes |= dict(
            n_group=groups,
            topk_group=top_groups,
            first_k_dense_replace=draw(st.integers(0, layers - 1)),
            n_shared_experts=draw(st.integers(1, 2)),
            routed_scaling_factor=draw(st.sampled_from([1.0, 2.5])),
        )
    if kind == "glm4_moe":
        changes["use_qk_norm"] = draw(st.booleans())
        changes["rope_parameters"]["partial_rotary_factor"] = draw(st.sampled_from([0.5, 1.0]))
    if kind == "pangu_ultra_moe":
        changes = {PANGU_NAMES.get(name, name): value for name, value in changes.items() if "group" not in name}
        changes["sandwich_norm"] = draw(st.booleans())
    if kind == "deepseek_v2":
        changes["topk_method"] = draw(st.sampled_from(["greedy", "group_limited_greedy"]))
    if kind == "deepseek_v3":
        changes["rope_interleave"] = draw(st.booleans())
    return family_fields(kind, **changes)

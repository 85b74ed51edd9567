"""Read and write what families with latent attention share, under DeepSeek's names: the attention itself, leading dense
layers, routed and shared experts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fusion.model.families.base import mixed_layers
from fusion.model.hf_fields import Fields
from fusion.model.hf_rotary import read_rotary, softmax_scale
from fusion.model.spec import Latent, LayerSpec, Router, SharedExpert, Sparse

if TYPE_CHECKING:
    from fusion.model.config import ModelConfig

Q_RANK = 1536
"""Of a config without `q_lora_rank`; null is none"""
REMOTE = frozenset("auto_map ep_size pretraining_tp seq_aux aux_loss_alpha".split())
"""Fields of published configs that change nothing: of the authors' own code, and of its training loss"""


def read_latent(
    fields: Fields, *, max_positions: int, theta: float = 10000.0, interleaved: bool = True, norm_eps: float = 1e-6
) -> Latent:
    """Read latent attention.

    Args:
        max_positions, theta: what is assumed where none is stated.
        interleaved: whether channels 2i and 2i + 1 are rotated together.
        norm_eps: of the norms of the latents, which no field states.

    Raises:
        ValueError: a field (named) that is not supported.
    """
    heads = fields.size("num_attention_heads")
    kv_heads = fields.optional_size("num_key_value_heads") or heads
    if kv_heads != heads:
        raise ValueError(
            f"{fields.place}: num_attention_heads={heads} and num_key_value_heads={kv_heads} differ; expected a "
            "key/value head for each query head of latent attention"
        )
    nope, rope = fields.size("qk_nope_head_dim", 128), fields.size("qk_rope_head_dim", 64)
    if rope % 2:
        raise ValueError(f"{fields.place}: {fields.stated_as('qk_rope_head_dim')}={rope}; expected an even number")
    for name, derived in (("head_dim", rope), ("qk_head_dim", nope + rope)):
        stated = fields.optional_size(name)
        if stated is not None and stated != derived:
            fields.refuse(name, stated, (derived,))
    positions = fields.size("max_position_embeddings", max_positions)
    rotary = replace(read_rotary(fields, rope, max_positions=positions, theta=theta), interleaved=interleaved)
    return Latent(
        num_heads=heads,
        kv_rank=fields.size("kv_lora_rank", 512),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=fields.size("v_head_dim", 128),
        rotary=rotary,
        q_rank=fields.optional_size("q_lora_rank") if fields.has("q_lora_rank") else Q_RANK,
        softmax_scale=softmax_scale(rotary, nope + rope),
        norm_eps=norm_eps,
    )


def read_layers(
    fields: Fields, attention: Latent, router: Router, *, shared: int, dense: int, sandwich: bool = False
) -> tuple[LayerSpec, ...]:
    """Return dense layers up to `first_k_dense_replace`, then sparse ones with a shared expert.

    Args:
        shared, dense: the number of shared experts, which are one SwiGLU, and of dense layers, where none is stated.
    """
    width, num_dense = fields.size("moe_intermediate_size"), fields.count("first_k_dense_replace", dense)
    experts = Sparse(
        fields.size("n_routed_experts"), width, router, SharedExpert(width * fields.size("n_shared_experts", shared))
    )
    named = f"{fields.stated_as('first_k_dense_replace')}={num_dense}"
    layers = mixed_layers(fields, attention, experts, named=named, is_sparse=lambda layer: layer >= num_dense)
    return tuple(replace(layer, sandwich=sandwich) for layer in layers)


def write_latent(config: ModelConfig) -> dict[str, Any]:
    """Return the fields that `read_latent` and `read_layers` read."""
    attention, experts = config.attention, config.experts
    assert isinstance(attention, Latent) and experts.shared is not None
    return {
        "q_lora_rank": attention.q_rank,
        "kv_lora_rank": attention.kv_rank,
        "qk_nope_head_dim": attention.nope_dim,
        "qk_rope_head_dim": attention.rope_dim,
        "v_head_dim": attention.value_dim,
        "attention_bias": False,
        "first_k_dense_replace": config.num_layers - config.num_sparse_layers,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared.width // experts.width,
        "moe_intermediate_size": experts.width,
        "num_experts_per_tok": experts.router.top_k,
        "norm_topk_prob": experts.router.normalise,
        "routed_scaling_factor": experts.router.scale,
    }

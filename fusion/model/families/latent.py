"""Read latent attention, under DeepSeek's names."""

from dataclasses import replace

from fusion.model.hf_fields import Fields
from fusion.model.hf_rotary import read_rotary, softmax_scale
from fusion.model.spec import Latent

Q_RANK = 1536
"""Rank of queries of a config without `q_lora_rank`; null is none"""
REMOTE = frozenset("auto_map ep_size pretraining_tp seq_aux aux_loss_alpha".split())
"""Fields of published configs that change nothing: of the authors' own code, and of its training loss"""
STATES = (
    "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim attention_bias first_k_dense_replace "
    "n_routed_experts n_shared_experts moe_intermediate_size num_experts_per_tok norm_topk_prob routed_scaling_factor"
)
"""Fields that all families with latent attention state"""


def read_latent(fields: Fields, *, max_positions: int, theta: float = 10000.0, interleaved: bool = True) -> Latent:
    """Read latent attention. ``max_positions``, ``theta``: what is assumed where none is stated. ``interleaved``:
    whether channels 2i and 2i + 1 are rotated together.
    Raise ValueError: a field (named) that is not supported."""
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
    )

"""OLMoE (arXiv 2409.02060): all layers sparse; RMS norms of all query heads, and of all key heads, at once."""

from fusion.model.families.base import Defaults, Family, equal_layers, grouped_query, num_experts
from fusion.model.hf_fields import Fields
from fusion.model.spec import LayerSpec, Router, Sparse

POSITIONS = 4096


def _read(fields: Fields) -> tuple[LayerSpec, ...]:
    bias = fields.flag("attention_bias", False)
    attention = grouped_query(
        fields, qk_norm="projection", qkv_bias=bias, out_bias=bias, max_positions=POSITIONS, kv_heads_optional=True
    )
    derived = fields.size("hidden_size") // attention.num_heads
    if attention.head_dim != derived:  # transformers sizes the norms by it
        fields.refuse("head_dim", attention.head_dim, (derived,))
    router = Router(fields.size("num_experts_per_tok", 8), normalise=fields.flag("norm_topk_prob", False))
    experts = Sparse(num_experts(fields), fields.size("intermediate_size"), router)
    return equal_layers(fields, attention, experts)


OLMOE = Family(
    "olmoe",
    "Olmoe",
    _read,
    "attention_bias num_experts num_experts_per_tok norm_topk_prob clip_qkv",
    defaults=Defaults(
        rms_norm_eps=1e-5, max_positions=POSITIONS, router_aux_coef=0.01, eos_token_id=50279, pad_token_id=1
    ),
    router_aux_field="router_aux_loss_coef",
    only={"clip_qkv": (None,)},
)

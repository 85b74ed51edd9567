"""Qwen2-MoE and Qwen1.5-MoE (arXiv 2407.10671): a gated shared expert beside the routed ones; biases of q, k and v."""

from fusion.model.families.base import WINDOW, Defaults, Family, grouped_query, num_experts, stepped_layers
from fusion.model.hf_fields import Fields
from fusion.model.spec import LayerSpec, Router, SharedExpert, Sparse


def _read(fields: Fields) -> tuple[LayerSpec, ...]:
    router = Router(fields.size("num_experts_per_tok"), normalise=fields.flag("norm_topk_prob", False))
    shared = SharedExpert(fields.size("shared_expert_intermediate_size"), gated=True)
    experts = Sparse(num_experts(fields), fields.size("moe_intermediate_size"), router, shared)
    attention = grouped_query(fields, qkv_bias=fields.flag("qkv_bias", True))
    return stepped_layers(fields, attention, experts)


QWEN2_MOE = Family(
    "qwen2_moe",
    "Qwen2Moe",
    _read,
    "qkv_bias use_sliding_window num_experts num_experts_per_tok moe_intermediate_size "
    "shared_expert_intermediate_size norm_topk_prob decoder_sparse_step mlp_only_layers",
    defaults=Defaults(router_aux_coef=0.001),
    inert=WINDOW,
    router_aux_field="router_aux_loss_coef",
)

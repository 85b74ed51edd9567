"""GLM-4.5 (arXiv 2508.06471): leading dense layers, a router with a correction bias and groups, a shared expert, and
rotation of half of each head's channels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusion.model.families.base import OTHER_PREDICTORS, PREDICTORS, Defaults, Family, grouped_query, mixed_layers
from fusion.model.hf_fields import Fields
from fusion.model.hf_rotary import write_rotary
from fusion.model.spec import LayerSpec, Names, Router, SharedExpert, Sparse

if TYPE_CHECKING:
    from fusion.model.config import ModelConfig

POSITIONS = 131072


def _read(fields: Fields) -> tuple[LayerSpec, ...]:
    attention = grouped_query(
        fields,
        qk_norm="head" if fields.flag("use_qk_norm", False) else "none",
        qkv_bias=fields.flag("attention_bias", False),
        partial=0.5,
        max_positions=POSITIONS,
    )
    router = Router(
        fields.size("num_experts_per_tok"),
        scores="sigmoid",
        float32=True,
        normalise=fields.flag("norm_topk_prob", True),
        correction=True,
        groups=fields.size("n_group", 1),
        top_groups=fields.size("topk_group", 1),
        scale=fields.positive("routed_scaling_factor", 1.0),
    )
    width = fields.size("moe_intermediate_size")
    shared = SharedExpert(width * fields.size("n_shared_experts", 1))
    experts = Sparse(fields.size("n_routed_experts"), width, router, shared)
    num_dense = fields.count("first_k_dense_replace", 1)
    named = f"first_k_dense_replace={num_dense}"
    return mixed_layers(fields, attention, experts, named=named, is_sparse=lambda layer: layer >= num_dense)


def _write(config: ModelConfig) -> dict[str, Any]:
    experts, router = config.experts, config.experts.router
    assert experts.shared is not None
    return {
        **write_rotary(config.attention.rotary, config.head_dim, states_share=True),
        "attention_bias": config.grouped_query.qkv_bias,
        "use_qk_norm": config.grouped_query.qk_norm == "head",
        "first_k_dense_replace": config.num_layers - config.num_sparse_layers,
        "n_routed_experts": experts.num_experts,
        "n_shared_experts": experts.shared.width // experts.width,
        "num_experts_per_tok": router.top_k,
        "moe_intermediate_size": experts.width,
        "norm_topk_prob": router.normalise,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "routed_scaling_factor": router.scale,
    }


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4Moe",
    _read,
    _write,
    defaults=Defaults(rms_norm_eps=1e-5, max_positions=POSITIONS),
    names=Names(shared="mlp.shared_experts"),
    renamed={OTHER_PREDICTORS: PREDICTORS},
    predictors_field=PREDICTORS,
)

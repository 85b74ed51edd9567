"""GLM-4.5 (arXiv 2508.06471): leading dense layers, a router with a correction bias and groups, a shared expert, and
rotation of half of each head's channels."""

from fusion.model.families.base import (
    OTHER_PREDICTORS,
    PREDICTORS,
    Defaults,
    Family,
    corrected_router,
    grouped_query,
    layers_after_dense,
)
from fusion.model.hf_fields import Fields
from fusion.model.spec import LayerSpec, Names

POSITIONS = 131072


def _read(fields: Fields) -> tuple[LayerSpec, ...]:
    attention = grouped_query(
        fields,
        qk_norm="head" if fields.flag("use_qk_norm", False) else "none",
        qkv_bias=fields.flag("attention_bias", False),
        partial=0.5,
        max_positions=POSITIONS,
    )
    return layers_after_dense(fields, attention, corrected_router(fields), shared=1, dense=1)


GLM4_MOE = Family(
    "glm4_moe",
    "Glm4Moe",
    _read,
    "attention_bias use_qk_norm first_k_dense_replace n_routed_experts n_shared_experts num_experts_per_tok "
    "moe_intermediate_size norm_topk_prob n_group topk_group routed_scaling_factor",
    defaults=Defaults(rms_norm_eps=1e-5, max_positions=POSITIONS),
    names=Names(shared="mlp.shared_experts"),
    states_rotary_share=True,
    renamed={OTHER_PREDICTORS: PREDICTORS},
    predictors_field=PREDICTORS,
)

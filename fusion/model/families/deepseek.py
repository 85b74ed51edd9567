"""DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437), which Kimi-K2 is too: latent attention, leading
dense layers, shared experts; a softmax router that may be limited to groups, and a sigmoid router with a correction
bias."""

from typing import Any

from fusion.model.families.base import (
    GREEDY,
    GROUP_LIMITED,
    OTHER_PREDICTORS,
    PREDICTORS,
    Defaults,
    Family,
    corrected_router,
    layers_after_dense,
)
from fusion.model.families.latent import REMOTE, STATES, read_latent
from fusion.model.hf_fields import Fields
from fusion.model.spec import LayerSpec, Names, Router

POSITIONS_V2, POSITIONS_V3 = 2048, 4096


def _read_v2(fields: Fields) -> tuple[LayerSpec, ...]:
    method = fields.raw("topk_method") if fields.has("topk_method") else GREEDY
    if method not in (GREEDY, GROUP_LIMITED):
        fields.refuse("topk_method", method, (GREEDY, GROUP_LIMITED))
    groups, top_groups = fields.optional_size("n_group") or 1, fields.optional_size("topk_group") or 1
    router = Router(
        fields.size("num_experts_per_tok"),
        groups=groups if method == GROUP_LIMITED else 1,
        top_groups=top_groups if method == GROUP_LIMITED else 1,
        scale=fields.positive("routed_scaling_factor", 1.0),
        group_scores="best",
        float32=True,
    )
    return layers_after_dense(fields, read_latent(fields, max_positions=POSITIONS_V2), router, shared=2, dense=0)


def _read_v3(fields: Fields) -> tuple[LayerSpec, ...]:
    interleaved = fields.flag("rope_interleave", True)
    router = corrected_router(fields, top_k=8, groups=8, top_groups=4, scale=2.5)
    attention = read_latent(fields, max_positions=POSITIONS_V3, interleaved=interleaved)
    return layers_after_dense(fields, attention, router, shared=1, dense=3)


ONLY: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "moe_layer_freq": (1,)}
NAMES = Names(shared="mlp.shared_experts")
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2",
    _read_v2,
    f"{STATES} topk_method n_group topk_group mlp_bias",
    defaults=Defaults(max_positions=POSITIONS_V2, eos_token_id=2),
    only=ONLY
    | {"norm_topk_prob": (False,), "mlp_bias": (False,), "scoring_func": ("softmax",), "rope_interleave": (True,)},
    inert=REMOTE,
    names=NAMES,
)
DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3",
    _read_v3,
    f"{STATES} n_group topk_group rope_interleave",
    defaults=Defaults(max_positions=POSITIONS_V3, eos_token_id=1),
    only=ONLY | {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    inert=REMOTE,
    names=NAMES,
    renamed={OTHER_PREDICTORS: PREDICTORS},
    predictors_field=PREDICTORS,
)

"""DeepSeek-V2 (arXiv 2405.04434) and DeepSeek-V3 (arXiv 2412.19437), which Kimi-K2 is too: latent attention, leading
dense layers, shared experts; a softmax router that may be limited to groups, and a sigmoid router with a correction
bias."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fusion.model.families.base import OTHER_PREDICTORS, PREDICTORS, Defaults, Family
from fusion.model.families.latent import REMOTE, read_latent, read_layers, write_latent
from fusion.model.hf_fields import Fields
from fusion.model.spec import LayerSpec, Names, Router

if TYPE_CHECKING:
    from fusion.model.config import ModelConfig

POSITIONS_V2, POSITIONS_V3 = 2048, 4096
GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"


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
    return read_layers(fields, read_latent(fields, max_positions=POSITIONS_V2), router, shared=2, dense=0)


def _write_v2(config: ModelConfig) -> dict[str, Any]:
    router = config.experts.router
    return write_latent(config) | {
        "topk_method": GROUP_LIMITED if router.groups > 1 else GREEDY,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "mlp_bias": False,
    }


def _read_v3(fields: Fields) -> tuple[LayerSpec, ...]:
    interleaved = fields.flag("rope_interleave", True)
    router = Router(
        fields.size("num_experts_per_tok", 8),
        scores="sigmoid",
        float32=True,
        normalise=fields.flag("norm_topk_prob", True),
        correction=True,
        groups=fields.size("n_group", 8),
        top_groups=fields.size("topk_group", 4),
        scale=fields.positive("routed_scaling_factor", 2.5),
    )
    attention = read_latent(fields, max_positions=POSITIONS_V3, interleaved=interleaved)
    return read_layers(fields, attention, router, shared=1, dense=3)


def _write_v3(config: ModelConfig) -> dict[str, Any]:
    router = config.experts.router
    return write_latent(config) | {
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "rope_interleave": config.attention.rotary.interleaved,
    }


ONLY: dict[str, tuple[Any, ...]] = {"attention_bias": (False,), "moe_layer_freq": (1,)}
NAMES = Names(shared="mlp.shared_experts")
DEEPSEEK_V2 = Family(
    "deepseek_v2",
    "DeepseekV2",
    _read_v2,
    _write_v2,
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
    _write_v3,
    defaults=Defaults(max_positions=POSITIONS_V3, eos_token_id=1),
    only=ONLY | {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)},
    inert=REMOTE,
    names=NAMES,
    renamed={OTHER_PREDICTORS: PREDICTORS},
    predictors_field=PREDICTORS,
)

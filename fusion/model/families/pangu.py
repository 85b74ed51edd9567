"""openPangu-Ultra-MoE (Pangu Ultra MoE, arXiv 2505.04519): latent attention, leading dense layers, sandwich norms, a
sigmoid router without groups, shared experts.

Its config has two generations of names: those of the authors' code, and DeepSeek's, which vLLM reads. Both are read,
and both are written. The norms of the latents have the epsilon of the authors' code, which is not `rms_norm_eps`."""

from fusion.model.families.base import OTHER_PREDICTORS, PREDICTORS, Defaults, Family, layers_after_dense
from fusion.model.families.latent import REMOTE, STATES, read_latent
from fusion.model.hf_fields import Fields
from fusion.model.spec import LayerSpec, Names, Router

POSITIONS, THETA = 131072, 25600000.0
OTHER_NAMES = {
    "attention_q_lora_dim": "q_lora_rank",
    "attention_kv_lora_dim": "kv_lora_rank",
    "attention_qk_dim": "qk_nope_head_dim",
    "attention_qk_rope_dim": "qk_rope_head_dim",
    "attention_v_dim": "v_head_dim",
    "num_routed_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts",
    "num_dense_layers": "first_k_dense_replace",
}


def _read(fields: Fields) -> tuple[LayerSpec, ...]:
    interleaved = fields.flag("rope_interleave", True)
    attention = read_latent(fields, max_positions=POSITIONS, theta=THETA, interleaved=interleaved)
    if attention.rotary.kind != "default":
        raise ValueError(
            f"{fields.place}: pangu_ultra_moe has no {attention.rotary.kind!r} rotary embedding; expected 'default'"
        )
    top_k, normalise = fields.size("num_experts_per_tok", 8), fields.flag("norm_topk_prob", True)
    router = Router(
        top_k,
        scores="sigmoid",
        float32=True,
        normalise=normalise and top_k > 1,
        correction=fields.flag("router_enable_expert_bias", False),
        scale=fields.positive("routed_scaling_factor", 2.5),
    )
    sandwich = fields.flag("sandwich_norm", False)
    return layers_after_dense(fields, attention, router, shared=1, dense=3, sandwich=sandwich)


PANGU_ULTRA_MOE = Family(
    "pangu_ultra_moe",
    "PanguUltraMoE",
    _read,
    " ".join((STATES, *OTHER_NAMES, OTHER_PREDICTORS, "sandwich_norm router_enable_expert_bias rope_interleave")),
    defaults=Defaults(rms_norm_eps=1e-5, max_positions=POSITIONS, eos_token_id=1),
    only={"attention_bias": (False,), "mlp_bias": (False,)},
    inert=REMOTE,
    names=Names(shared="mlp.shared_experts"),
    renamed=OTHER_NAMES | {OTHER_PREDICTORS: PREDICTORS},
    predictors_field=PREDICTORS,
)

"""Mixtral (arXiv 2401.04088): all layers sparse; `intermediate_size` is that of an expert."""

from fusion.model.families.base import Defaults, Family, equal_layers, grouped_query, num_experts
from fusion.model.hf_fields import Fields
from fusion.model.spec import LayerSpec, Names, Router, Sparse, SwiGLUNames

POSITIONS = 4096 * 32


def _read(fields: Fields) -> tuple[LayerSpec, ...]:
    router = Router(fields.size("num_experts_per_tok", 2), normalise=True)
    experts = Sparse(num_experts(fields), fields.size("intermediate_size"), router)
    attention = grouped_query(fields, theta=1e6, max_positions=POSITIONS)
    return equal_layers(fields, attention, experts)


MIXTRAL = Family(
    "mixtral",
    "Mixtral",
    _read,
    "num_local_experts num_experts_per_tok router_jitter_noise sliding_window",
    defaults=Defaults(rms_norm_eps=1e-5, max_positions=POSITIONS, router_aux_coef=0.001, eos_token_id=2),
    router_aux_field="router_aux_loss_coef",
    only={"router_jitter_noise": (0,), "sliding_window": (None,)},
    names=Names(
        router="block_sparse_moe.gate.weight",
        experts="block_sparse_moe.experts",
        expert=SwiGLUNames("w1.weight", "w3.weight", "w2.weight"),
    ),
)

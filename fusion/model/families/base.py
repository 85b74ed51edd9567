"""Describe a family of models: how its `config.json` is read and written, and how its tensors are named.

`Family.read` turns the fields of a `config.json` into one `LayerSpec` per layer; `Family.write` does the reverse, for
the fields that the family `states`, by the table `VALUES`. Every field is read, known to change nothing (`inert`),
accepted with the values that are implemented (`only`), or refused by name. Fields that all families have are read and
written by `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fusion.model.hf_fields import Fields
from fusion.model.hf_rotary import read_rotary
from fusion.model.spec import AttentionSpec, Dense, GroupedQuery, LayerSpec, Names, QKNorm, Router, SharedExpert, Sparse

if TYPE_CHECKING:
    from fusion.model.config import ModelConfig

PREDICTORS, OTHER_PREDICTORS = "num_nextn_predict_layers", "num_mtp_layers"
"""Two names of the field of a family's predictors of further tokens"""
GREEDY, GROUP_LIMITED = "greedy", "group_limited_greedy"
"""Values of `topk_method`"""


@dataclass(frozen=True)
class Defaults:
    """What transformers takes absent fields for, where families differ."""

    rms_norm_eps: float = 1e-6
    max_positions: int = 32768
    router_aux_coef: float = 0.0
    eos_token_id: int | None = None
    pad_token_id: int | None = None


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers.
    ``architecture``: the stem of its class names in transformers.
    ``read``: layers from fields.
    ``states``: the fields of its `config.json` that not every family has, of `VALUES`, with spaces between them.
    ``renamed``: other name of a field → its name here.
    ``states_rotary_share``: whether the share of rotated channels is written though all are: it is not the default.
    ``router_aux_field``: the coefficient of the load-balancing loss; None: the family has no such loss.
    ``classifier``: whether its `ForSequenceClassification` can be used as a reward model.
    ``predictors_field``: the number of layers after the last that predict further tokens, which transformers ignores;
        None: the family has none. Absent: 1, where the checkpoint holds the tensors of one."""

    model_type: str
    architecture: str
    read: Callable[[Fields], tuple[LayerSpec, ...]]
    states: str
    defaults: Defaults = field(default_factory=Defaults)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()
    names: Names = field(default_factory=Names)
    renamed: Mapping[str, str] = field(default_factory=dict)
    states_rotary_share: bool = False
    router_aux_field: str | None = None
    classifier: bool = False
    predictors_field: str | None = None

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the fields that the family states beside those that all do."""
        return {name: VALUES[self.renamed.get(name, name)](config) for name in self.states.split()}


def _shared(config: ModelConfig) -> SharedExpert:
    assert config.experts.shared is not None
    return config.experts.shared


VALUES: Mapping[str, Callable[[Any], Any]] = {
    "attention_bias": lambda config: isinstance(config.attention, GroupedQuery) and config.attention.qkv_bias,
    "qkv_bias": lambda config: config.grouped_query.qkv_bias,
    "use_qk_norm": lambda config: config.grouped_query.qk_norm == "head",
    "rope_interleave": lambda config: config.attention.rotary.interleaved,
    "q_lora_rank": lambda config: config.attention.q_rank,
    "kv_lora_rank": lambda config: config.attention.kv_rank,
    "qk_nope_head_dim": lambda config: config.attention.nope_dim,
    "qk_rope_head_dim": lambda config: config.attention.rope_dim,
    "v_head_dim": lambda config: config.attention.value_dim,
    "sandwich_norm": lambda config: config.layers[0].sandwich,
    "first_k_dense_replace": lambda config: config.num_layers - config.num_sparse_layers,
    "decoder_sparse_step": lambda config: 1,
    "mlp_only_layers": lambda config: [i for i, layer in enumerate(config.layers) if isinstance(layer.mlp, Dense)],
    "num_experts": lambda config: config.experts.num_experts,
    "num_local_experts": lambda config: config.experts.num_experts,
    "n_routed_experts": lambda config: config.experts.num_experts,
    "n_shared_experts": lambda config: _shared(config).width // config.experts.width,
    "shared_expert_intermediate_size": lambda config: _shared(config).width,
    "moe_intermediate_size": lambda config: config.experts.width,
    "num_experts_per_tok": lambda config: config.experts.router.top_k,
    "norm_topk_prob": lambda config: config.experts.router.normalise,
    "router_enable_expert_bias": lambda config: config.experts.router.correction,
    "topk_method": lambda config: GROUP_LIMITED if config.experts.router.groups > 1 else GREEDY,
    "n_group": lambda config: config.experts.router.groups,
    "topk_group": lambda config: config.experts.router.top_groups,
    "routed_scaling_factor": lambda config: config.experts.router.scale,
    PREDICTORS: lambda config: config.num_predictors,
    **dict.fromkeys(("mlp_bias", "use_sliding_window"), lambda config: False),
    **dict.fromkeys(("sliding_window", "clip_qkv"), lambda config: None),
    "router_jitter_noise": lambda config: 0.0,
}
"""Field of a `config.json` → its value for a `ModelConfig`"""


WINDOW = frozenset({"max_window_layers", "sliding_window"})
"""Fields that change nothing while `use_sliding_window` is false"""


def grouped_query(
    fields: Fields,
    *,
    head_dim: int | None = None,
    qk_norm: QKNorm = "none",
    qkv_bias: bool = False,
    out_bias: bool = False,
    theta: float = 10000.0,
    partial: float | None = None,
    max_positions: int = 32768,
    kv_heads_optional: bool = False,
) -> GroupedQuery:
    """Read the attention that all families here have. ``head_dim``: None: `head_dim` where it is stated, else
    ``hidden_size / num_attention_heads``. ``theta``, ``partial``, ``max_positions``: as of `read_rotary`.
    ``kv_heads_optional``: `num_key_value_heads` may be absent, for one per query head."""
    hidden, heads = fields.size("hidden_size"), fields.size("num_attention_heads")
    kv_heads = fields.optional_size("num_key_value_heads") or heads if kv_heads_optional else None
    if head_dim is None:
        head_dim = fields.optional_size("head_dim") or hidden // heads
    positions = fields.size("max_position_embeddings", max_positions)
    return GroupedQuery(
        num_heads=heads,
        num_kv_heads=kv_heads or fields.size("num_key_value_heads"),
        head_dim=head_dim,
        rotary=read_rotary(fields, head_dim, max_positions=positions, theta=theta, partial=partial),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )


def mixed_layers(
    fields: Fields, attention: AttentionSpec, experts: Sparse, *, named: str, is_sparse: Callable[[int], bool]
) -> tuple[LayerSpec, ...]:
    """Return layers of which ``is_sparse`` tells the sparse ones; the others have an MLP of `intermediate_size`.
    ``named``: the fields that decide it, for messages.
    Raise ValueError: no layer is sparse, which is another family."""
    sparse, dense = LayerSpec(attention, experts), LayerSpec(attention, Dense(fields.size("intermediate_size")))
    layers = tuple(sparse if is_sparse(layer) else dense for layer in range(fields.size("num_hidden_layers")))
    if sparse not in layers:
        raise ValueError(
            f"{fields.place}: {named} leaves no sparse layer; expected at least one (docs/model_family.md)"
        )
    return layers


def layers_after_dense(
    fields: Fields, attention: AttentionSpec, router: Router, *, shared: int, dense: int, sandwich: bool = False
) -> tuple[LayerSpec, ...]:
    """Return dense layers up to `first_k_dense_replace`, then sparse ones with a shared expert. ``shared``, ``dense``:
    the number of shared experts, which are one SwiGLU, and of dense layers, where none is stated."""
    width, num_dense = fields.size("moe_intermediate_size"), fields.count("first_k_dense_replace", dense)
    experts = Sparse(
        fields.size("n_routed_experts"), width, router, SharedExpert(width * fields.size("n_shared_experts", shared))
    )
    named = f"{fields.stated_as('first_k_dense_replace')}={num_dense}"
    layers = mixed_layers(fields, attention, experts, named=named, is_sparse=lambda layer: layer >= num_dense)
    return tuple(replace(layer, sandwich=sandwich) for layer in layers)


def equal_layers(fields: Fields, attention: AttentionSpec, mlp: Dense | Sparse) -> tuple[LayerSpec, ...]:
    return (LayerSpec(attention, mlp),) * fields.size("num_hidden_layers")


def corrected_router(
    fields: Fields, *, top_k: int | None = None, groups: int = 1, top_groups: int = 1, scale: float = 1.0
) -> Router:
    """Read a sigmoid router with a correction bias and groups, of these values where none are stated."""
    return Router(
        fields.size("num_experts_per_tok", top_k),
        scores="sigmoid",
        float32=True,
        normalise=fields.flag("norm_topk_prob", True),
        correction=True,
        groups=fields.size("n_group", groups),
        top_groups=fields.size("topk_group", top_groups),
        scale=fields.positive("routed_scaling_factor", scale),
    )


def stepped_layers(fields: Fields, attention: GroupedQuery, experts: Sparse) -> tuple[LayerSpec, ...]:
    """Return layers of which `decoder_sparse_step` and `mlp_only_layers` tell the sparse ones (both absent: all)."""
    dense, step = fields.indices("mlp_only_layers"), fields.size("decoder_sparse_step", 1)
    return mixed_layers(
        fields,
        attention,
        experts,
        named=f"mlp_only_layers={[*dense]} with decoder_sparse_step={step}",
        is_sparse=lambda layer: (layer + 1) % step == 0 and layer not in dense,
    )


def num_experts(fields: Fields) -> int:
    """Return the number of experts, which transformers calls `num_experts` or `num_local_experts`."""
    stated = {name: fields.size(name) for name in ("num_experts", "num_local_experts") if fields.raw(name) is not None}
    if len(set(stated.values())) > 1:
        raise ValueError(f"{fields.place} contradicts itself: {stated}")
    return next(iter(stated.values())) if stated else fields.size("num_experts")

"""Build Megatron-Core's GPTModel of one rank from a model's specification. Import it only after
`megatron_device.redirect_to`."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from fusion.model import ModelConfig, Parallel
from fusion.model.spec import GroupedQuery, Latent, LayerSpec, Sparse
from fusion.training.backends.megatron_layers import (
    BiasedRowParallelLinear,
    Norm,
    PackedCoreAttention,
    PackedLatentAttention,
    ProjectionNorm,
    TracedRouter,
    normalise_output,
)


def build_gpt(config: ModelConfig, parallel: Parallel, rank: int, groups: Any, dtype: torch.dtype) -> Any:
    """Return Megatron's `GPTModel` of a rank, whose parameters have shapes but no storage. ``groups``:
    `ProcessGroupCollection`."""
    stage = parallel.coordinate("pp", rank)
    own_layers = [config.layers[layer] for layer in parallel.layers(config.num_layers, stage)]
    specs = [_layer(layer, parallel, groups) for layer in own_layers]
    with torch.device("meta"):
        model = GPTModel(
            config=transformer_config(config, parallel, dtype),
            transformer_layer_spec=TransformerBlockSubmodules(layer_specs=specs, layer_norm=Norm),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_positions,
            pre_process=stage == 0,
            post_process=stage == parallel.pp - 1,
            share_embeddings_and_output_weights=config.tie_embeddings,
            position_embedding_type="none",  # `MegatronModel` passes rotations to the layers
            pg_collection=groups,
        )
        for layer, spec in zip(model.decoder.layers, own_layers, strict=True):
            for module in (layer.self_attention, layer.mlp) if spec.sandwich else ():
                normalise_output(module, Norm(model.config, config.hidden_size, eps=config.rms_norm_eps))
    return model.train()


def _layer(spec: LayerSpec, parallel: Parallel, groups: Any) -> ModuleSpec:
    """Return Megatron's specification of a layer, with what `megatron_layers` supplies in it."""
    num_experts = spec.mlp.num_experts if isinstance(spec.mlp, Sparse) else None
    is_latent = isinstance(spec.attention, Latent)
    layer = get_gpt_layer_local_spec(num_experts, multi_latent_attention=is_latent, normalization="RMSNorm")
    modules = layer.submodules
    modules.input_layernorm = modules.pre_mlp_layernorm = Norm
    attention = modules.self_attention.submodules
    match spec.attention:
        case GroupedQuery() as grouped:
            attention.core_attention = PackedCoreAttention
            attention.q_layernorm, attention.k_layernorm = (
                _head_norm(grouped, heads // parallel.tp, groups) for heads in (grouped.num_heads, grouped.num_kv_heads)
            )
            if grouped.out_bias:
                attention.linear_proj = BiasedRowParallelLinear
        case Latent() as latent:
            attention.core_attention = IdentityOp
            attention.q_layernorm = attention.kv_layernorm = Norm
            # Megatron would take the group of this one from its global state
            attention.linear_q_proj = ModuleSpec(ColumnParallelLinear, params={"tp_group": groups.tp})
            modules.self_attention.module = PackedLatentAttention
            modules.self_attention.params["spec"] = latent
    if isinstance(spec.mlp, Sparse):
        modules.mlp.submodules.router = partial(TracedRouter, router=spec.mlp.router)
    return layer


def _head_norm(spec: GroupedQuery, heads: int, groups: Any) -> Any:
    match spec.qk_norm:
        case "none":
            return IdentityOp
        case "head":
            return Norm
        case "projection":
            return ModuleSpec(ProjectionNorm, params={"heads": heads, "tp_group": groups.tp})


def transformer_config(config: ModelConfig, parallel: Parallel, dtype: torch.dtype) -> TransformerConfig:
    """Return Megatron's config of a model."""
    options = dict[str, Any](
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=F.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=True,  # that is, on torch's default device
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=parallel.tp,
        sequence_parallel=parallel.tp > 1,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        **(_experts(config.experts) if config.num_experts else {}),
    )
    match config.attention:
        case GroupedQuery() as grouped:
            result = TransformerConfig(add_qkv_bias=grouped.qkv_bias, **options)
            # Megatron multiplies cosines and sines by 1 + 0.1 · mscale · log(scaling factor), over the same for all_dim
            result.yarn_rotary_scaling_factor = math.e
            result.yarn_mscale = 10 * (grouped.rotary.attention_factor - 1)
            result.yarn_mscale_all_dim = 0.0
            return result
        case Latent() as latent:
            return MLATransformerConfig(
                q_lora_rank=latent.q_rank,
                kv_lora_rank=latent.kv_rank,
                qk_head_dim=latent.nope_dim,
                qk_pos_emb_head_dim=latent.rope_dim,
                v_head_dim=latent.value_dim,
                rope_type="rope",  # of an embedding that `PackedLatentAttention` does not use
                **options,
            )


def _experts(experts: Sparse) -> dict[str, Any]:
    """Return the fields of sparse layers. How the router chooses and weighs is not among them: `TracedRouter`."""
    return dict(
        num_moe_experts=experts.num_experts,
        moe_router_topk=experts.router.top_k,
        moe_ffn_hidden_size=experts.width,
        moe_router_load_balancing_type="none",  # the train engine adds its own loss, over the global batch
        moe_router_pre_softmax=True,  # else Megatron refuses a single expert per token
        moe_router_dtype="fp32" if experts.router.float32 else None,
        moe_token_dispatcher_type="alltoall",
        moe_shared_expert_intermediate_size=experts.shared.width if experts.shared else None,
        moe_shared_expert_gate=experts.shared is not None and experts.shared.gated,
    )

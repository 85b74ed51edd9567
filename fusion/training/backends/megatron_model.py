"""Build Megatron-Core's model on any card of `fusion.npu`.

    with megatron_on(device), megatron_layout(parallel):
        model = build_gpt(config, parallel, rank)      # with Megatron's parameters, in their local shapes

Megatron uses the device of `torch.cuda`. On a CUDA card that is correct; on Ascend, MindSpeed redirects these calls; on
an emulated card `megatron_on` redirects them inside its block. The layers are Megatron's local ones (no Transformer
Engine): SequentialMLP experts, torch norms, therefore no sequence parallelism. The model can hold, reshard and evaluate
weights, but not train them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import silu
from torch.nn.init import zeros_

from fusion.model import ModelConfig, Parallel
from fusion.npu import Device

SEED = 1


@contextmanager
def megatron_on(device: Device) -> Iterator[None]:
    """Redirects Megatron-Core's calls of `torch.cuda` to ``device``, and restores torch afterwards.

    Raises:
        ImportError: megatron-core is not installed.
    """
    if device.torch_device.type == "cuda":
        yield
        return
    module = torch.get_device_module(device.torch_device)
    names = ("Event", "Stream", "current_stream", "get_rng_state", "manual_seed", "set_rng_state", "stream")
    stand_ins: dict[str, Any] = {name: getattr(module, name) for name in names}
    stand_ins["current_device"] = lambda: device.torch_device
    to_card = patch.object(torch.Tensor, "cuda", lambda self, *args, **kwargs: self.to(device.torch_device))
    with warnings.catch_warnings(), patch.multiple(torch.cuda, **stand_ins), to_card:
        warnings.simplefilter("ignore")  # about Transformer Engine and Apex, which need CUDA
        import megatron.core.tensor_parallel.random as random
        import megatron.core.transformer.moe.moe_utils as moe_utils

        rng: dict[str, Any] = {
            "_get_cuda_rng_state": lambda *args, **kwargs: module.get_rng_state(),
            "_set_cuda_rng_state": lambda state, *args, **kwargs: module.set_rng_state(state),
        }
        # 0.16.1 reads this name, but defines it only if Transformer Engine is installed.
        no_te = patch.object(moe_utils, "te_general_gemm", None, create=True)
        with patch.multiple(random, **rng), no_te:
            yield


@contextmanager
def megatron_layout(parallel: Parallel) -> Iterator[None]:
    """Creates Megatron's global process groups for a layout. Collective over all processes, the layout's ranks."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        parallel.tp,
        parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
    )
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


def build_gpt(config: ModelConfig, parallel: Parallel, rank: int) -> Any:
    """Builds a `GPTModel` with zero weights. Call it inside `megatron_on` and the `megatron_layout` of the layout.

    The model keeps the process groups it was built with (`pg_collection`), so that models in several layouts can exist
    at once; only the sharded state dict of tied embeddings still needs Megatron's global state and so the blocks.

    Args:
        rank: rank of the calling process.
    """
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    stage = parallel.coordinate("pp", rank)
    model_parallel_cuda_manual_seed(SEED, force_reset_rng=True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with torch.device(torch.cuda.current_device()):  # Megatron creates norms and routers on torch's default device
        model = GPTModel(
            config=transformer_config(config, parallel),
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=config.num_experts or None, qk_layernorm=True, normalization="RMSNorm"
            ),
            vocab_size=config.vocab_size,
            max_sequence_length=config.max_positions,
            pre_process=stage == 0,
            post_process=stage == parallel.pp - 1,
            share_embeddings_and_output_weights=config.tie_embeddings,
            position_embedding_type="rope",
            rotary_base=int(config.attention.rotary.theta),
            pg_collection=groups,
        )
    model.pg_collection = groups
    return model


def transformer_config(config: ModelConfig, parallel: Parallel) -> Any:
    """Returns Megatron's config of a Qwen3 or Qwen3-MoE model."""
    from megatron.core.transformer import TransformerConfig

    experts = dict[str, Any]()
    if config.num_experts:
        experts = dict(
            num_moe_experts=config.num_experts,
            moe_router_topk=config.top_k,
            moe_ffn_hidden_size=config.moe_intermediate_size,
            moe_router_load_balancing_type="none",
            moe_router_pre_softmax=not config.experts.router.normalise,
        )
    return TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_kv_heads,
        kv_channels=config.head_dim,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        init_method=zeros_,
        output_layer_init_method=zeros_,
        embedding_init_method=zeros_,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.etp,
        **experts,
    )

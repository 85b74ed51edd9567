"""Make vLLM's layers compute from their plain weight tensors where it computes on the host.

vLLM for the CPU packs weights into private copies once they are loaded (oneDNN handles, expert tiles), so that a weight
written later would have no effect. It also lacks the exchange of uneven numbers of tokens between attention ranks, the
experts of another rank, and attention heads narrower than 32 channels: such heads are padded with zeros. Its rotation
of parts of heads, as of latent attention, takes wrong strides for [T, H, C]: they are copied to [T, H C] first."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from fusion.model.collectives import gather_shards, reduce_scatter_shards
from fusion.npu.operators import operators_of


def compute_from_plain_tensors() -> None:
    """Turn off packing in this process, and compute experts from their tensors, also if some are on other ranks."""
    import vllm._custom_ops as ops
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers import vocab_parallel_embedding as embedding
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    ops._supports_onednn = False
    lookup: Any = embedding.get_masked_input_and_mask  # would be compiled, by a process of its own
    embedding.get_masked_input_and_mask = getattr(lookup, "_torchdynamo_orig_callable", lookup)
    experts: Any = CPUFusedMOE
    experts._pad_moe_intermediate_for_grouped_gemm = lambda self, layer: None
    experts.check_grouped_gemm = lambda self, layer: (False, "none")
    experts.init_moe_torch = lambda self, layer: None  # would keep the tensors as they are now
    experts.forward_torch = _experts
    rotary: Any = RotaryEmbedding
    rotary.forward_cpu = _rotate
    communicator: Any = CpuCommunicator
    # Its shared memory would outlive a killed process, and its ranks wait for each other by spinning.
    communicator._all_group_ranks_share_shm_group_name = lambda self: False
    communicator.all_gatherv, communicator.reduce_scatterv = _all_gatherv, _reduce_scatterv
    torch.ops._C.init_cpu_memory_env = lambda nodes: None  # type: ignore[attr-defined]  # would bind all memory of the process to one node


def record_in_experts() -> None:
    """Let the experts pass their routing to vLLM's capturer: it takes that of routers, which are not called here."""
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def record(capturer: Any, layer: int, topk_ids: torch.Tensor) -> None:
        exchanged = get_forward_context().dp_metadata
        if exchanged is not None:  # the rows of all ranks, those of each TP rank padded
            sizes, counts = exchanged.get_chunk_sizes_across_dp_rank(), exchanged.num_tokens_across_dp_cpu.tolist()
            start = sum(sizes[: len(sizes) // len(counts) * capturer.dp_rank])
            topk_ids = topk_ids[start : start + counts[capturer.dp_rank]]
        capturer.capture(layer, topk_ids)

    def bind(self: Any, capturer: Any) -> None:
        for module in self.model.modules():
            if isinstance(module, MoERunner):
                module.routed_experts.record = partial(record, capturer, module.layer_id)

    runner: Any = GPUModelRunner
    runner._bind_routed_experts_capturer = bind


def pad_heads() -> None:
    """Widen attention heads to the next width that vLLM computes, in the KV cache and in queries."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl

    widths = CPUAttentionBackend.get_supported_head_sizes()
    layer: Any = Attention
    impl: Any = CPUAttentionBackendImpl
    if hasattr(impl, "pads_heads"):
        return
    impl.pads_heads = True
    spec_of, init, update, forward = layer.get_kv_cache_spec, impl.__init__, impl.do_kv_cache_update, impl.forward

    def wide(width: int) -> int:
        return min(known for known in widths if known >= width)

    def get_kv_cache_spec(self: Any, *args: Any) -> Any:
        spec = spec_of(self, *args)
        return replace(spec, head_size=wide(spec.head_size), head_size_v=wide(spec.head_size_v))

    def wide_init(self: Any, num_heads: int, head_size: int, *args: Any, **options: Any) -> None:
        init(self, num_heads, wide(head_size), *args, **options)

    def do_kv_cache_update(self: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, *args: Any) -> None:
        missing = self.head_size - key.shape[-1]
        if missing:
            key, value = F.pad(key, (0, missing)), F.pad(value, (0, missing))
        update(self, layer, key, value, *args)

    def wide_forward(
        self: Any, layer: Any, query: torch.Tensor, *args: Any, output: torch.Tensor, **options: Any
    ) -> Any:
        width = query.shape[-1]
        if width == self.head_size:
            return forward(self, layer, query, *args, output=output, **options)
        query = F.pad(query, (0, self.head_size - width))
        padded = torch.zeros_like(query)
        forward(self, layer, query, *args, output=padded, **options)
        return output.copy_(padded[..., :width])

    layer.get_kv_cache_spec, impl.__init__ = get_kv_cache_spec, wide_init
    impl.do_kv_cache_update, impl.forward = do_kv_cache_update, wide_forward


def _experts(
    self: Any,
    layer: Any,
    input: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    global_num_experts: int = -1,
    skip_weighted: bool = False,
) -> torch.Tensor:
    """Return the weighted sum [N, D] of this rank's experts for rows [N, D]; 0 where a row has none."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    assert activation == MoEActivation.SILU and not skip_weighted
    if hasattr(layer, "record"):
        layer.record(topk_ids)
    w13, w2, owned = layer.w13_weight, layer.w2_weight, layer.expert_map
    chosen = topk_ids.flatten().long()
    local = chosen if owned is None else owned[chosen].long()
    order = local.argsort(stable=True)
    counts = torch.bincount(local + 1, minlength=len(w13) + 1)  # those of other ranks are -1
    own = order[int(counts[0]) :]
    rows = own // topk_ids.shape[1]
    output = torch.zeros_like(input)
    if len(rows):
        with torch.inference_mode():
            y = operators_of("emulated").experts(input[rows], counts[1:], (w13.unbind(), w2.unbind()))
        output.index_add_(0, rows, (y * topk_weights.flatten()[own].unsqueeze(1)).to(output.dtype))
    return output


def _rotate(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rotate queries and keys [T, H C], or parts [T, H, C] of their heads."""
    import vllm._custom_ops as ops

    q, k = query.flatten(1), None if key is None else key.flatten(1)
    cache = self._match_cos_sin_cache_dtype(query)
    ops.rotary_embedding(positions, q, k, self.head_size, cache, self.is_neox_style)
    return q.view(query.shape), None if k is None or key is None else k.view(key.shape)


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Let vLLM's attention ranks exchange different numbers of tokens on the host."""
    assert dim == 0
    if isinstance(input_, list):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    return gather_shards(input_, sizes or [len(input_)] * self.world_size, self.device_group)


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    return reduce_scatter_shards(input_.contiguous(), sizes, self.device_group)

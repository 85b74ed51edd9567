"""Make vLLM's layers compute from their plain weight tensors where it computes on the host.

vLLM for the CPU packs weights into private copies once they are loaded (oneDNN handles, expert tiles), so that a weight
written later would have no effect. It also lacks the exchange of uneven numbers of tokens between attention ranks, and
the experts of another rank.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.model.collectives import gather_uneven, reduce_scatter_uneven


def compute_from_plain_tensors() -> None:
    """Turn off packing in this process, and compute experts from their tensors, also if some are on other ranks."""
    import vllm._custom_ops as ops
    from vllm.model_executor.layers.fused_moe.cpu_fused_moe import CPUFusedMOE

    ops._supports_onednn = False
    experts: Any = CPUFusedMOE
    experts._pad_moe_intermediate_for_grouped_gemm = lambda self, layer: None
    experts.check_grouped_gemm = lambda self, layer: (False, "none")
    experts.init_moe_torch = lambda self, layer: None  # would keep the tensors as they are now
    experts.forward_torch = _experts


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
    w13, w2, owned = layer.w13_weight, layer.w2_weight, layer.expert_map
    chosen = topk_ids.flatten().long()
    local = chosen if owned is None else owned[chosen].long()
    order = local.argsort(stable=True)
    counts = torch.bincount(local + 1, minlength=len(w13) + 1).tolist()  # those of other ranks are -1
    own = order[counts[0] :]
    rows = own // topk_ids.shape[1]
    pieces = []
    for expert, x in enumerate(input[rows].split(counts[1:])):
        if len(x):
            gate, up = torch.nn.functional.linear(x, w13[expert]).chunk(2, -1)
            pieces.append(torch.nn.functional.linear(torch.nn.functional.silu(gate) * up, w2[expert]))
    output = torch.zeros_like(input)
    if pieces:
        weights = topk_weights.flatten()[own].unsqueeze(1)
        output.index_add_(0, rows, (torch.cat(pieces) * weights).to(output.dtype))
    return output


def exchange_uneven() -> None:
    """Let vLLM's attention ranks exchange different numbers of tokens on the host."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    communicator: Any = CpuCommunicator
    communicator.all_gatherv, communicator.reduce_scatterv = _all_gatherv, _reduce_scatterv


def _all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    assert dim == 0
    if isinstance(input_, list):
        return [_all_gatherv(self, one, dim, sizes) for one in input_]
    return gather_uneven(input_, sizes or [len(input_)] * self.world_size, self.device_group)


def _reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None) -> torch.Tensor:
    assert dim == 0
    sizes = sizes or [len(input_) // self.world_size] * self.world_size
    return reduce_scatter_uneven(input_.contiguous(), sizes, self.device_group)

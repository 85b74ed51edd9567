"""Differentiate operators of Ascend cards of which torch_npu derives no gradient: each Function names the operators of
its backward pass."""

from typing import Any

import torch
from torch import Tensor


class AddRMSNorm(torch.autograd.Function):
    """The sum of two tensors and its norm, of which torch_npu derives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float):
        normed, rstd, total = torch.ops.npu.npu_add_rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        return normed, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        total, weight, rstd = ctx.saved_tensors
        grad, grad_weight = torch.ops.npu.npu_rms_norm_backward(grads[0], total, weight, rstd)
        grad = grad + grads[1]
        return grad, grad, grad_weight.to(weight.dtype), None


def routing_options(active: int, num_experts: int, local: range | None = None) -> dict[str, Any]:
    """Return the options of routing to all experts, or to the ``local`` ones only."""
    return dict(
        active_num=active,
        expert_num=num_experts,
        expert_tokens_num_type=1,  # counts, not their cumulative sums
        expert_tokens_num_flag=True,
        active_expert_range=[local.start, local.stop] if local else [0, num_experts],
        quant_mode=-1,
        row_idx_type=0,
    )


class Permute(torch.autograd.Function):
    """Rows by expert, of which torch_npu derives no gradient."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, expert_Nk: Tensor, num_experts: int):
        options = routing_options(expert_Nk.numel(), num_experts)
        rows, places, counts_E, _ = torch.ops.npu.npu_moe_init_routing_v2(x_ND, expert_Nk, **options)
        ctx.save_for_backward(places)
        ctx.num_rows, ctx.top_k = expert_Nk.shape
        ctx.mark_non_differentiable(places, counts_E)
        ctx.set_materialize_grads(False)
        return rows, places, counts_E

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        grad = grads[0].contiguous()
        out = torch.ops.npu.npu_moe_token_permute_grad_v2(grad, *ctx.saved_tensors, ctx.num_rows, grad.dtype, ctx.top_k)
        return out, None, None


def product_options(counts: Tensor, group_type: int = 0) -> dict[str, Any]:
    """Return the options of a grouped product. A list of counts may not have length 1; one of ends may, and is the
    same then."""
    return dict(group_list=counts, split_item=3, group_type=group_type, group_list_type=int(len(counts) > 1))


def products(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Return the products of `GroupedLinear`, of which torch_npu derives no gradient."""
    options = product_options(counts, group_type=0 if weight.dim() == 3 else 2)
    (out,) = torch.ops.npu.npu_grouped_matmul([x], [weight], **options)
    return out

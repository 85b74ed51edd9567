"""Name the operator that computes the gradient of each operator, as op-plugin's `config/derivatives.yaml` does.

None: torch_npu derives no gradient of it, so that whoever trains with it brings their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Gradient:
    """``compute(ctx, *grads)`` returns a gradient for each input; ``keep(ctx, inputs, output)`` saves what it reads."""

    compute: Callable[..., Any]
    keep: Callable[..., None]


def _keep_rms_norm(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(inputs[0], inputs[1], output[1])


def _rms_norm(ctx: Any, grad: torch.Tensor, _: Any):
    x, gamma, rstd = ctx.saved_tensors
    grad_x, grad_gamma = torch.ops.npu.npu_rms_norm_backward(grad, x, gamma, rstd)
    return grad_x, grad_gamma.to(gamma.dtype), None


def _keep_rotary(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.mode = inputs[3]


def _rotary(ctx: Any, grad: torch.Tensor):
    grads = torch.ops.npu.npu_rotary_mul_backward(grad, *ctx.saved_tensors, ctx.mode)
    return *(one if needed else None for one, needed in zip(grads, ctx.needs_input_grad, strict=False)), None, None


def _keep_swiglu(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.dim = inputs[1]


def _swiglu(ctx: Any, grad: torch.Tensor):
    return torch.ops.npu.npu_swiglu_backward(grad, *ctx.saved_tensors, ctx.dim), None


def _keep_unpermute(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])


def _unpermute(ctx: Any, grad: torch.Tensor):
    rows, order, probs = ctx.saved_tensors
    grad_rows, grad_probs = torch.ops.npu.npu_moe_token_unpermute_grad(rows, grad, order, probs)
    return grad_rows, None, grad_probs if probs is not None else None, None, None


_ATTENTION_ARGUMENTS = (
    ("scale", 8, "scale_value"),
    ("actual_seq_qlen", 14, "actual_seq_qlen"),
    ("actual_seq_kvlen", 15, "actual_seq_kvlen"),
    ("sparse_mode", 16, "sparse_mode"),
)
"""Arguments of `npu_fusion_attention`: name, place, name in its gradient."""


def _keep_attention(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.set_materialize_grads(False)
    query, key, value, heads, layout, _, _, mask = inputs[:8]
    out, top, total = output[:3]
    ctx.save_for_backward(query, key, value, mask, top, total, out)
    ctx.heads, ctx.layout, ctx.num_inputs = heads, layout, len(inputs)
    ctx.options = {name: inputs[place] for _, place, name in _ATTENTION_ARGUMENTS}


def _attention(ctx: Any, grad: torch.Tensor, *_: Any):
    query, key, value, mask, top, total, out = ctx.saved_tensors
    grads = torch.ops.npu.npu_fusion_attention_grad(
        query,
        key,
        value,
        grad,
        ctx.heads,
        ctx.layout,
        atten_mask=mask,
        softmax_max=top,
        softmax_sum=total,
        attention_in=out,
        **ctx.options,
    )
    return *grads[:3], *[None] * (ctx.num_inputs - 3)


GRADIENTS: dict[str, Gradient | None] = {
    "npu_rms_norm": Gradient(_rms_norm, _keep_rms_norm),
    "npu_rotary_mul": Gradient(_rotary, _keep_rotary),
    "npu_swiglu": Gradient(_swiglu, _keep_swiglu),
    "npu_moe_token_unpermute": Gradient(_unpermute, _keep_unpermute),
    "npu_fusion_attention": Gradient(_attention, _keep_attention),
    "npu_add_rms_norm": None,
    "npu_grouped_matmul": None,
    "npu_moe_init_routing_v2": None,
    "npu_moe_gating_top_k": None,
    "npu_moe_gating_top_k_softmax_v2": None,
    "npu_fused_infer_attention_score": None,
    "npu_transpose_batchmatmul": None,
}

"""Name the operator that computes the gradient of each operator, as op-plugin's `config/derivatives.yaml` does.

None: torch_npu derives no gradient of it, so that whoever trains with it brings their own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Gradient:
    """``compute(ctx, *grads)`` returns a gradient for each input. It reads the saved tensors: of the ``inputs`` and
    ``outputs`` at these places; and ``ctx.others``: the inputs at those of ``others``."""

    compute: Callable[..., Any]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...] = ()
    others: tuple[int, ...] = ()

    def keep(self, ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(inputs[i] for i in self.inputs), *(output[i] for i in self.outputs))
        ctx.others, ctx.num_inputs = [inputs[i] for i in self.others], len(inputs)


def _rms_norm(ctx: Any, grad: torch.Tensor, _: Any):
    x, gamma, rstd = ctx.saved_tensors
    grad_x, grad_gamma = torch.ops.npu.npu_rms_norm_backward(grad, x, gamma, rstd)
    return grad_x, grad_gamma.to(gamma.dtype), None


def _rotary(ctx: Any, grad: torch.Tensor):
    grads = torch.ops.npu.npu_rotary_mul_backward(grad, *ctx.saved_tensors, *ctx.others)
    return *(one if needed else None for one, needed in zip(grads, ctx.needs_input_grad, strict=False)), None, None


def _swiglu(ctx: Any, grad: torch.Tensor):
    return torch.ops.npu.npu_swiglu_backward(grad, *ctx.saved_tensors, *ctx.others), None


def _unpermute(ctx: Any, grad: torch.Tensor):
    rows, order, probs = ctx.saved_tensors
    grad_rows, grad_probs = torch.ops.npu.npu_moe_token_unpermute_grad(rows, grad, order, probs)
    return grad_rows, None, grad_probs if probs is not None else None, None, None


def _attention(ctx: Any, grad: torch.Tensor, *_: Any):
    query, key, value, mask, out, top, total = ctx.saved_tensors
    heads, layout, scale, ends, kv_ends, mode = ctx.others
    tensors = dict(atten_mask=mask, softmax_max=top, softmax_sum=total, attention_in=out)
    options = dict(scale_value=scale, actual_seq_qlen=ends, actual_seq_kvlen=kv_ends, sparse_mode=mode)
    grads = torch.ops.npu.npu_fusion_attention_grad(query, key, value, grad, heads, layout, **tensors, **options)
    return *grads[:3], *[None] * (ctx.num_inputs - 3)


GRADIENTS: dict[str, Gradient | None] = {
    "npu_rms_norm": Gradient(_rms_norm, inputs=(0, 1), outputs=(1,)),
    "npu_rotary_mul": Gradient(_rotary, inputs=(0, 1, 2), others=(3,)),
    "npu_swiglu": Gradient(_swiglu, inputs=(0,), others=(1,)),
    "npu_moe_token_unpermute": Gradient(_unpermute, inputs=(0, 1, 2)),
    "npu_fusion_attention": Gradient(_attention, inputs=(0, 1, 2, 7), outputs=(0, 1, 2), others=(3, 4, 8, 14, 15, 16)),
    "npu_add_rms_norm": None,
    "npu_grouped_matmul": None,
    "npu_moe_init_routing_v2": None,
    "npu_moe_gating_top_k": None,
    "npu_moe_gating_top_k_softmax_v2": None,
    "npu_fused_infer_attention_score": None,
    "npu_transpose_batchmatmul": None,
}

"""Implement operations for which a card has a fused kernel and the CPU needs another way to avoid padding.

Sequences are packed: one leading token dimension without padding rows, and a list of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

from fusion.npu.fused import operators_for

BATCH_INVARIANT_ROWS = 16
"""Multiple to which row counts are rounded up where results must not depend on the batch: below it (and, in fp64,
between its multiples) a BLAS selects kernels by row count that add in a different order."""


def linear(x_ND: torch.Tensor, weight_OD: torch.Tensor, row_multiple: int = 1) -> torch.Tensor:
    """Compute x @ weight.T. With ``row_multiple`` > 1, N is zero-padded to a multiple of it, so that a row's bits do
    not depend on N."""
    rows = x_ND.shape[0]
    padding = -rows % row_multiple
    if padding == 0:
        return F.linear(x_ND, weight_OD)
    return F.linear(F.pad(x_ND, (0, 0, 0, padding)), weight_OD)[:rows]


def sigmoid(x: torch.Tensor, row_multiple: int = 1) -> torch.Tensor:
    """Compute the sigmoid of each element. With ``row_multiple`` > 1 its bits do not depend on the element's place:
    PyTorch's vector loop over a tensor rounds differently from the scalar one over what is left. No gradient then."""
    if row_multiple == 1:
        return x.sigmoid()
    x32 = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x
    return (1 / (1 + (-x32).exp())).to(x.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Normalise the last dimension by its root mean square, in float32 for any dtype of x, as transformers does."""
    if (operators := operators_for(x)) is not None:
        return operators.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    if x.dtype == torch.float32:
        return F.rms_norm(x, x.shape[-1:], None, eps) * weight
    x32 = x.to(torch.float32)
    return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def norm_rope(
    qkv_NhC: torch.Tensor,
    q_norm_C: torch.Tensor | None,
    k_norm_C: torch.Tensor | None,
    rope: tuple[torch.Tensor, torch.Tensor],
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Split the heads into queries [N, H, C], keys and values [N, K, C]; normalise queries and keys, then rotate them
    by their positions.

    Args:
        q_norm_C, k_norm_C: None, both: queries and keys are not normalised.
        rope: cosines and sines [N, 1, R] of the first R channels, the others are not rotated; the sines of the first
            half with the sign of the rotation.
    """
    heads = qkv_NhC.shape[1] - 2 * kv_heads
    if (operators := operators_for(qkv_NhC)) is not None:
        q, k = operators.norm_rope(qkv_NhC, q_norm_C, k_norm_C, *rope, kv_heads, eps)
        return q, k, qkv_NhC[:, heads + kv_heads :]
    qk, v = qkv_NhC.split([heads + kv_heads, kv_heads], dim=1)
    # Queries and keys together: the time of a decode step grows with its number of operations.
    if q_norm_C is not None and k_norm_C is not None:
        qk = _rms_norm(qk, torch.cat([q_norm_C.expand(heads, -1), k_norm_C.expand(kv_heads, -1)]), eps)
    q, k = _rotate(qk, *rope).split([heads, kv_heads], dim=1)
    return q, k, v


def _rotate(x_NhC: torch.Tensor, cos_N1R: torch.Tensor, sin_N1R: torch.Tensor) -> torch.Tensor:
    rotated, passed = x_NhC, None
    if cos_N1R.shape[-1] < x_NhC.shape[-1]:
        rotated, passed = x_NhC.tensor_split([cos_N1R.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos_N1R + torch.cat([second, first], dim=-1) * sin_N1R
    return rotated if passed is None else torch.cat([rotated, passed], dim=-1)


def rotate(x_NhR: torch.Tensor, rope: tuple[torch.Tensor, torch.Tensor], interleaved: bool = False) -> torch.Tensor:
    """Rotate heads by their positions, in all their channels.

    Args:
        rope: cosines and sines [N, 1, R]; the sines of the first channel of each pair with the sign of the rotation.
        interleaved: pairs are channels 2i and 2i + 1, not i and i + R / 2.
    """
    if not interleaved:
        return _rotate(x_NhR, *rope)
    swapped = x_NhR.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return x_NhR * rope[0] + swapped * rope[1]


def head_linear(x_NHC: torch.Tensor, weight_HCO: torch.Tensor, row_multiple: int = 1) -> torch.Tensor:
    """Multiply each head of x by its own matrix: [N, H, O]. ``row_multiple``: as of `linear`."""
    rows = x_NHC.shape[0]
    padding = -rows % row_multiple
    if padding:
        x_NHC = F.pad(x_NHC, (0, 0, 0, 0, 0, padding))
    return torch.bmm(x_NHC.transpose(0, 1), weight_HCO).transpose(0, 1)[:rows]


def swiglu(gate_up_NI: torch.Tensor) -> torch.Tensor:
    """Compute silu(gate) * up [N, I] of [N, 2 * I]."""
    if (operators := operators_for(gate_up_NI)) is not None:
        return operators.swiglu(gate_up_NI)
    gate, up = gate_up_NI.chunk(2, dim=-1)
    return F.silu(gate) * up


def _grouped(x_ND: torch.Tensor, counts: list[int], row_multiple: int, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    out = x_ND.new_empty(x_ND.shape[0], weights[0].shape[0])
    for rows, x, y, weight in zip(counts, x_ND.split(counts), out.split(counts), weights, strict=True):
        if rows % row_multiple:
            y.copy_(linear(x, weight, row_multiple))
        elif rows:
            torch.mm(x, weight.t(), out=y)
    return out


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, counts: list[int], row_multiple: int, *weights: torch.Tensor):
        ctx.save_for_backward(x_ND, *weights)
        ctx.counts = counts
        return _grouped(x_ND, counts, row_multiple, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        x_ND, *weights = ctx.saved_tensors
        grad_NO = grads[0].contiguous()
        grad_x = torch.empty_like(x_ND)
        grad_weights: list[torch.Tensor | None] = []
        chunks = zip(x_ND.split(ctx.counts), grad_NO.split(ctx.counts), grad_x.split(ctx.counts), strict=True)
        for weight, (x, grad, gx) in zip(weights, chunks, strict=True):
            # An expert without rows gets no gradient instead of a zero one, which would have to be added.
            grad_weights.append(torch.mm(grad.t(), x) if x.shape[0] else None)
            if x.shape[0]:
                torch.mm(grad, weight, out=gx)
        return grad_x, None, None, *grad_weights


GroupedKernel = Callable[[torch.Tensor, Sequence[torch.Tensor], torch.Tensor], torch.Tensor]
"""A card's own product of row block e of x [N, D] (``counts[e]`` rows) and ``weights[e].T`` [D, O]; the counts, int64
[E], are on the card."""


def _ascend(x_ND: torch.Tensor, weights: Sequence[torch.Tensor], counts_E: torch.Tensor) -> torch.Tensor:
    # one x, a weight in its own storage for each expert, one output (split_item 3); rows are grouped (group_type 0), by
    # the end of each group (group_list_type 0)
    (out,) = torch.ops.npu.npu_grouped_matmul(
        [x_ND],
        [weight.t() for weight in weights],
        group_list=counts_E.cumsum(0),
        split_item=3,
        group_type=0,
        group_list_type=0,
    )
    return out


GROUPED_KERNELS: dict[str, tuple[str, GroupedKernel]] = {"npu": ("npu_grouped_matmul", _ascend)}
"""Device type → the operator of the same namespace that the kernel calls, and the kernel. CUDA has none: its
`torch._grouped_mm` takes the weights of all experts as one tensor, but each is stored for itself (`bucket_plan.py`)."""


def grouped_kernel(x_ND: torch.Tensor, row_multiple: int = 1) -> GroupedKernel | None:
    """Return the card's grouped product, with which the number of rows of each expert need not be known on the host:
    None where it has none (an emulated card has not), where a gradient is computed, or with ``row_multiple`` > 1."""
    return None if row_multiple > 1 or torch.is_grad_enabled() else _kernel_of(x_ND.device.type)


@cache
def _kernel_of(device_type: str) -> GroupedKernel | None:
    operator, kernel = GROUPED_KERNELS.get(device_type, ("", None))
    return kernel if operator and hasattr(getattr(torch.ops, device_type), operator) else None


def grouped_linear(
    x_ND: torch.Tensor, weights: Sequence[torch.Tensor], counts: list[int] | torch.Tensor, row_multiple: int = 1
) -> torch.Tensor:
    """Multiply row block e of x (``counts[e]`` rows) by ``weights[e].T`` [D, O], without padding any block.

    Runs the card's `grouped_kernel` if the counts are on the card and it has one, else one matrix product per non-empty
    expert, for which counts on the card are copied to the host.
    """
    if isinstance(counts, torch.Tensor):
        kernel = grouped_kernel(x_ND, row_multiple)
        if kernel is not None:
            return kernel(x_ND, weights, counts)
        counts = counts.tolist()
    assert len(counts) == len(weights) and sum(counts) == x_ND.shape[0]
    if not torch.is_grad_enabled():
        return _grouped(x_ND, counts, row_multiple, weights)
    return _GroupedLinear.apply(x_ND, counts, row_multiple, *weights)


def varlen_causal_attention(
    q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKV: torch.Tensor, lengths: list[int], scale: float | None = None
) -> torch.Tensor:
    """Compute causal attention within each packed sequence. Query head h reads key/value head h // (H // K).

    ``scale``: of the scores; None: 1 / sqrt(C). Values may have other channels than keys; where they have fewer, they
    are padded, because flash kernels take equal numbers only.

    Adjacent sequences of equal length share a kernel call as a view [n, length, heads, C], without padding or copying;
    sorting sequences by length when packing reduces the number of calls.
    """
    assert sum(lengths) == q_NHC.shape[0]
    outputs, start, width = [], 0, v_NKV.shape[-1]
    if width < q_NHC.shape[-1]:
        v_NKV = F.pad(v_NKV, (0, q_NHC.shape[-1] - width))
    for length, run in groupby(lengths):
        n = len(list(run))
        rows = slice(start, start + n * length)
        q, k, v = (x[rows].unflatten(0, (n, length)).transpose(1, 2) for x in (q_NHC, k_NKC, v_NKV))
        grouped = q_NHC.shape[1] != k_NKC.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = rows.stop
    if not outputs:
        return q_NHC if width == q_NHC.shape[-1] else F.pad(q_NHC, (0, width - q_NHC.shape[-1]))
    out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return out if width == out.shape[-1] else out[..., :width]

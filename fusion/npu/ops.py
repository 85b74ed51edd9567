"""Operations for which a card has a fused kernel and the CPU needs another way to avoid padding.

Sequences are packed: one leading token dimension, no padding rows, lengths beside it.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F

BATCH_INVARIANT_ROWS = 16
"""Row counts are rounded up to this multiple where results must not depend on the batch: below it (and, in fp64,
between its multiples) a BLAS picks kernels by row count that add in another order."""


def linear(x_ND: torch.Tensor, weight_OD: torch.Tensor, row_multiple: int = 1) -> torch.Tensor:
    """x @ weight.T. With ``row_multiple`` > 1 rows are zero-padded up to it, so a row's bits do not depend on N."""
    rows = x_ND.shape[0]
    padding = -rows % row_multiple
    if padding == 0:
        return F.linear(x_ND, weight_OD)
    return F.linear(F.pad(x_ND, (0, 0, 0, padding)), weight_OD)[:rows]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: torch.Tensor, weight_EOD: torch.Tensor, counts: list[int], row_multiple: int):
        ctx.save_for_backward(x_ND, weight_EOD)
        ctx.counts = counts
        out = x_ND.new_empty(x_ND.shape[0], weight_EOD.shape[1])
        for x, y, weight in zip(x_ND.split(counts), out.split(counts), weight_EOD, strict=True):
            if x.shape[0] % row_multiple:
                y.copy_(linear(x, weight, row_multiple))
            elif x.shape[0]:
                torch.mm(x, weight.t(), out=y)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor):
        x_ND, weight_EOD = ctx.saved_tensors
        grad_NO = grads[0].contiguous()
        grad_x = torch.empty_like(x_ND)
        grad_weight = torch.zeros_like(weight_EOD)
        chunks = zip(x_ND.split(ctx.counts), grad_NO.split(ctx.counts), grad_x.split(ctx.counts), strict=True)
        for expert, (x, grad, gx) in enumerate(chunks):
            if x.shape[0]:
                torch.mm(grad, weight_EOD[expert], out=gx)
                torch.mm(grad.t(), x, out=grad_weight[expert])
        return grad_x, grad_weight, None, None


def grouped_linear(
    x_ND: torch.Tensor, weight_EOD: torch.Tensor, counts: list[int] | torch.Tensor, row_multiple: int = 1
) -> torch.Tensor:
    """Row block e of x (``counts[e]`` rows) times weight[e].T, without padding any block.

    A card with a grouped kernel uses it; elsewhere one matrix product a non-empty expert. ``counts`` may be a
    tensor: the kernel reads them on the card, the loop on the host.
    """
    assert len(counts) == weight_EOD.shape[0]
    if row_multiple == 1 and _has_grouped_kernel(x_ND, weight_EOD):
        ends = torch.as_tensor(counts, device=x_ND.device).cumsum(0, dtype=torch.int32)
        return F.grouped_mm(x_ND, weight_EOD.transpose(1, 2), offs=ends)
    counts = counts if isinstance(counts, list) else counts.tolist()
    assert sum(counts) == x_ND.shape[0]
    return _GroupedLinear.apply(x_ND, weight_EOD, counts, row_multiple)


def _has_grouped_kernel(x_ND: torch.Tensor, weight_EOD: torch.Tensor) -> bool:
    """On the CPU it is the same loop without Python around it, which a decode step feels; training keeps its own."""
    if any(width * x_ND.itemsize % 16 for width in weight_EOD.shape[1:]):
        return False
    if x_ND.device.type == "cuda":
        return x_ND.dtype == torch.bfloat16
    return x_ND.device.type == "cpu" and not torch.is_grad_enabled() and x_ND.dtype != torch.float64


def varlen_causal_attention(
    q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, lengths: list[int]
) -> torch.Tensor:
    """Causal attention inside each of the packed sequences. Query head h reads key/value head h // (H // K).

    Neighbouring sequences of one length share a kernel call as a view [n, length, heads, C]: nothing is padded and
    nothing is copied, and a packer that sorts by length makes the runs long.
    """
    assert sum(lengths) == q_NHC.shape[0]
    outputs, start = [], 0
    for length, run in groupby(lengths):
        n = len(list(run))
        rows = slice(start, start + n * length)
        q, k, v = (x[rows].unflatten(0, (n, length)).transpose(1, 2) for x in (q_NHC, k_NKC, v_NKC))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q_NHC.shape[1] != k_NKC.shape[1])
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = rows.stop
    if not outputs:
        return q_NHC
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

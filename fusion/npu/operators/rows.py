"""Compute what all tables share, on any device: products and sigmoids whose bits may be asked not to depend on the
other rows of a batch, sums of experts, and the gradients of their products."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH_INVARIANT_ROWS = 16
"""Multiple to which row counts are rounded up where results must not depend on the batch: below it (and, in fp64,
between its multiples) a BLAS selects kernels by row count that add in a different order."""


def linear(x_ND: Tensor, weight_OD: Tensor, row_multiple: int = 1) -> Tensor:
    """Compute x @ weight.T. With ``row_multiple`` > 1, N is zero-padded to a multiple of it, so that a row's bits do
    not depend on N."""
    rows = x_ND.shape[0]
    padding = -rows % row_multiple
    if padding == 0:
        return F.linear(x_ND, weight_OD)
    return F.linear(F.pad(x_ND, (0, 0, 0, padding)), weight_OD)[:rows]


def sigmoid(x: Tensor, row_multiple: int = 1) -> Tensor:
    """Compute the sigmoid of each element. With ``row_multiple`` > 1 its bits do not depend on the element's place:
    PyTorch's vector loop over a tensor rounds differently from the scalar one over what is left. No gradient then."""
    if row_multiple == 1:
        return x.sigmoid()
    x32 = x.to(torch.float32) if x.dtype in (torch.bfloat16, torch.float16) else x
    return (1 / (1 + (-x32).exp())).to(x.dtype)


def sum_of_local(y_NkD: Tensor, is_local_Nk: Tensor, weight_Nk: Tensor) -> Tensor:
    """Return the weighted sum [N, D] of the local ones of each row's experts. What the others' rows hold is ignored,
    whatever it is: memory that no product was written to."""
    y_NkD = torch.where(is_local_Nk.unsqueeze(-1), y_NkD, 0)
    return torch.bmm(weight_Nk.to(y_NkD.dtype).unsqueeze(1), y_NkD).squeeze(1)


class GroupedLinear(torch.autograd.Function):
    """Multiply row blocks of x by the matrices of a stack [E, O, D]: one ``product(x, weight, blocks)`` each for the
    result and for both gradients, of blocks of x's rows with the matrices of a stack, or of its columns with blocks of
    the weight's rows, joined. ``blocks``: which rows these are, as the product takes them."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, stack_EOD: Tensor, blocks: Tensor, product: Callable[..., Tensor]):
        ctx.save_for_backward(x_ND, stack_EOD, blocks)
        ctx.product = product
        return product(x_ND, stack_EOD.transpose(1, 2), blocks)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x_ND, stack_EOD, blocks = ctx.saved_tensors
        grad_NO = grads[0].contiguous()  # as a card's products require it
        needs_x, needs_stack, *_ = ctx.needs_input_grad
        grad_x = ctx.product(grad_NO, stack_EOD, blocks) if needs_x else None
        grad_stack = ctx.product(grad_NO.t(), x_ND, blocks) if needs_stack else None
        return grad_x, grad_stack, None, None

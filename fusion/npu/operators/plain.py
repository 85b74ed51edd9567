"""Compose every operation that a card may fuse of PyTorch's operators: the reference, and what a card without one runs.

A packed batch has one leading token dimension without padding rows, and a list of lengths. Names of dimensions: N rows,
D hidden, H query heads, K key and value heads, C channels of a head, R rotated channels, E experts, k experts of a row,
I inner channels of an expert, O output channels. Attention is inherited from `plain_attention.py`."""

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim.adamw import adamw

from fusion.npu.operators.gating import Gating, choose_with_scores, score, weigh
from fusion.npu.operators.plain_attention import PlainAttention
from fusion.npu.operators.rows import linear, sum_of_local

Rope = tuple[Tensor, Tensor]
"""Cosines and sines [N, 1, R] of the rotated channels; the sines of the first channel of each pair with the sign of the
rotation"""


Weights = Sequence[Tensor] | Tensor
"""A matrix [O, D] of each expert, or all of them stacked [E, O, D]"""
Matrices = tuple[Weights, Weights]
"""Gate and up [2 * I, D], and down [D, I], of each expert"""
Counts = list[int] | Tensor
"""Rows of each expert: on the host, or int64 [E] on the card"""


class Permuted(NamedTuple):
    """Rows [N * k, D] sorted by expert, one for each expert of each row; ``order`` int64 [N * k]: the place in [N, k]
    of each; ``counts_E`` int64 [E]: the number of each expert, on the card."""

    rows: Tensor
    order: Tensor
    counts_E: Tensor


class AdamWStates(NamedTuple):
    """Parameters, their gradients and both moments, float32, piece by piece."""

    params: list[Tensor]
    grads: list[Tensor]
    exp_avgs: list[Tensor]
    exp_avg_sqs: list[Tensor]


class AdamW(NamedTuple):
    """The numbers of an update. ``step``: number of updates before this one."""

    step: int
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    eps: float

    def by_torch(self, states: AdamWStates, steps: list[Tensor], *, fused: bool) -> None:
        """Update by PyTorch's function, in one fused operator or in one for each operation; ``steps``: as it takes
        them."""
        adamw(
            *states,
            [],
            steps,
            amsgrad=False,
            beta1=self.betas[0],
            beta2=self.betas[1],
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            maximize=False,
            foreach=not fused,
            fused=fused,
        )


class Plain(PlainAttention):
    """The table of operators. A card's own table inherits it, and replaces what the card fuses.

    A pass with gradients and one without run the same kernels, so that the log-probabilities that a trainer compares
    are computed alike. Only generation, in inference mode, may compute otherwise."""

    name = "plain"
    runs_ahead = False
    """Whether the host only starts operators, so that a layer may take the time of starting them, and of waiting"""
    stacks_experts = False
    """Whether grouped products take the stack [E, O, D] of all experts' matrices, which is then stored as one"""

    def __init__(self) -> None:
        self._reported: set[str] = set()

    def _report(self, message: str) -> None:
        """Warn, once, that a call runs otherwise than by the card's operator."""
        if message not in self._reported:
            self._reported.add(message)
            warnings.warn(message, stacklevel=4)

    # Norms and positions

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Normalise the last dimension by its root mean square, in float32 for any dtype of x, as transformers does."""
        if x.dtype == torch.float32:
            return F.rms_norm(x, x.shape[-1:], None, eps) * weight
        x32 = x.to(torch.float32)
        return weight * (x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return the norm of residual + x, and that sum."""
        total = residual + x
        return self.rms_norm(total, weight, eps), total

    def norm_rope(
        self, qkv_NhC: Tensor, q_norm_C: Tensor | None, k_norm_C: Tensor | None, rope: Rope, kv_heads: int, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Split the heads into queries [N, H, C], keys and values [N, K, C]; normalise queries and keys, then rotate
        them by their positions. ``q_norm_C``, ``k_norm_C``: None, both: queries and keys are not normalised. ``rope``:
        of the first R channels; the others are not rotated."""
        heads = qkv_NhC.shape[1] - 2 * kv_heads
        qk, v = qkv_NhC.split([heads + kv_heads, kv_heads], dim=1)
        # Queries and keys together: the time of a decode step grows with its number of operations.
        if q_norm_C is not None and k_norm_C is not None:
            weight = torch.cat([q_norm_C.expand(heads, -1), k_norm_C.expand(kv_heads, -1)])
            qk = Plain.rms_norm(self, qk, weight, eps)
        q, k = _rotate(qk, *rope).split([heads, kv_heads], dim=1)
        return q, k, v

    def rotate(self, x_NhR: Tensor, rope: Rope, interleaved: bool = False) -> Tensor:
        """Rotate heads by their positions, in all their channels. ``interleaved``: pairs are channels 2i and 2i + 1,
        not i and i + R / 2."""
        if not interleaved:
            return _rotate(x_NhR, *rope)
        swapped = x_NhR.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        return x_NhR * rope[0] + swapped * rope[1]

    # MLP and experts

    def swiglu(self, gate_up_NI: Tensor) -> Tensor:
        """Compute silu(gate) * up [N, I] of [N, 2 * I]."""
        gate, up = gate_up_NI.chunk(2, dim=-1)
        return F.silu(gate) * up

    def gate(
        self, logits_NE: Tensor, gating: Gating, correction_E: Tensor | None, row_multiple: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Return the weights of each row's experts, float32 [N, k], and these, int64 [N, k]; of equals the lower index.
        Without gradients. A card's own table may return narrower dtypes."""
        weight_Nk, expert_Nk = choose_with_scores(score(logits_NE, gating, row_multiple), gating, correction_E)
        return weigh(weight_Nk, gating), expert_Nk

    def permute(self, x_ND: Tensor, expert_Nk: Tensor, num_experts: int) -> Permuted:
        """Sort the rows by their experts; rows of one expert stay in order."""
        flat, k = expert_Nk.flatten(), expert_Nk.shape[1]
        counts_E = flat.new_zeros(num_experts).scatter_add_(0, flat, torch.ones_like(flat))
        # as floats, which are exact up to 2**24 experts: an NPU sorts no integers
        order = flat.to(torch.float32).argsort(stable=True)
        return Permuted(_Copied.apply(x_ND, order, k), order, counts_E)

    def unpermute(self, y: Tensor, order: Tensor, weight_Nk: Tensor) -> Tensor:
        """Return the weighted sum [N, D] of each row's experts, in the router's order, from y [N * k, D] in the order
        of `permute`."""
        y_NkD = torch.empty_like(y).index_copy_(0, order, y).unflatten(0, weight_Nk.shape)
        terms = (y_NkD * weight_Nk.to(y.dtype).unsqueeze(-1)).unbind(1)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total

    def takes_counts(self, x: Tensor, experts: int, row_multiple: int = 1) -> bool:
        """Return whether the products of ``experts`` take the number of rows of each from the card: then the host need
        not wait for it."""
        return False

    def grouped_linear(self, x_ND: Tensor, weights: Weights, counts: Counts, row_multiple: int = 1) -> Tensor:
        """Multiply row block e of x (``counts[e]`` rows) by ``weights[e].T`` [D, O], without padding any block. What is
        returned for rows behind the last block is undefined. Counts on the card are copied to the host, unless the
        table `takes_counts`."""
        if isinstance(counts, Tensor):
            counts = counts.tolist()
        if isinstance(weights, Tensor):
            weights = weights.unbind()
        if behind := x_ND.shape[0] - sum(counts):
            grouped = self.grouped_linear(x_ND[:-behind], weights, counts, row_multiple)
            return F.pad(grouped, (0, 0, 0, behind))
        assert len(counts) == len(weights)
        if not torch.is_grad_enabled():
            return _grouped(x_ND, counts, row_multiple, weights)
        return _GroupedLinear.apply(x_ND, counts, row_multiple, *weights)

    def experts(self, x: Tensor, counts: Counts, matrices: Matrices, row_multiple: int = 1) -> Tensor:
        """Return the SwiGLU of each expert on its rows of x, which are sorted by expert."""
        gate_up, down = matrices
        inner = self.swiglu(self.grouped_linear(x, gate_up, counts, row_multiple))
        return self.grouped_linear(inner, down, counts, row_multiple)

    def local_experts(
        self, x_ND: Tensor, expert_Nk: Tensor, weight_Nk: Tensor, num_experts: int, local: range, matrices: Matrices
    ) -> Tensor:
        """Return the weighted sum [N, D] of those experts of each row that are ``local``, whose matrices these are.
        Without gradients. The host waits only if the table does not `takes_counts`."""
        turned_Nk = (expert_Nk.to(torch.int64) - local.start) % num_experts  # the local ones come first
        rows, order, counts_E = Plain.permute(self, x_ND, turned_Nk, num_experts)
        y = self.experts(rows, counts_E[: len(local)], matrices)
        y_NkD = torch.empty_like(y).index_copy_(0, order, y).unflatten(0, weight_Nk.shape)
        return sum_of_local(y_NkD, turned_Nk < len(local), weight_Nk)

    def max_dispatched_rows(self, ranks: int, num_experts: int, top_k: int, *, hidden: int, dtype: torch.dtype) -> int:
        """Return how many rows of each of so many EP ranks `dispatched_experts` takes; 0: there is no such operator."""
        return 0

    def dispatched_experts(
        self, x_nD: Tensor, expert_nk: Tensor, weight_nk: Tensor, group: ProcessGroup, max_rows: int, matrices: Matrices
    ) -> Tensor:
        """Return the weighted sum [n, D] of each row's experts, whichever rank of ``group`` holds them: rank r the r-th
        of equal shares, of which these are the matrices. Without gradients; collective. ``group``: in which no other
        operator communicates. ``max_rows``: of any rank, each of which has at least one."""
        raise NotImplementedError(f"the {self.name} operators dispatch no rows")

    # Optimizer

    def adamw(self, states: AdamWStates, update: AdamW) -> None:
        """Update parameters and moments, float32 all, in place (Loshchilov and Hutter, arXiv 1711.05101)."""
        update.by_torch(states, [torch.tensor(float(update.step)) for _ in states.params], fused=False)


def _rotate(x_NhC: Tensor, cos_N1R: Tensor, sin_N1R: Tensor) -> Tensor:
    rotated, passed = x_NhC, None
    if cos_N1R.shape[-1] < x_NhC.shape[-1]:
        rotated, passed = x_NhC.tensor_split([cos_N1R.shape[-1]], dim=-1)
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos_N1R + torch.cat([second, first], dim=-1) * sin_N1R
    return rotated if passed is None else torch.cat([rotated, passed], dim=-1)


def _grouped(x_ND: Tensor, counts: list[int], row_multiple: int, weights: Sequence[Tensor]) -> Tensor:
    out = x_ND.new_empty(x_ND.shape[0], weights[0].shape[0])
    for rows, x, y, weight in zip(counts, x_ND.split(counts), out.split(counts), weights, strict=True):
        if rows % row_multiple:
            y.copy_(linear(x, weight, row_multiple))
        elif rows:
            torch.mm(x, weight.t(), out=y)
    return out


class _Copied(torch.autograd.Function):
    """Copy each row k times, in ``order``. The gradient of a row is the sum of its copies', in the order of its
    experts: the backward pass of an index would add them as they come."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, order: Tensor, k: int):
        ctx.order, ctx.k = order, k
        return x_ND.index_select(0, order // k)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        (grad,) = grads
        copies = torch.empty_like(grad).index_copy_(0, ctx.order, grad)
        return copies.unflatten(0, (-1, ctx.k)).sum(1), None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, counts: list[int], row_multiple: int, *weights: Tensor):
        ctx.save_for_backward(x_ND, *weights)
        ctx.counts = counts
        return _grouped(x_ND, counts, row_multiple, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor):
        x_ND, *weights = ctx.saved_tensors
        grad_NO = grads[0].contiguous()
        grad_x = torch.empty_like(x_ND)
        grad_weights: list[Tensor | None] = []
        chunks = zip(x_ND.split(ctx.counts), grad_NO.split(ctx.counts), grad_x.split(ctx.counts), strict=True)
        for weight, (x, grad, gx) in zip(weights, chunks, strict=True):
            # An expert without rows gets no gradient instead of a zero one, which would have to be added.
            needed = x.shape[0] and ctx.needs_input_grad[3 + len(grad_weights)]
            grad_weights.append(torch.mm(grad.t(), x) if needed else None)
            if x.shape[0]:
                torch.mm(grad, weight, out=gx)
        return grad_x, None, None, *grad_weights

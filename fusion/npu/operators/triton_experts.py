"""Fuse, in Triton, what a decode step does with its experts between their matrix products.

Each function launches one kernel. Results are rounded once, from float32. Imported only where Triton is: with
`TRITON_INTERPRET=1` the kernels run on a host.

Names of dimensions: N rows, D hidden, E experts, k experts of a row, I inner channels."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024
"""Columns of a wide row, or experts of rows, that a program takes at a time"""


def gate(logits_NE: Tensor, top_k: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
    """Return the softmax of each row's largest logits, float32 [N, k], and their experts, int64 [N, k]; of equals the
    lower. ``normalise``: over these alone, not all."""
    logits_NE = logits_NE.contiguous()
    rows, experts = logits_NE.shape
    weights = logits_NE.new_empty(rows, top_k, dtype=torch.float32)
    chosen = logits_NE.new_empty(rows, top_k, dtype=torch.int64)
    if rows:
        _gate[rows,](
            *(logits_NE, weights, chosen, experts),
            TOP=top_k,
            TOPS=triton.next_power_of_2(top_k),
            NORMALISE=normalise,
            BLOCK=triton.next_power_of_2(experts),
            num_warps=1,
        )
    return weights, chosen


@triton.jit
def _gate(
    logits,
    weights,
    chosen,
    experts,
    TOP: tl.constexpr,
    TOPS: tl.constexpr,
    NORMALISE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, at, places = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, TOPS)
    left = tl.load(logits + row * experts + at, at < experts, float("-inf")).to(tl.float32)
    top = tl.max(left)
    total = tl.sum(tl.exp(left - top))
    best = tl.full([TOPS], float("-inf"), tl.float32)
    indices = tl.zeros([TOPS], tl.int32)
    for place in tl.static_range(TOP):
        value, index = tl.max(left, 0, return_indices=True)
        best = tl.where(places == place, value, best)
        indices = tl.where(places == place, tl.minimum(index, experts - 1), indices)
        left = tl.where(at == index, float("-inf"), left)
    scores = tl.exp(best - top)
    if NORMALISE:
        total = tl.sum(scores)
    tl.store(weights + row * TOP + places, scores / total, places < TOP)
    tl.store(chosen + row * TOP + places, indices.to(tl.int64), places < TOP)


class SortedRows(NamedTuple):
    """Rows sorted by expert. ``sources`` int32 [N * k]: the row of each place; ``places`` int32 [N * k]: the place of
    each cell of [N, k]; ``counts`` int64 [E]: rows of each expert; ``ends`` int32 [E]: the place behind its last."""

    sources: Tensor
    places: Tensor
    counts: Tensor
    ends: Tensor


def route(expert_Nk: Tensor, experts: int, start: int = 0) -> SortedRows:
    """Sort rows by their experts, from expert ``start`` on, round to the one before it; rows of one expert stay in
    order."""
    expert_Nk = expert_Nk.contiguous()
    pairs, k = expert_Nk.numel(), expert_Nk.shape[1]
    sources, places = (expert_Nk.new_empty(pairs, dtype=torch.int32) for _ in range(2))
    counts, ends = (expert_Nk.new_empty(experts, dtype=dtype) for dtype in (torch.int64, torch.int32))
    _route[experts,](expert_Nk, sources, places, counts, ends, pairs, k, experts, start, BLOCK=COLUMNS, num_warps=4)
    return SortedRows(sources, places, counts, ends)


@triton.jit
def _route(chosen, sources, places, counts, ends, pairs, k, experts, start, BLOCK: tl.constexpr):
    expert, at = tl.program_id(0), tl.arange(0, BLOCK)
    before, mine = 0, 0
    for first in range(0, pairs, BLOCK):
        inside = first + at < pairs
        turned = (tl.load(chosen + first + at, inside, 0).to(tl.int32) - start + experts) % experts
        before += tl.sum(((turned < expert) & inside).to(tl.int32))
        mine += tl.sum(((turned == expert) & inside).to(tl.int32))
    tl.store(counts + expert, mine)
    tl.store(ends + expert, before + mine)
    for first in range(0, pairs, BLOCK):
        inside = first + at < pairs
        turned = (tl.load(chosen + first + at, inside, 0).to(tl.int32) - start + experts) % experts
        is_mine = (turned == expert) & inside
        place = before + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        tl.store(places + first + at, place, is_mine)
        tl.store(sources + place, (first + at) // k, is_mine)
        before += tl.sum(is_mine.to(tl.int32))


def gather(x_ND: Tensor, sources: Tensor) -> Tensor:
    """Return the rows of x in the order of ``sources``."""
    x_ND = x_ND.contiguous()
    rows, width = sources.shape[0], x_ND.shape[1]
    out = x_ND.new_empty(rows, width)
    if rows:
        _gather[rows, triton.cdiv(width, COLUMNS)](x_ND, sources, out, width, BLOCK=COLUMNS, num_warps=4)
    return out


@triton.jit
def _gather(x, sources, out, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    source = tl.load(sources + row).to(tl.int64)
    tl.store(out + row * width + at, tl.load(x + source * width + at, at < width), at < width)


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) * up [N, I] of [N, 2 * I]."""
    gate_up = gate_up.contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        _swiglu[rows, triton.cdiv(width, COLUMNS)](gate_up, out, width, BLOCK=COLUMNS, num_warps=4)
    return out


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * width + at, inside, 0.0).to(tl.float32)
    tl.store(out + row * width + at, gate / (1 + tl.exp(-gate)) * up, inside)


def unroute(y: Tensor, places: Tensor, weight_Nk: Tensor, ends: Tensor | None = None) -> Tensor:
    """Return the weighted sum [N, D] of the rows of y [N * k, D] at each row's ``places``. ``ends``: of some experts;
    the rows behind the last one's are not read. None: all are."""
    y = y.contiguous()
    (rows, k), width = weight_Nk.shape, y.shape[1]
    out = y.new_empty(rows, width)
    if rows:
        _unroute[rows, triton.cdiv(width, COLUMNS)](
            *(y, places, weight_Nk.contiguous(), None if ends is None else ends[-1:], out, k, width),
            SOME=ends is not None,
            BLOCK=COLUMNS,
            num_warps=4,
        )
    return out


@triton.jit
def _unroute(y, places, weights, end_of_read, out, k, width, SOME: tl.constexpr, BLOCK: tl.constexpr):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    if SOME:
        end = tl.load(end_of_read)
    for place in range(k):
        source = tl.load(places + row * k + place)
        read_width = width
        if SOME:
            read_width = tl.where(source < end, width, 0)
        read = tl.load(y + source.to(tl.int64) * width + at, at < read_width, 0.0).to(tl.float32)
        total += read * tl.load(weights + row * k + place).to(tl.float32)
    tl.store(out + row * width + at, total, at < width)

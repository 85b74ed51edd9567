"""Fuse, in Triton, what a decode step does between its matrix products.

Each function launches one kernel; `attend` a second one where it splits the keys of a row. Results are rounded once,
from float32. Imported only where Triton is: with `TRITON_INTERPRET=1` the kernels run on a host.

Names of dimensions: N rows, D hidden, H query heads, K key and value heads, G of the former that share one of the
latter, C channels of a head, R rotated channels, E experts, k experts of a row, I inner channels, S splits.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

COLUMNS = 1024
"""Columns of a wide row that a program takes"""
TOKENS = 64
"""Keys of a row that a program reads at a time; divides the tokens of a page"""
INVARIANT_TOKENS = 512
"""Keys of a split where a row's bits must not depend on the other rows"""
PROGRAMS = 1024
"""Programs of attention that keep a card busy"""


def add_rms_norm(
    x_ND: torch.Tensor, residual_ND: torch.Tensor, weight_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of residual + x, and that sum."""
    x_ND, residual_ND = x_ND.contiguous(), residual_ND.contiguous()
    out, total, (rows, width) = torch.empty_like(x_ND), torch.empty_like(x_ND), x_ND.shape
    if rows:
        _add_rms_norm[rows,](
            x_ND, residual_ND, weight_D, out, total, width, eps, BLOCK=triton.next_power_of_2(width), num_warps=8
        )
    return out, total


@triton.jit
def _add_rms_norm(x, residual, weight, out, total, width, eps, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < width
    row = tl.program_id(0).to(tl.int64) * width + at
    added = tl.load(x + row, inside, 0.0).to(tl.float32) + tl.load(residual + row, inside, 0.0).to(tl.float32)
    rounded = added.to(total.dtype.element_ty)
    tl.store(total + row, rounded, inside)
    wide = rounded.to(tl.float32)
    normed = wide * tl.math.rsqrt(tl.sum(wide * wide) / width + eps)
    tl.store(out + row, normed * tl.load(weight + at, inside, 0.0).to(tl.float32), inside)


def norm_rope(
    qkv_NhC: torch.Tensor,
    q_norm_C: torch.Tensor | None,
    k_norm_C: torch.Tensor | None,
    cos_N1R: torch.Tensor,
    sin_N1R: torch.Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the queries [N, H, C] and the keys [N, K, C], normalised unless the weights are None, and rotated."""
    qkv_NhC = qkv_NhC.contiguous()
    rows, heads, channels = qkv_NhC.shape
    q = qkv_NhC.new_empty(rows, heads - 2 * kv_heads, channels)
    k = qkv_NhC.new_empty(rows, kv_heads, channels)
    if rows:
        _norm_rope[rows, heads - kv_heads](
            *(qkv_NhC, q_norm_C, k_norm_C, cos_N1R.contiguous(), sin_N1R.contiguous(), q, k),
            *(heads, kv_heads, channels, cos_N1R.shape[-1], eps),
            NORMS=q_norm_C is not None,
            BLOCK=triton.next_power_of_2(channels),
            num_warps=1,
        )
    return q, k


@triton.jit
def _norm_rope(
    qkv,
    q_norm,
    k_norm,
    cos,
    sin,
    q,
    k,
    heads,
    kv_heads,
    channels,
    rotated,
    eps,
    NORMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, BLOCK)
    inside, turns = at < channels, at < rotated
    pair = tl.where(at < rotated // 2, at + rotated // 2, at - rotated // 2)
    values = qkv + (row * heads + head) * channels
    own = tl.load(values + at, inside, 0.0).to(tl.float32)
    other = tl.load(values + pair, turns, 0.0).to(tl.float32)
    q_heads = heads - 2 * kv_heads
    if NORMS:
        scale = tl.math.rsqrt(tl.sum(own * own) / channels + eps)
        if head < q_heads:
            own = own * scale * tl.load(q_norm + at, inside, 0.0).to(tl.float32)
            other = other * scale * tl.load(q_norm + pair, turns, 0.0).to(tl.float32)
        else:
            own = own * scale * tl.load(k_norm + at, inside, 0.0).to(tl.float32)
            other = other * scale * tl.load(k_norm + pair, turns, 0.0).to(tl.float32)
    cosine = tl.load(cos + row * rotated + at, turns, 1.0).to(tl.float32)
    sine = tl.load(sin + row * rotated + at, turns, 0.0).to(tl.float32)
    result = own * cosine + other * sine
    if head < q_heads:
        tl.store(q + (row * q_heads + head) * channels + at, result, inside)
    else:
        tl.store(k + (row * kv_heads + head - q_heads) * channels + at, result, inside)


def store(
    pool: torch.Tensor, slots: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor, repeated: torch.Tensor | None
) -> None:
    """Write keys and values, as `PlainAttention.store_kv` documents it."""
    rows, kv_heads, channels = k_NKC.shape
    again = 0 if repeated is None else repeated.shape[0]
    if rows + again:
        _store[rows + again, 2 * kv_heads](
            *(pool, slots, k_NKC, v_NKC, repeated, rows, rows + again, kv_heads, channels),
            *(k_NKC.stride(0), k_NKC.stride(1), v_NKC.stride(0), v_NKC.stride(1)),
            REPEATS=again > 0,
            BLOCK=triton.next_power_of_2(channels),
            num_warps=1,
        )


@triton.jit
def _store(
    pool,
    slots,
    keys,
    values,
    repeated,
    rows,
    written,
    kv_heads,
    channels,
    k_row,
    k_head,
    v_row,
    v_head,
    REPEATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    target, part, head = tl.program_id(0).to(tl.int64), tl.program_id(1) // kv_heads, tl.program_id(1) % kv_heads
    row = target
    if REPEATS:
        if target >= rows:
            row = tl.load(repeated + target - rows).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < channels
    if part == 0:
        read = tl.load(keys + row * k_row + head * k_head + at, inside)
    else:
        read = tl.load(values + row * v_row + head * v_head + at, inside)
    slot = tl.load(slots + (part * written + target) * kv_heads + head)
    tl.store(pool + slot * channels + at, read, inside)


def attend(
    q_NHC: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks_NB: torch.Tensor,
    lengths: torch.Tensor,
    longest: int,
    scale: float,
    *,
    invariant: bool,
) -> torch.Tensor:
    """Return the attention [N, H, C] of each row over its blocks, as in FlashAttention (Dao et al., 2022); its keys are
    split over programs where there are too few rows, and the results of the splits joined (Flash-Decoding).

    Args:
        keys, values: [blocks, K, page, C].
        blocks_NB: int32, the blocks of each row, then any others.
        longest: at least the largest of ``lengths``.
        invariant: the splits of a row do not depend on the other rows.
    """
    q_NHC = q_NHC.contiguous()
    (rows, heads, channels), (_, kv_heads, page, _) = q_NHC.shape, keys.shape
    split = INVARIANT_TOKENS
    if not invariant:
        per_row = max(1, PROGRAMS // (rows * kv_heads))
        split = max(4 * TOKENS, triton.cdiv(triton.cdiv(longest, per_row), TOKENS) * TOKENS)
    splits = triton.cdiv(longest, split)
    out, group = torch.empty_like(q_NHC), heads // kv_heads
    parts = out if splits == 1 else q_NHC.new_empty(rows, heads, splits, channels, dtype=torch.float32)
    sums = q_NHC.new_empty(2, rows, heads, splits, dtype=torch.float32)
    block = max(16, triton.next_power_of_2(channels))
    _attend[rows, kv_heads, splits](
        *(q_NHC, keys, values, blocks_NB, lengths, parts, sums[0], sums[1]),
        *(scale * 1.4426950408889634, blocks_NB.stride(0), page, channels, split, kv_heads, splits),
        GROUP=group,
        HEADS=max(16, triton.next_power_of_2(group)),
        TOKENS=TOKENS,
        BLOCK=block,
        WHOLE=splits == 1,
        num_warps=4,
        num_stages=3,
    )
    if splits > 1:
        _join[rows * heads,](
            parts, sums[0], sums[1], lengths, out, channels, heads, split, splits, BLOCK=block, num_warps=1
        )
    return out


@triton.jit
def _attend(
    q,
    keys,
    values,
    table,
    lengths,
    parts,
    tops,
    totals,
    scale,
    width,
    page,
    channels,
    split,
    kv_heads,
    splits,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    start = part * split
    stop = tl.minimum(start + split, tl.load(lengths + row).to(tl.int32))
    heads, at, tokens = tl.arange(0, HEADS), tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    inside = at < channels
    mine = (row * kv_heads + kv_head) * GROUP + heads
    is_head = heads < GROUP
    queries = tl.load(q + mine[:, None] * channels + at[None, :], is_head[:, None] & inside[None, :], 0.0)
    top = tl.full([HEADS], float("-inf"), tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    result = tl.zeros([HEADS, BLOCK], tl.float32)
    for first in range(start, stop, TOKENS):
        block = tl.load(table + row * width + first // page).to(tl.int64)
        places = ((block * kv_heads + kv_head) * page + first % page + tokens) * channels
        is_read = first + tokens < stop
        key = tl.load(keys + places[None, :] + at[:, None], is_read[None, :] & inside[:, None], 0.0)
        scores = tl.where(is_read[None, :], tl.dot(queries, key) * scale, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.math.exp2(scores - higher[:, None])
        before = tl.math.exp2(top - higher)
        value = tl.load(values + places[:, None] + at[None, :], is_read[:, None] & inside[None, :], 0.0)
        total = total * before + tl.sum(weights, 1)
        result = result * before[:, None] + tl.dot(weights.to(value.dtype), value)
        top = higher
    if WHOLE:
        result = result / total[:, None]
        tl.store(parts + mine[:, None] * channels + at[None, :], result, is_head[:, None] & inside[None, :])
    elif start < stop:
        here = mine * splits + part
        tl.store(parts + here[:, None] * channels + at[None, :], result, is_head[:, None] & inside[None, :])
        tl.store(tops + here, top, is_head)
        tl.store(totals + here, total, is_head)


@triton.jit
def _join(parts, tops, totals, lengths, out, channels, heads, split, splits, BLOCK: tl.constexpr):
    head = tl.program_id(0).to(tl.int64)
    used = tl.cdiv(tl.load(lengths + head // heads).to(tl.int32), split)
    at = tl.arange(0, BLOCK)
    inside = at < channels
    top = float("-inf")
    for part in range(used):
        top = tl.maximum(top, tl.load(tops + head * splits + part))
    total = 0.0
    result = tl.zeros([BLOCK], tl.float32)
    for part in range(used):
        here = head * splits + part
        factor = tl.math.exp2(tl.load(tops + here) - top)
        total += tl.load(totals + here) * factor
        result += tl.load(parts + here * channels + at, inside, 0.0) * factor
    tl.store(out + head * channels + at, result / total, inside)


def gate(logits_NE: torch.Tensor, top_k: int, *, normalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
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


class Routed(NamedTuple):
    """Rows sorted by expert. ``sources`` int32 [N * k]: the row of each place; ``places`` int32 [N * k]: the place of
    each cell of [N, k]; ``counts`` int64 [E]: rows of each expert; ``ends`` int32 [E]: the place behind its last."""

    sources: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor


def route(expert_Nk: torch.Tensor, experts: int, start: int = 0) -> Routed:
    """Sort rows by their experts, from expert ``start`` on, round to the one before it; rows of one expert stay in
    order."""
    expert_Nk = expert_Nk.contiguous()
    pairs, k = expert_Nk.numel(), expert_Nk.shape[1]
    sources, places = (expert_Nk.new_empty(pairs, dtype=torch.int32) for _ in range(2))
    counts, ends = (expert_Nk.new_empty(experts, dtype=dtype) for dtype in (torch.int64, torch.int32))
    _route[experts,](expert_Nk, sources, places, counts, ends, pairs, k, experts, start, BLOCK=COLUMNS, num_warps=4)
    return Routed(sources, places, counts, ends)


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


def gather(x_ND: torch.Tensor, sources: torch.Tensor) -> torch.Tensor:
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


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
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


def unroute(
    y: torch.Tensor, places: torch.Tensor, weight_Nk: torch.Tensor, ends: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the weighted sum [N, D] of the rows of y [N * k, D] at each row's ``places``.

    Args:
        ends: of some experts; the rows behind the last one's are not read. None: all are.
    """
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

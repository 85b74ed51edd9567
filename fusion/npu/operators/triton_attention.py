"""Fuse, in Triton, what a decode step does around attention between its matrix products.

Each function launches one kernel; `attend` a second one where it splits the keys of a row. Results are rounded once,
from float32. Imported only where Triton is: with `TRITON_INTERPRET=1` the kernels run on a host.

Names of dimensions: N rows, D hidden, H query heads, K key and value heads, C channels of a head, R rotated channels.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = math.log2(math.e)
TOKENS = 64
"""Keys of a row that a program reads at a time; divides the tokens of a page"""
INVARIANT_TOKENS = 512
"""Keys of a split where a row's bits must not depend on the other rows"""
PROGRAMS = 1024
"""Programs of attention that keep a card busy"""


def add_rms_norm(x_ND: Tensor, residual_ND: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
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
    qkv_NhC: Tensor,
    q_norm_C: Tensor | None,
    k_norm_C: Tensor | None,
    cos_N1R: Tensor,
    sin_N1R: Tensor,
    kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
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


def store(pool: Tensor, slots: Tensor, k_NKC: Tensor, v_NKC: Tensor, repeated: Tensor | None) -> None:
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
    q_NHC: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks_NB: Tensor,
    lengths: Tensor,
    longest: int,
    scale: float,
    *,
    invariant: bool,
) -> Tensor:
    """Return the attention [N, H, C] of each row over its blocks, as in FlashAttention (Dao et al., 2022); its keys are
    split over programs where there are too few rows, and the results of the splits joined (Flash-Decoding).
    ``keys``, ``values``: [blocks, K, page, C].
    ``blocks_NB``: int32, the blocks of each row, then any others.
    ``longest``: at least the largest of ``lengths``.
    ``invariant``: the splits of a row do not depend on the other rows."""
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
        *(scale * LOG2_E, blocks_NB.stride(0), page, channels, split, kv_heads, splits),
        GROUP=group,
        HEADS=max(16, triton.next_power_of_2(group)),
        TOKENS=TOKENS,
        BLOCK=block,
        WHOLE=splits == 1,
        num_warps=4,
        num_stages=3 if block <= 128 else 2,  # within the shared memory of an A100
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

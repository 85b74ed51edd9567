"""Compute attention over the paged KV cache; the engine passes it to the model as `attend`.

Paged rows, where there is a fused operator: one call for all of them (`PagedRows`). Else (`attend_rows`) every (row,
block) pair is one small matrix product, so sequences of different lengths need no padding except in their last block.
The softmax is combined from blocks as in FlashAttention (Dao et al., 2022): first the row's maximum over all blocks,
then sums over the blocks.

With `rollout.batch_invariant` every token is a paged row and no stretch of the pool is read in place: pairs are
independent and summed in the order of the row's blocks, so a row's result is bitwise independent of the batch. Without
it, the rest of the batch decides how a row is computed.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusion.inference.batch import Batch, LongChunk
from fusion.inference.kv_cache import KVCache, score_dtype
from fusion.inference.paged_rows import PagedRows, RowSlice
from fusion.npu.fused import operators_for
from fusion.npu.ops import varlen_causal_attention


class PagedAttention:
    """Implements `Attend` for one step: writes the step's keys and values to the cache, then attends."""

    def __init__(self, cache: KVCache, batch: Batch):
        self.cache, self.batch = cache, batch

    def __call__(self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor) -> torch.Tensor:
        pool, batch = self.cache.pools[layer], self.batch
        _store(pool, batch, k_NKC, v_NKC)
        out = [
            _attend_paged(q_NHC[part.start : part.stop], pool, part)
            if isinstance(part, PagedRows)
            else attend_rows(q_NHC[part.start : part.stop], pool, part, workspace=self.cache.workspace)
            for part in batch.rows
        ]
        start, stop, lengths = batch.packed
        if lengths:
            out.append(
                varlen_causal_attention(q_NHC[start:stop], k_NKC[start:stop], v_NKC[start:stop], lengths=lengths)
            )
        out += [_attend_chunk(q_NHC[chunk.start : chunk.stop], pool, chunk) for chunk in batch.long]
        if not out:
            return q_NHC
        return out[0] if len(out) == 1 else torch.cat(out)


def _store(pool: torch.Tensor, batch: Batch, k_NKC: torch.Tensor, v_NKC: torch.Tensor) -> None:
    """Write keys and values to the batch's slots of the pool."""
    if (operators := operators_for(pool)) is not None:
        operators.store_kv(pool, batch.slots, k_NKC, v_NKC, batch.repeated)
        return
    written = [k_NKC, v_NKC]
    if batch.repeated is not None:
        written = [k_NKC, k_NKC.index_select(0, batch.repeated), v_NKC, v_NKC.index_select(0, batch.repeated)]
    channels = k_NKC.shape[-1]
    pool.view(-1, channels).index_copy_(0, batch.slots, torch.cat(written).view(-1, channels))


def _attend_paged(q_RHC: torch.Tensor, pool: torch.Tensor, rows: PagedRows) -> torch.Tensor:
    operators = operators_for(q_RHC)
    assert operators is not None, "only a fused operator reads blocks by a table"
    return operators.paged_attention(q_RHC, pool, rows.table, rows.first, rows.lengths)


def attend_rows(q_RHC: torch.Tensor, pool: torch.Tensor, part: RowSlice, workspace: torch.Tensor) -> torch.Tensor:
    """Compute the attention of each row over its blocks of the pool. Returns [R, H, C]."""
    rows, heads, channels = q_RHC.shape
    block_size, pairs = pool.shape[2], part.owner.shape[0]
    dtype = score_dtype(q_RHC.dtype)
    in_order = part.stretch == (0, 0)
    single = in_order and pairs == rows  # each row has one block
    q = (q_RHC.to(dtype) * channels**-0.5).view(rows, -1)
    if not single:
        q = q.index_select(0, part.owner)
    keys, values = _read_blocks(pool, part, workspace=workspace, dtype=dtype)

    scores = _products(q.view(pairs * pool.shape[1], -1, channels), [k.transpose(1, 2) for k in keys])
    scores = scores.view(pairs, heads, block_size)
    scores += part.bias
    top = scores.amax(-1)
    if not single:
        if not in_order or pairs != rows * part.width:
            cells = top.new_full((rows * part.width + 1, heads), -torch.inf)
            top = cells.index_copy_(0, part.place, top)[:-1]
        top = top.view(rows, part.width, heads).amax(1).index_select(0, part.owner)
    weights = scores.sub_(top.unsqueeze(-1)).exp_()
    total = weights.sum(-1)
    out = _products(weights.view(pairs * pool.shape[1], -1, block_size), values).view(pairs, heads * channels)
    if not single:
        total = total.new_zeros(rows, heads).index_add_(0, part.owner, total)
        out = out.new_zeros(rows, heads * channels).index_add_(0, part.owner, out)
    return (out.view(rows, heads, channels) / total.unsqueeze(-1)).to(q_RHC.dtype)


def _read_blocks(
    pool: torch.Tensor, part: RowSlice, workspace: torch.Tensor, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return keys and values [n * K, block_size, C] of the stretch (not copied) and of the gathered blocks, as far as
    there are any."""
    pieces_of_kv = []
    if part.stretch != (0, 0):
        pieces_of_kv.append(pool.unflatten(0, (2, -1))[:, slice(*part.stretch)])
    count = part.pieces.shape[0]
    if count:
        pieces_of_kv.append(torch.index_select(pool, 0, part.pieces, out=workspace[:count]).unflatten(0, (2, -1)))
    keys, values = zip(*(kv.to(dtype).flatten(1, 2) for kv in pieces_of_kv), strict=True)
    return list(keys), list(values)


def _products(x: torch.Tensor, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Multiply x [n, r, c] by the n matrices that the pieces hold in order."""
    if len(pieces) == 1:
        return torch.bmm(x, pieces[0])
    parts = x.split([len(piece) for piece in pieces])
    return torch.cat([torch.bmm(part, piece) for part, piece in zip(parts, pieces, strict=True)])


def _attend_chunk(q_THC: torch.Tensor, pool: torch.Tensor, chunk: LongChunk) -> torch.Tensor:
    def sequence(blocks: torch.Tensor) -> torch.Tensor:
        return blocks.transpose(0, 1).flatten(1, 2)[:, : chunk.length].unsqueeze(0)

    keys, values = pool.index_select(0, chunk.pieces).chunk(2)
    out = F.scaled_dot_product_attention(
        q_THC.transpose(0, 1).unsqueeze(0),
        sequence(keys),
        sequence(values),
        attn_mask=chunk.mask,
        enable_gqa=q_THC.shape[1] != pool.shape[1],
    )
    return out.squeeze(0).transpose(0, 1)

"""Compute attention over the paged KV cache; the engine passes it to the model as `attend`.

Of layers with latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) the cache holds latents. Paged rows absorb
the projections of keys and values: their queries are projected instead, and all heads attend to the latents as to one
key head, whose values are its first channels. Packed prompts expand the latents to keys and values of each head. So do
long chunks where a card's operator attends to them without a mask; else they do what takes less arithmetic
(`KVLayout.absorbs`).

Paged rows, where there is a fused operator: one call for all of them (`PagedRows`). Else (`attend_rows`) every (row,
block) pair is one small matrix product, so sequences of different lengths need no padding except in their last block.
The softmax is combined from blocks as in FlashAttention (Dao et al., 2022): first the row's maximum over all blocks,
then sums over the blocks.

With `rollout.engine.batch_invariant` every token is a paged row and no stretch of the pool is read in place: pairs are
independent and, on a host, summed in the order of the row's blocks, so a row's result is bitwise independent of the
batch. A card promises no such order: there only a table that reads blocks itself is accepted. Without it, the rest of
the batch decides how a row is computed.

With decode context parallelism (`Context`) paged rows attend with the heads of several ranks to the part of their
tokens that is on this one, and partial results are merged; a long chunk attends to KV gathered from these ranks.
"""

from collections.abc import Callable
from typing import Any

import torch

from fusion.inference.batch import Batch, LongChunk
from fusion.inference.kv_cache import KVCache, score_dtype
from fusion.inference.kv_layout import KVLayout
from fusion.inference.paged_rows import RowSlice
from fusion.model.attention import Pair, Up
from fusion.npu.operators import PagedRows, lower_right_mask

MAX_SCORES = 1 << 26
"""Maximum scores of an absorbed chunk that are computed at a time (at least one row): bounds their memory."""


class PagedAttention:
    """Implement `Attend` for one step: write the step's keys and values to the cache, then attend."""

    def __init__(self, cache: KVCache, batch: Batch):
        self.cache, self.batch, self.operators = cache, batch, cache.device.operators

    def __call__(self, layer: int, q_NHC: torch.Tensor, k_NKC: torch.Tensor, v_NKC: torch.Tensor) -> torch.Tensor:
        pool, batch = self.cache.pools[layer], self.batch
        self._store(self.operators.store_kv, pool, k_NKC, v_NKC)
        out = self._attend_rows(q_NHC, pool, scale=self.cache.layout.width**-0.5)
        start, stop, lengths = batch.packed
        if lengths:
            whole = q_NHC[start:stop], k_NKC[start:stop], v_NKC[start:stop]
            out.append(self.operators.varlen_attention(*whole, lengths))
        for chunk in batch.long:
            keys, values = (_in_order(part, chunk) for part in self._blocks_of(pool, chunk).chunk(2))
            q = q_NHC[chunk.start : chunk.stop]
            out.append(self.operators.varlen_attention(q, keys, values, chunk.lengths, None, chunk.kv_lengths))
        return _join(out) if out else q_NHC

    def latent(self, layer: int, q: Pair, latent: Pair, up: Up) -> torch.Tensor:
        pool, batch = self.cache.pools[layer], self.batch
        self._store(self.operators.store_latents, pool, *latent)
        out: list[torch.Tensor] = []
        start, stop, lengths = batch.packed
        if batch.rows:
            out.append(up.values(self._attend_latent_rows((q[0][:start], q[1][:start]), pool, up)))
        if lengths:
            k, v = up.expand(*(x[start:stop] for x in latent))
            packed = torch.cat([x[start:stop] for x in q], dim=-1)
            out.append(self.operators.varlen_attention(packed, k, v, lengths, up.softmax_scale))
        for chunk in batch.long:
            of_chunk = q[0][chunk.start : chunk.stop], q[1][chunk.start : chunk.stop]
            out.append(self._attend_latents(of_chunk, pool, chunk, up))
        return _join(out) if out else up.values(up.absorb(q[0]))

    def _store(self, store: Callable[..., None], pool: torch.Tensor, *parts: torch.Tensor) -> None:
        """Write the rows of keys and values, or of latents, that are stored on this rank."""
        batch, own = self.batch, self.batch.own
        if own is None:
            store(pool, batch.slots, *parts, batch.repeated)
        elif len(own):
            store(pool, batch.slots, *(rows.index_select(0, own) for rows in parts), None)

    def _blocks_of(self, pool: torch.Tensor, chunk: LongChunk) -> torch.Tensor:
        """Return the blocks that a chunk attends to, of all ranks that share them."""
        return self.cache.context.gather_pages(self.cache.gather(pool, chunk.pieces))

    def _attend_latent_rows(self, q: Pair, pool: torch.Tensor, up: Up) -> torch.Tensor:
        """Return what the batch's paged rows attend to of compressed latents [N, H, R]."""
        absorbed, rotated, rows = up.absorb(q[0]), q[1], self.batch.rows
        if isinstance(rows, PagedRows) and not self.cache.context.is_shared:
            return self.operators.paged_latent_attention(absorbed, rotated, pool, rows, up.softmax_scale)
        return _join(self._attend_rows(torch.cat([absorbed, rotated], dim=-1), pool, scale=up.softmax_scale))

    def _attend_rows(self, q_NHC: torch.Tensor, pool: torch.Tensor, scale: float) -> list[torch.Tensor]:
        """Return the attention of the batch's paged rows, in order."""
        rows, context = self.batch.rows, self.cache.context
        if context.is_shared:
            return [self._attend_shared_rows(q_NHC[: self.batch.packed[0]], pool, scale)] if rows else []
        if isinstance(rows, PagedRows):
            return [self.operators.paged_attention(q_NHC[: len(rows.lengths)], pool, rows, None, scale)]
        return [out for out, *_ in self._attend_slices(q_NHC, pool, rows, scale=scale)]

    def _attend_shared_rows(self, q_NHC: torch.Tensor, pool: torch.Tensor, scale: float) -> torch.Tensor:
        """Return the attention of the batch's paged rows, whose tokens several ranks share."""
        context, batch, layout = self.cache.context, self.batch, self.cache.layout
        q = context.gather_heads(q_NHC)
        if isinstance(batch.rows, PagedRows):
            out, lse = self.operators.partial_attention(q, pool, batch.rows, layout.latent_width, scale)
        else:
            slices = zip(*self._attend_slices(q, pool, batch.rows, scale=scale), strict=True)
            out, top, total = (_join(list(parts)) for parts in slices)
            lse = top + total.log()
        assert batch.empty is not None
        return context.merge(out, lse.index_fill_(0, batch.empty, -torch.inf))

    def _attend_slices(
        self, q_NHC: torch.Tensor, pool: torch.Tensor, rows: tuple[RowSlice, ...], *, scale: float
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        cache = self.cache
        options: dict[str, Any] = dict(workspace=cache.workspace, layout=cache.layout, scale=scale)
        return [attend_rows(q_NHC[part.start : part.stop], pool, part, **options) for part in rows]

    def _attend_latents(self, q: Pair, pool: torch.Tensor, chunk: LongChunk, up: Up) -> torch.Tensor:
        """Compute the attention of a long chunk over its latents. Returns [T, H, V]."""
        (rows,), (length,), layout = chunk.lengths, chunk.kv_lengths, self.cache.layout
        latent_SL = _in_order(self._blocks_of(pool, chunk), chunk).squeeze(1)
        absorbs = layout.absorbs(rows, length, head_dim=up.spec.head_dim)
        if absorbs and not self.operators.fuses_chunks:
            absorbed = torch.cat([up.absorb(q[0]), q[1]], dim=-1)
            return up.values(_attend_shared(absorbed, latent_SL, layout.value_width, up.softmax_scale))
        k, v = up.expand(*latent_SL.split([layout.value_width, layout.width - layout.value_width], dim=-1))
        scale = up.softmax_scale
        return self.operators.varlen_attention(torch.cat(q, dim=-1), k, v, chunk.lengths, scale, chunk.kv_lengths)


def attend_rows(
    q_RHC: torch.Tensor, pool: torch.Tensor, part: RowSlice, *, workspace: torch.Tensor, layout: KVLayout, scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the attention of each row over its blocks of the pool. Returns [R, H, value_width], and of the scores the
    maximum and the sum of what is exponentiated behind it, [R, H] of `score_dtype`."""
    rows, heads, channels = q_RHC.shape
    block_size, pairs = pool.shape[2], part.owner.shape[0]
    dtype = score_dtype(q_RHC.dtype)
    in_order = part.stretch == (0, 0)
    single = in_order and pairs == rows  # each row has one block
    q = (q_RHC.to(dtype) * scale).view(rows, -1)
    if not single:
        q = q.index_select(0, part.owner)
    keys, values = _read_blocks(pool, part, workspace=workspace, layout=layout, dtype=dtype)

    scores = _products(q.view(pairs * pool.shape[1], -1, channels), [k.transpose(1, 2) for k in keys])
    scores = scores.view(pairs, heads, block_size)
    scores += part.bias
    top = scores.amax(-1)
    if not single:
        if not in_order or pairs != rows * part.width:
            cells = top.new_full((rows * part.width + 1, heads), -torch.inf)
            top = cells.index_copy_(0, part.place, top)[:-1]
        top = top.view(rows, part.width, heads).amax(1)
    weights = scores.sub_((top if single else top.index_select(0, part.owner)).unsqueeze(-1)).exp_()
    total = weights.sum(-1)
    out = _products(weights.view(pairs * pool.shape[1], -1, block_size), values).view(pairs, heads * layout.value_width)
    if not single:
        total = total.new_zeros(rows, heads).index_add_(0, part.owner, total)
        out = out.new_zeros(rows, heads * layout.value_width).index_add_(0, part.owner, out)
    return (out.view(rows, heads, layout.value_width) / total.unsqueeze(-1)).to(q_RHC.dtype), top, total


def _read_blocks(
    pool: torch.Tensor, part: RowSlice, *, workspace: torch.Tensor, layout: KVLayout, dtype: torch.dtype
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return keys [n * K, block_size, width] and values [n * K, block_size, value_width] of the stretch (not copied)
    and of the gathered blocks, as far as there are any."""
    parts, pieces_of_kv = (layout.parts, -1), []
    if part.stretch != (0, 0):
        pieces_of_kv.append(pool.unflatten(0, parts)[:, slice(*part.stretch)])
    count = part.pieces.shape[0]
    if count:
        pieces_of_kv.append(torch.index_select(pool, 0, part.pieces, out=workspace[:count]).unflatten(0, parts))
    pieces_of_kv = [kv.to(dtype).flatten(1, 2) for kv in pieces_of_kv]
    return [kv[0] for kv in pieces_of_kv], [kv[-1][..., : layout.value_width] for kv in pieces_of_kv]


def _products(x: torch.Tensor, pieces: list[torch.Tensor]) -> torch.Tensor:
    """Multiply x [n, r, c] by the n matrices that the pieces hold in order."""
    if len(pieces) == 1:
        return torch.bmm(x, pieces[0])
    parts = x.split([len(piece) for piece in pieces])
    return torch.cat([torch.bmm(part, piece) for part, piece in zip(parts, pieces, strict=True)])


def _in_order(blocks: torch.Tensor, chunk: LongChunk) -> torch.Tensor:
    """Return the tokens [S, K, C] of a chunk's blocks [n, K, block_size, C]."""
    return blocks.transpose(1, 2).flatten(0, 1)[: chunk.kv_lengths[0]]


def _attend_shared(q_THL: torch.Tensor, latent_SL: torch.Tensor, value_width: int, scale: float) -> torch.Tensor:
    """Compute attention of all heads to one head of keys, whose first ``value_width`` channels are their values; of
    some rows at a time."""
    heads, keys, values = q_THL.shape[1], latent_SL.t(), latent_SL[:, :value_width]
    rows = max(1, MAX_SCORES // (heads * len(latent_SL)))
    mask_TS = lower_right_mask(len(q_THL), len(latent_SL), q_THL.device)
    out = []
    for q, mask in zip((q_THL * scale).split(rows), mask_TS.split(rows), strict=True):
        bias = torch.zeros_like(mask, dtype=q.dtype).masked_fill_(~mask, -torch.inf).unsqueeze(1)
        scores = torch.mm(q.flatten(0, 1), keys).unflatten(0, (-1, heads)).add_(bias)
        weights = scores.softmax(-1, dtype=score_dtype(q.dtype)).to(q.dtype)
        out.append(torch.mm(weights.flatten(0, 1), values).unflatten(0, (-1, heads)))
    return _join(out)


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)

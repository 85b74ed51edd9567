"""Compute attention over the paged KV cache; the engine passes it to the model as `attend`.

Of layers with latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) the cache holds latents. Paged rows absorb
the projections of keys and values: their queries are projected instead, and all heads attend to the latents as to one
key head, whose values are its first channels. Packed prompts expand the latents to keys and values of each head. So do
long chunks where a card's operator attends to them without a mask; else they do what takes less arithmetic
(`KVLayout.absorbs`).

All paged rows of a step are one call of the card's operators (`PagedRows`), fused or composed.

With `rollout.engine.batch_invariant` every token is a paged row, and no bit of it depends on the other rows. Without
it, the rest of the batch decides how a row is computed.

With decode context parallelism (`Context`) paged rows attend with the heads of several ranks to the part of their
tokens that is on this one, and partial results are merged; a long chunk attends to KV gathered from these ranks."""

from collections.abc import Callable

import torch

from fusion.inference.batch import Batch, LongChunk
from fusion.inference.kv_cache import KVCache
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
        out: list[torch.Tensor] = []
        start, stop, lengths = batch.packed
        if batch.rows is not None:
            out.append(self._attend_rows(q_NHC[:start], pool, batch.rows))
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
        if batch.rows is not None:
            out.append(up.values(self._attend_latent_rows((q[0][:start], q[1][:start]), pool, batch.rows, up)))
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

    def _attend_latent_rows(self, q: Pair, pool: torch.Tensor, rows: PagedRows, up: Up) -> torch.Tensor:
        """Return what paged rows attend to of compressed latents [N, H, R]."""
        absorbed, rotated = up.absorb(q[0]), q[1]
        if self.cache.context.is_shared:
            return self._attend_shared_rows(torch.cat([absorbed, rotated], dim=-1), pool, rows, scale=up.softmax_scale)
        return self.operators.paged_latent_attention(absorbed, rotated, pool, rows, up.softmax_scale)

    def _attend_rows(self, q_NHC: torch.Tensor, pool: torch.Tensor, rows: PagedRows) -> torch.Tensor:
        """Return what paged rows attend to of values [N, H, C]."""
        scale = self.cache.layout.width**-0.5
        if self.cache.context.is_shared:
            return self._attend_shared_rows(q_NHC, pool, rows, scale=scale)
        return self.operators.paged_attention(q_NHC, pool, rows, None, scale)

    def _attend_shared_rows(
        self, q_NHC: torch.Tensor, pool: torch.Tensor, rows: PagedRows, *, scale: float
    ) -> torch.Tensor:
        """Return the attention of paged rows whose tokens several ranks share."""
        context, batch, value_width = self.cache.context, self.batch, self.cache.layout.latent_width
        out, lse = self.operators.partial_attention(context.gather_heads(q_NHC), pool, rows, value_width, scale)
        assert batch.empty is not None
        return context.merge(out, lse.index_fill_(0, batch.empty, -torch.inf))

    def _attend_latents(self, q: Pair, pool: torch.Tensor, chunk: LongChunk, up: Up) -> torch.Tensor:
        """Compute the attention of a long chunk over its latents. Return [T, H, V]."""
        (rows,), (length,), layout = chunk.lengths, chunk.kv_lengths, self.cache.layout
        latent_SL = _in_order(self._blocks_of(pool, chunk), chunk).squeeze(1)
        absorbs = layout.absorbs(rows, length, head_dim=up.spec.head_dim)
        if absorbs and not self.operators.fuses_chunks:
            absorbed = torch.cat([up.absorb(q[0]), q[1]], dim=-1)
            return up.values(_attend_shared(absorbed, latent_SL, layout.value_width, up.softmax_scale))
        k, v = up.expand(*latent_SL.split([layout.value_width, layout.width - layout.value_width], dim=-1))
        scale = up.softmax_scale
        return self.operators.varlen_attention(torch.cat(q, dim=-1), k, v, chunk.lengths, scale, chunk.kv_lengths)


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
        weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
        out.append(torch.mm(weights.flatten(0, 1), values).unflatten(0, (-1, heads)))
    return _join(out)


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)

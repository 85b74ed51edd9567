"""Compose attention, and what writes and reads the KV pool for it, of PyTorch's operators: that half of `Plain`.

Names of dimensions as in `plain.py`; V channels of a value, P rotated channels of a latent, whose others are R."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.npu.operators import composed_attention
from fusion.npu.operators.composed_attention import PagedRows

Lengths = list[int] | None
"""Keys of each sequence; None: as many as it has queries"""


class PlainAttention:
    """The attention of the table `Plain`, which inherits it."""

    name: str
    needs_block_rows = False
    """Whether the fused `paged_attention` reads ``PagedRows.blocks_RB``, as the composed one does"""
    lengths_argument: str | None = None
    """Argument of the operator of paged rows by which a captured graph is told of other lengths; None: it reads those
    on the card"""
    fuses_chunks = False
    """Whether `varlen_attention` with `kv_lengths` needs no mask of T × S"""

    def varlen_attention(
        self,
        q_NHC: Tensor,
        k_MKC: Tensor,
        v_MKV: Tensor,
        lengths: list[int],
        scale: float | None = None,
        kv_lengths: Lengths = None,
    ) -> Tensor:
        """Compute causal attention within each packed sequence. Query head h reads key/value head h // (H // K).
        ``lengths``: number of queries of each sequence; adjacent sequences of equal length share a kernel call, without
        padding or copying, so sorting sequences by length when packing reduces the number of calls. ``scale``: of the
        scores; None: 1 / sqrt(C). ``kv_lengths``: number of keys of each sequence, of which the queries are the last;
        None: all are queries.

        Values may have other channels than keys; where they have fewer, they are padded, because flash kernels take
        equal numbers only."""
        assert sum(lengths) == q_NHC.shape[0] and sum(kv_lengths or lengths) == k_MKC.shape[0]
        width, channels = v_MKV.shape[-1], q_NHC.shape[-1]
        if not lengths:
            return q_NHC if width == channels else F.pad(q_NHC, (0, width - channels))
        if width < channels:
            v_MKV = F.pad(v_MKV, (0, channels - width))
        out = self._attend_packed(q_NHC, k_MKC, v_MKV, lengths, scale, kv_lengths)
        return out if width == out.shape[-1] else out[..., :width]

    def _attend_packed(
        self, q_NHC: Tensor, k_MKC: Tensor, v_MKV: Tensor, lengths: list[int], scale: float | None, kv_lengths: Lengths
    ) -> Tensor:
        """Return what `varlen_attention` does of at least one sequence, whose values have no fewer channels than its
        keys: what tables replace."""
        if kv_lengths is None:
            return composed_attention.packed(q_NHC, k_MKC, v_MKV, lengths, scale)
        return composed_attention.lower_right(q_NHC, k_MKC, v_MKV, lengths, kv_lengths, scale)

    def head_linear(self, x_NHC: Tensor, weight_HCO: Tensor, row_multiple: int = 1) -> Tensor:
        """Multiply each head of x by its own matrix: [N, H, O]. ``row_multiple``: as of `rows.linear`. Generation calls
        it, without gradients."""
        rows = x_NHC.shape[0]
        padding = -rows % row_multiple
        if padding:
            x_NHC = F.pad(x_NHC, (0, 0, 0, 0, 0, padding))
        return torch.bmm(x_NHC.transpose(0, 1), weight_HCO).transpose(0, 1)[:rows]

    def areas(self, pool: Tensor, value_width: int | None) -> tuple[Tensor, ...]:
        """Return views of a layer's pool whose rows are those of blocks, and which joined have all channels.
        ``value_width``: channels of a latent that are its value; None: the pool holds keys and values."""
        return (pool,)

    def store_kv(
        self, pool: Tensor, slots: Tensor, k_NKC: Tensor, v_NKC: Tensor | None, repeated: Tensor | None
    ) -> None:
        """Write keys and values, or latents without ``v``, to the pool, seen as rows of C channels. ``pool``: [parts *
        blocks, K, block_size, C]. ``slots``: int64, for each part, row and head where it goes. ``repeated``: rows that
        are written a second time, behind the others."""
        written = [k_NKC] if v_NKC is None else [k_NKC, v_NKC]
        if repeated is not None:
            written = [rows for part in written for rows in (part, part.index_select(0, repeated))]
        channels = k_NKC.shape[-1]
        pool.view(-1, channels).index_copy_(0, slots, torch.cat(written).view(-1, channels))

    def store_latents(
        self, pool: Tensor, slots: Tensor, compressed_NR: Tensor, rotated_NP: Tensor, repeated: Tensor | None
    ) -> None:
        """Write latents to the pool [blocks, 1, block_size, R + P], see `store_kv`."""
        latent_N1L = torch.cat([compressed_NR, rotated_NP], dim=-1).unsqueeze(1)
        self.store_kv(pool, slots, latent_N1L, None, repeated)

    def reads_blocks(self, dtype: torch.dtype) -> bool:
        """Return whether `paged_attention` is fused for a pool of this dtype."""
        return False

    def paged_attention(
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> Tensor:
        """Return the attention [N, H, V] of each row over its blocks of the pool. ``pool``: [2 * blocks, K, block_size,
        C], keys before values; or latents [blocks, 1, block_size, C]. ``value_width``: as of `areas`. ``scale``: of the
        scores."""
        return composed_attention.paged(self._gather_rows(q_NHC, pool, rows, value_width), scale)

    def partial_attention(
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the attention of `paged_attention` to a part of each row's tokens, and the log-sum-exp of the scores
        [N, H], at least float32, by which it is merged with that to others."""
        return composed_attention.paged_with_lse(self._gather_rows(q_NHC, pool, rows, value_width), scale)

    def _gather_rows(
        self, q_NHC: Tensor, pool: Tensor, rows: PagedRows, value_width: int | None
    ) -> Iterator[composed_attention.Gathered]:
        parts = pool.chunk(2) if value_width is None else self.areas(pool, value_width)
        return composed_attention.gather_rows(q_NHC, parts, rows, value_width)

    def paged_latent_attention(
        self, q_NHR: Tensor, q_NHP: Tensor, pool: Tensor, rows: PagedRows, scale: float
    ) -> Tensor:
        """Return the attention [N, H, R] of absorbed queries, and their rotated channels, over latents."""
        return self.paged_attention(torch.cat([q_NHR, q_NHP], dim=-1), pool, rows, q_NHR.shape[-1], scale)

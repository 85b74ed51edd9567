"""Compose attention of PyTorch's operators, for cards and calls without a fused one.

Names of dimensions as in `plain.py`; S keys of a sequence, T its queries, G query heads that share a key head."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.npu.config import MAX_GATHERED_TOKENS

MASKED_ROWS = 512
"""Rows of a sequence that attend by one mask"""


def packed(q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, lengths: list[int], scale: float | None) -> Tensor:
    """Attend causally within sequences of these lengths. Adjacent ones of equal length share a kernel call."""
    runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    grouped, outputs = q_NHC.shape[1] != k_NKC.shape[1], []
    # split, whose backward pass joins the gradients once: that of a slice fills the whole tensor for each
    parts = zip(*(x.split([length * n for length, n in runs]) for x in (q_NHC, k_NKC, v_NKC)), strict=True)
    for (length, n), part in zip(runs, parts, strict=True):
        q, k, v = (x.unflatten(0, (n, length)).transpose(1, 2) for x in part)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return _join(outputs)


def lower_right(
    q_NHC: Tensor, k_MKC: Tensor, v_MKC: Tensor, lengths: list[int], kv_lengths: list[int], scale: float | None
) -> Tensor:
    """Attend with the last tokens of sequences to their whole sequences: `MASKED_ROWS` of a sequence at a time to what
    ends with them, so that the time is that of causal attention and a mask is small."""
    grouped, outputs = q_NHC.shape[1] != k_MKC.shape[1], []
    for part in zip(q_NHC.split(lengths), k_MKC.split(kv_lengths), v_MKC.split(kv_lengths), strict=True):
        if len(part[0]) == len(part[1]):
            outputs.append(packed(*part, [len(part[0])], scale))
            continue
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in part)
        end = k.shape[2] - q.shape[2]
        for rows in q.split(MASKED_ROWS, dim=2):
            end += rows.shape[2]
            mask_TS = lower_right_mask(rows.shape[2], end, q.device)
            keys, values = k[:, :, :end], v[:, :, :end]
            out = F.scaled_dot_product_attention(rows, keys, values, attn_mask=mask_TS, scale=scale, enable_gqa=grouped)
            outputs.append(out.squeeze(0).transpose(0, 1))
    return _join(outputs)


def lower_right_mask(rows: int, length: int, device: torch.device) -> Tensor:
    """Return where each of the last ``rows`` tokens of a sequence reads, bool [rows, length]."""
    places = torch.arange(length, device=device)
    return places <= places[length - rows :, None]


class PagedRows(NamedTuple):
    """Rows that attend to blocks of a pool: row r to the first ``lengths[r]`` tokens in the blocks ``table[first[r]]``,
    ``table[first[r] + 1]``, …; int64 all, on the card. Where attention is composed, or the table of operators
    `needs_block_rows`, also ``blocks_RB``, int32 [R, B]: the blocks of each row, then any others; and the lengths on
    the host. ``invariant``: a row's bits must not depend on the other rows."""

    table: Tensor
    first: Tensor
    lengths: Tensor
    blocks_RB: Tensor | None = None
    host_lengths: tuple[int, ...] = ()
    invariant: bool = False


Gathered = tuple[Tensor, Tensor, Tensor, Tensor]
"""Queries [R, K, G, C] of some paged rows, keys and values [R, K, S, C], and where these are read, bool [R, 1, 1, S]"""


def paged(gathered: Iterable[Gathered], scale: float) -> Tensor:
    """Return the attention [N, H, V] of paged rows."""
    outputs = [F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale) for q, k, v, mask in gathered]
    return _join([out.flatten(1, 2) for out in outputs])


def paged_with_lse(gathered: Iterable[Gathered], scale: float) -> tuple[Tensor, Tensor]:
    """Return what `paged` does, and the log-sum-exp of the scores [N, H], at least float32."""
    outputs, sums = [], []
    for q_RKGC, k_RKSC, v_RKSC, mask_R11S in gathered:
        scores_RKGS = (q_RKGC @ k_RKSC.transpose(2, 3)).to(torch.promote_types(q_RKGC.dtype, torch.float32)) * scale
        scores_RKGS = scores_RKGS.masked_fill(~mask_R11S, -torch.inf)
        outputs.append((scores_RKGS.softmax(-1).to(v_RKSC.dtype) @ v_RKSC).flatten(1, 2))
        sums.append(scores_RKGS.logsumexp(-1).flatten(1, 2))
    return _join(outputs), _join(sums)


def gather_rows(q_NHC: Tensor, parts: Sequence[Tensor], rows: PagedRows, value_width: int | None) -> Iterator[Gathered]:
    """Yield paged rows with their blocks, some rows at a time. ``parts``: keys and values by block, [blocks, K,
    block_size, C] each; or, with the ``value_width`` of latents, these in one or more parts by channels."""
    assert rows.blocks_RB is not None
    for start, stop, width in _row_slices(rows.host_lengths, parts[0].shape[2], rows.invariant):
        blocks = rows.blocks_RB[start:stop, :width]
        k_RKSC, *rest = (
            part.index_select(0, blocks.flatten()).unflatten(0, blocks.shape).transpose(1, 2).flatten(2, 3)
            for part in parts
        )
        if value_width is None:
            (v_RKSC,) = rest
        else:
            k_RKSC = torch.cat([k_RKSC, *rest], dim=-1) if rest else k_RKSC
            v_RKSC = k_RKSC[..., :value_width]
        is_read = torch.arange(k_RKSC.shape[2], device=q_NHC.device) < rows.lengths[start:stop].unsqueeze(-1)
        yield q_NHC[start:stop].unflatten(1, (k_RKSC.shape[1], -1)), k_RKSC, v_RKSC, is_read[:, None, None]


def _row_slices(lengths: Sequence[int], block_size: int, invariant: bool) -> Iterator[tuple[int, int, int]]:
    """Return first row, end, and blocks of the longest row of each slice. With ``invariant`` every row is computed
    alone, so that no bit of it depends on the others."""
    width = -(-max(lengths) // block_size)
    rows = 1 if invariant else max(1, MAX_GATHERED_TOKENS // (width * block_size))
    for start in range(0, len(lengths), rows):
        some = lengths[start : start + rows]
        yield start, start + len(some), -(-max(some) // block_size)


def _join(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)

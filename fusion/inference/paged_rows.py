"""Plan how paged rows, each a token that attends over its own blocks, read the KV cache. In numpy, no tensor.

Where there is a fused operator, it reads the blocks by a table (`PagedRows`). Else every (row, block) pair becomes a
small matrix product (`RowSlice`, see `attention.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from fusion.inference.kv_cache import KVCache
from fusion.npu.operators import PagedRows

STRETCH_WASTE = 1.5
"""Maximum ratio of all blocks of a stretch of the pool to the required ones for which the stretch is read in place
instead of gathering the blocks."""

STRETCH_TOKENS = 1 << 17
"""Maximum tokens of KV that the rows of one slice read; bounds the memory of its scores."""


@dataclass(frozen=True)
class RowSlice:
    """Consecutive paged rows and the P blocks they attend over: a stretch of the pool read in place, then gathered
    blocks. Indices are int64.

    ``stretch``: first block and end; its unneeded blocks are assigned to row 0 with nothing to read. ``pieces``: the
    gathered blocks' rows of a pool, all keys before all values, or latents; without a stretch row after row. ``owner``
    [P]: the row in the slice. ``bias`` [P, 1, block_size]: 0, or -inf behind the row's position. ``width``: blocks of
    the longest row. ``place`` [P]: the cell in [rows, width]; one more cell behind them is for unneeded blocks."""

    start: int
    stop: int
    stretch: tuple[int, int]
    width: int
    pieces: torch.Tensor
    owner: torch.Tensor
    place: torch.Tensor
    bias: torch.Tensor


class SlicePlan(NamedTuple):
    """Holds a `RowSlice` whose indices are on the host; ``valid`` [P]: the tokens of each block that are read."""

    on_card: Callable[..., RowSlice]
    indices: tuple[np.ndarray, np.ndarray, np.ndarray]
    valid: np.ndarray


Rows = PagedRows | tuple[RowSlice, ...]
PagedPlan = tuple[list[np.ndarray], Callable[[Iterator[torch.Tensor]], Rows]]
"""Arrays that go to the card, int64 [n] each; and what takes them from the card's tensors"""


def plan_paged_rows(
    positions: np.ndarray, first: np.ndarray, table: np.ndarray, *, cache: KVCache, invariant: bool, width: int = 0
) -> PagedPlan:
    """Plan rows at these ``positions`` among the tokens that this rank stores, int64 [R]; row r's blocks are
    ``table[first[r]]`` and those behind it. ``width``: blocks of each row, for a table that `needs_block_rows`; 0: as
    many as needed."""
    if cache.reads_blocks:
        return _plan_table(positions, first, table, cache=cache, invariant=invariant, width=width)
    slices = list(_slice_rows(positions, first, table, cache=cache, invariant=invariant))
    valid = np.concatenate([np.zeros(0, np.int64), *(part.valid for part in slices)])

    def take(tensors: Iterator[torch.Tensor]) -> tuple[RowSlice, ...]:
        on_card = next(tensors)
        if not slices:
            return ()
        biases = cache.masks.index_select(0, on_card).split([len(part.valid) for part in slices])  # of all at once
        return tuple(
            part.on_card(next(tensors), next(tensors), next(tensors), bias=bias)
            for part, bias in zip(slices, biases, strict=True)
        )

    return [valid, *(array for part in slices for array in part.indices)], take


def _plan_table(
    positions: np.ndarray, first: np.ndarray, table: np.ndarray, *, cache: KVCache, invariant: bool, width: int
) -> PagedPlan:
    lengths, of_rows = positions + 1, cache.device.operators.needs_block_rows and len(positions) > 0
    if of_rows:  # rows of one width, which an operator reads as they are
        width = width or int(positions.max()) // cache.page_size + 1
        table = table[np.minimum(first[:, None] + np.arange(width), len(table) - 1)].ravel()
        first = np.arange(len(positions)) * width

    def take(tensors: Iterator[torch.Tensor]) -> Rows:
        rows = PagedRows(next(tensors), next(tensors), next(tensors))
        if of_rows:
            blocks_RB = rows.table.view(-1, width).to(torch.int32)
            rows = rows._replace(blocks_RB=blocks_RB, host_lengths=tuple(lengths.tolist()), invariant=invariant)
        return rows if len(lengths) else ()

    return [table, first, lengths], take


def _slice_rows(
    positions: np.ndarray, first: np.ndarray, table: np.ndarray, *, cache: KVCache, invariant: bool
) -> Iterator[SlicePlan]:
    """Plan one slice that reads the pool in place if that is cheaper, else slices with as many pairs as the workspace
    holds."""
    counts = positions // cache.page_size + 1
    ends = np.cumsum(counts)
    # (row, block) pairs, row after row; ``index`` counts a row's blocks, ``valid`` the tokens of a block that are read
    owner = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owner)) - (ends - counts)[owner]
    valid = np.minimum(positions[owner] + 1 - index * cache.page_size, cache.page_size)
    blocks = table[first[owner] + index]

    def plan(start: int, stop: int, stretch: tuple[int, int], order: np.ndarray | slice) -> SlicePlan:
        """Plan rows ``start:stop`` over the pairs in the given order, of which the first are the stretch's."""
        width = int(counts[start:stop].max())
        owners, read, gathered = owner[order] - start, valid[order], order
        place = owners * width + index[order]
        if isinstance(order, np.ndarray):
            gathered, unwanted = order[stretch[1] - stretch[0] :], order < 0
            owners[unwanted], read[unwanted], place[unwanted] = 0, 0, (stop - start) * width
        pieces = pieces_of(blocks[gathered], cache)
        return SlicePlan(partial(RowSlice, start, stop, stretch, width), (pieces, owners, place), read)

    limit = cache.workspace.shape[0] // cache.layout.parts
    if not invariant and 0 < len(owner) <= STRETCH_TOKENS // cache.page_size:
        low, high, order = _stretch(blocks)
        wanted = int(np.count_nonzero(order[: high - low] >= 0))
        if high - low <= STRETCH_WASTE * wanted and len(order) - (high - low) <= limit:
            yield plan(0, len(counts), (low, high), order)
            return
    start = 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield plan(start, stop, (0, 0), slice(before, int(ends[stop - 1])))
        start = stop


def _stretch(blocks: np.ndarray) -> tuple[int, int, np.ndarray]:
    """Return the stretch of the pool that holds all blocks, and for each block of it a pair that reads it (-1: none),
    then the pairs that are left over because several rows read one block."""
    low, high = int(blocks.min()), int(blocks.max()) + 1
    reader = np.full(high - low, -1)
    reader[blocks - low] = np.arange(len(blocks))
    left_over = np.flatnonzero(reader[blocks - low] != np.arange(len(blocks)))
    return low, high, np.concatenate([reader, left_over])


def pieces_of(blocks: np.ndarray, cache: KVCache) -> np.ndarray:
    """Return the rows of a pool that hold these blocks: all keys before all values, or latents."""
    return np.concatenate([blocks + part * cache.blocks for part in range(cache.layout.parts)])

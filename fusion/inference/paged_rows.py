"""Plan how paged rows, each a token that attends over its own blocks, read the KV cache. In numpy, no tensor.

Where there is a fused operator, it reads the blocks by a table (`PagedRows`). Else every (row, block) pair becomes a
small matrix product (`RowSlice`, see `attention.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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
    blocks.

    ``stretch``: first block and end; its unneeded blocks are assigned to row 0 with nothing to read. ``pieces``: the
    gathered blocks' rows of a pool, all keys before all values, or latents; without a stretch row after row. ``owner``
    [P]: the row in the slice. ``bias`` [P, 1, block_size]: 0, or -inf behind the row's position. ``width``: blocks of
    the longest row. ``place`` [P]: the cell in [rows, width]; one more cell behind them is for unneeded blocks.
    """

    start: int
    stop: int
    stretch: tuple[int, int]
    pieces: torch.Tensor
    owner: torch.Tensor
    bias: torch.Tensor
    width: int
    place: torch.Tensor


def plan_paged_rows(
    positions: np.ndarray, first: np.ndarray, table: np.ndarray, *, cache: KVCache, invariant: bool
) -> TablePlan | SlicesPlan:
    """Plan rows at these ``positions`` among the tokens that this rank stores, int64 [R]; row r's blocks are
    ``table[first[r]]`` and those behind it."""
    if cache.reads_blocks:
        widest = int(positions.max(initial=0)) // cache.page_size + 1
        width = widest if cache.device.operators.needs_block_rows else 0
        return TablePlan([table, first, positions + 1], width, invariant)
    slices = list(_slice_rows(positions, first, table, cache=cache, invariant=invariant))
    return SlicesPlan(slices, cache)


@dataclass(frozen=True)
class TablePlan:
    """`PagedRows` that are still on the host: ``flat``, int64 [n] each. ``width``: blocks of the longest row, where
    rows of blocks are needed too; else 0."""

    flat: list[np.ndarray]
    width: int
    invariant: bool

    @property
    def arrays(self) -> list[np.ndarray]:
        table, first, _ = self.flat
        if not self.width:
            return self.flat
        places = np.minimum(first[:, None] + np.arange(self.width), len(table) - 1)
        return [*self.flat, table[places].ravel()]

    def take(self, tensors: Iterator[torch.Tensor]) -> PagedRows | tuple[()]:
        """Take the arrays from the card's tensors."""
        rows, lengths = PagedRows(next(tensors), next(tensors), next(tensors)), self.flat[2]
        if self.width:
            blocks_RB = next(tensors).view(-1, self.width).to(torch.int32)
            rows = rows._replace(blocks_RB=blocks_RB, host_lengths=tuple(lengths.tolist()), invariant=self.invariant)
        return rows if len(lengths) else ()


@dataclass(frozen=True)
class SlicesPlan:
    slices: list[_SlicePlan]
    cache: KVCache

    @property
    def arrays(self) -> list[np.ndarray]:
        valid = np.concatenate([np.zeros(0, np.int64), *(part.valid for part in self.slices)])
        return [valid, *(array for part in self.slices for array in part.arrays)]

    def take(self, tensors: Iterator[torch.Tensor]) -> tuple[RowSlice, ...]:
        """Take the arrays from the card's tensors; the masks of all slices are gathered at once."""
        valid = next(tensors)
        if not self.slices:
            return ()
        biases = self.cache.masks.index_select(0, valid).split([len(part.valid) for part in self.slices])
        return tuple(_row_slice(part, bias, tensors) for part, bias in zip(self.slices, biases, strict=True))


@dataclass(frozen=True)
class _Pairs:
    """(row, block) pairs, row after row: ``index`` counts a row's blocks, ``valid`` tokens of the block are read."""

    blocks: np.ndarray
    owner: np.ndarray
    index: np.ndarray
    valid: np.ndarray


@dataclass(frozen=True)
class _SlicePlan:
    """A `RowSlice` whose arrays are still on the host; ``valid``: tokens of each block that are read."""

    start: int
    stop: int
    stretch: tuple[int, int]
    width: int
    pieces: np.ndarray
    owner: np.ndarray
    valid: np.ndarray
    place: np.ndarray

    @property
    def arrays(self) -> tuple[np.ndarray, ...]:
        """All but ``valid``."""
        return self.pieces, self.owner, self.place


def _row_slice(plan: _SlicePlan, bias: torch.Tensor, tensors: Iterator[torch.Tensor]) -> RowSlice:
    """Take the plan's ``arrays`` from the card's tensors."""
    pieces, owner, place = (next(tensors) for _ in plan.arrays)
    return RowSlice(
        plan.start, plan.stop, plan.stretch, pieces=pieces, owner=owner, bias=bias, width=plan.width, place=place
    )


def _slice_rows(
    positions: np.ndarray, first: np.ndarray, table: np.ndarray, *, cache: KVCache, invariant: bool
) -> Iterator[_SlicePlan]:
    """Plan one slice that reads the pool in place if that is cheaper, else slices with as many pairs as the workspace
    holds."""
    counts = positions // cache.page_size + 1
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owner)) - (ends - counts)[owner]
    valid = np.minimum(positions[owner] + 1 - index * cache.page_size, cache.page_size)
    pairs = _Pairs(table[first[owner] + index], owner, index, valid=valid)
    limit = cache.workspace.shape[0] // cache.layout.parts
    if not invariant and 0 < len(owner) <= STRETCH_TOKENS // cache.page_size:
        low, high, order = _stretch(pairs.blocks)
        wanted = int(np.count_nonzero(order[: high - low] >= 0))
        if high - low <= STRETCH_WASTE * wanted and len(order) - (high - low) <= limit:
            yield _plan_slice(0, len(counts), (low, high), order=order, pairs=pairs, counts=counts, cache=cache)
            return
    start = 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        in_order = slice(before, int(ends[stop - 1]))
        yield _plan_slice(start, stop, (0, 0), order=in_order, pairs=pairs, counts=counts, cache=cache)
        start = stop


def _stretch(blocks: np.ndarray) -> tuple[int, int, np.ndarray]:
    """Return the stretch of the pool that holds all blocks, and for each block of it a pair that reads it (-1: none),
    then the pairs that are left over because several rows read one block."""
    low, high = int(blocks.min()), int(blocks.max()) + 1
    reader = np.full(high - low, -1)
    reader[blocks - low] = np.arange(len(blocks))
    left_over = np.flatnonzero(reader[blocks - low] != np.arange(len(blocks)))
    return low, high, np.concatenate([reader, left_over])


def _plan_slice(
    start: int,
    stop: int,
    stretch: tuple[int, int],
    *,
    order: np.ndarray | slice,
    pairs: _Pairs,
    counts: np.ndarray,
    cache: KVCache,
) -> _SlicePlan:
    """Plan rows ``start:stop`` over the pairs in the given order, of which the first are the stretch's."""
    width = int(counts[start:stop].max())
    owner = pairs.owner[order] - start
    place = owner * width + pairs.index[order]
    valid = pairs.valid[order]
    gathered = order
    if isinstance(order, np.ndarray):
        gathered, unwanted = order[stretch[1] - stretch[0] :], order < 0
        owner[unwanted], valid[unwanted], place[unwanted] = 0, 0, (stop - start) * width
    pieces = pieces_of(pairs.blocks[gathered], cache)
    return _SlicePlan(start, stop, stretch, width=width, pieces=pieces, owner=owner, valid=valid, place=place)


def pieces_of(blocks: np.ndarray, cache: KVCache) -> np.ndarray:
    """Return the rows of a pool that hold these blocks: all keys before all values, or latents."""
    return np.concatenate([blocks + part * cache.blocks for part in range(cache.layout.parts)])

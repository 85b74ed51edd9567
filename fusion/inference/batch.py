"""Build the tensors of one step, which every layer reads.

Rows of a batch, in this order:

    decodes            one row a sequence                          ┐ paged rows: each attends over its own blocks
    short chunks       the few tokens behind a shared prefix       ┘
    whole prompts      nothing of them was cached: packed          causal inside each
    long chunks        a piece of a prompt behind what is cached   one attention call a chunk

With ``invariant`` every token is a paged row, as that is the form whose arithmetic does not depend on its neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from fusion.inference.kv_cache import KVCache
from fusion.inference.sequence import Sequence, Step

Piece = tuple[Sequence, int]
"""A sequence and how many tokens of it the step computes."""

STRETCH_WASTE = 1.5
"""Maximum ratio of all blocks of a stretch of the pool to the required ones for which the stretch is read in place
instead of gathering the blocks."""

STRETCH_TOKENS = 1 << 17
"""Maximum tokens of KV that the rows of one slice read; bounds the memory of its scores."""

SHORT_CHUNK_TOKENS = 16
"""Chunks up to this length are computed as paged rows: one call for all of them instead of one for each."""


@dataclass(frozen=True)
class RowSlice:
    """Consecutive paged rows and the P blocks they attend over: a stretch of the pool read in place, then gathered
    blocks.

    ``stretch``: first block and end; its unneeded blocks are assigned to row 0 with nothing to read. ``pieces``: the
    gathered blocks' rows of a pool, all keys before all values; without a stretch row after row. ``owner`` [P]: the row
    in the slice. ``bias`` [P, 1, block_size]: 0, or -inf behind the row's position. ``width``: blocks of the longest
    row. ``place`` [P]: the cell in [rows, width]; one more cell behind them is for unneeded blocks.
    """

    start: int
    stop: int
    stretch: tuple[int, int]
    pieces: torch.Tensor
    owner: torch.Tensor
    bias: torch.Tensor
    width: int
    place: torch.Tensor


@dataclass(frozen=True)
class LongChunk:
    """Rows ``start:stop`` attend over ``length`` tokens in ``pieces`` (as in `RowSlice`); ``mask`` [rows, length] is
    causal."""

    start: int
    stop: int
    pieces: torch.Tensor
    length: int
    mask: torch.Tensor


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass of N tokens.

    ``slots`` [2 * N * K]: where each token's key of each head, then each value, goes in a pool seen as rows of C.
    ``blocks``, ``offsets`` int64 [N] on the host: the place of each token in the cache.
    ``sampled`` [S]: the rows whose logits are required; None: all rows.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    blocks: np.ndarray
    offsets: np.ndarray
    rows: tuple[RowSlice, ...]
    packed: tuple[int, int, list[int]]
    long: tuple[LongChunk, ...]
    sampled: torch.Tensor | None


def build_batch(step: Step, cache: KVCache, invariant: bool = False) -> Batch:
    """Builds the tensors of a step."""
    block_size, kv_heads = cache.block_size, cache.kv_heads
    short, whole, long = _sort_chunks(step, invariant)
    pieces = [(seq, 1) for seq in step.decodes] + short + whole + long
    table, first = _block_table(pieces)
    starts = np.fromiter((seq.computed for seq, _ in pieces), np.int64, len(pieces))
    ends = np.arange(1, len(pieces) + 1)
    if not step.chunks:
        positions = starts
        ids = np.fromiter((seq.tokens[-1] for seq in step.decodes), np.int64, len(pieces))
    else:
        counts = np.fromiter((count for _, count in pieces), np.int64, len(pieces))
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        first = np.repeat(first, counts)
        tokens = (seq.tokens[seq.computed : seq.computed + count] for seq, count in pieces)
        ids = np.fromiter(chain.from_iterable(tokens), np.int64, len(positions))
    block, offset = np.divmod(positions, block_size)
    block = table[first + block]
    keys = (block * (kv_heads * block_size) + offset)[:, None] + np.arange(kv_heads) * block_size
    slots = np.stack([keys, keys + cache.blocks * kv_heads * block_size])

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(cache.device.torch_device)

    row_count = len(step.decodes) + sum(count for _, count in short)
    packed_stop = row_count + sum(count for _, count in whole)
    chunks, at = [], packed_stop
    for seq, count in long:
        chunks.append(_long_chunk(seq, at, count, cache=cache, put=put))
        at += count
    return Batch(
        ids=put(ids),
        positions=put(positions),
        slots=put(slots.ravel()),
        blocks=block,
        offsets=offset,
        rows=tuple(
            _slice_rows(positions[:row_count], first[:row_count], table, cache=cache, put=put, invariant=invariant)
        ),
        packed=(row_count, packed_stop, [count for _, count in whole]),
        long=tuple(chunks),
        sampled=_sampled_rows(step, pieces, ends, put=put),
    )


def _sort_chunks(step: Step, invariant: bool) -> tuple[list[Piece], list[Piece], list[Piece]]:
    if invariant:
        return list(step.chunks), [], []
    short: list[Piece] = []
    whole: list[Piece] = []
    long: list[Piece] = []
    for seq, count in step.chunks:
        (whole if seq.computed == 0 else short if count <= SHORT_CHUNK_TOKENS else long).append((seq, count))
    whole.sort(key=lambda piece: piece[1])  # neighbours of one length share a kernel call
    return short, whole, long


def _block_table(pieces: list[Piece]) -> tuple[np.ndarray, np.ndarray]:
    """All pieces' blocks in one array, and where each piece's begin."""
    lengths = np.fromiter((len(seq.blocks) for seq, _ in pieces), np.int64, len(pieces))
    table = np.fromiter(chain.from_iterable(seq.blocks for seq, _ in pieces), np.int64, int(lengths.sum()))
    return table, np.cumsum(lengths) - lengths


@dataclass(frozen=True)
class _Pairs:
    """(row, block) pairs, row after row: ``index`` counts a row's blocks, ``valid`` tokens of the block are read."""

    blocks: np.ndarray
    owner: np.ndarray
    index: np.ndarray
    valid: np.ndarray


def _slice_rows(positions, first, table, cache: KVCache, put, invariant: bool):
    """Returns one slice that reads the pool in place if that is cheaper, else slices with as many pairs as the
    workspace holds."""
    counts = positions // cache.block_size + 1
    ends = np.cumsum(counts)
    owner = np.repeat(np.arange(len(counts)), counts)
    index = np.arange(len(owner)) - (ends - counts)[owner]
    valid = np.minimum(positions[owner] + 1 - index * cache.block_size, cache.block_size)
    pairs = _Pairs(table[first[owner] + index], owner, index, valid=valid)
    limit = cache.workspace.shape[0] // 2
    if not invariant and 0 < len(owner) <= STRETCH_TOKENS // cache.block_size:
        low, high, order = _stretch(pairs.blocks)
        wanted = int(np.count_nonzero(order[: high - low] >= 0))
        if high - low <= STRETCH_WASTE * wanted and len(order) - (high - low) <= limit:
            yield _row_slice(0, len(counts), (low, high), order=order, pairs=pairs, counts=counts, cache=cache, put=put)
            return
    start = 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + limit, side="right")))
        yield _row_slice(
            start,
            stop,
            (0, 0),
            order=np.arange(before, int(ends[stop - 1])),
            pairs=pairs,
            counts=counts,
            cache=cache,
            put=put,
        )
        start = stop


def _stretch(blocks: np.ndarray) -> tuple[int, int, np.ndarray]:
    """The stretch of the pool that holds all blocks, and for each block of it a pair that reads it (-1: none), then the
    pairs that are left over because several rows read one block."""
    low, high = int(blocks.min()), int(blocks.max()) + 1
    reader = np.full(high - low, -1)
    reader[blocks - low] = np.arange(len(blocks))
    left_over = np.flatnonzero(reader[blocks - low] != np.arange(len(blocks)))
    return low, high, np.concatenate([reader, left_over])


def _row_slice(start, stop, stretch, order, pairs: _Pairs, counts, cache: KVCache, put) -> RowSlice:
    """Rows ``start:stop`` over the pairs in the given order, of which the first are the stretch's."""
    width = int(counts[start:stop].max())
    owner = pairs.owner[order] - start
    place = owner * width + pairs.index[order]
    valid = pairs.valid[order]
    gathered = order[stretch[1] - stretch[0] :]
    if len(gathered) < len(order):
        unwanted = order < 0
        owner[unwanted], valid[unwanted], place[unwanted] = 0, 0, (stop - start) * width
    return RowSlice(
        start,
        stop,
        stretch,
        pieces=put(_pieces(pairs.blocks[gathered], cache)),
        owner=put(owner),
        bias=cache.masks.index_select(0, put(valid)),
        width=width,
        place=put(place),
    )


def _pieces(blocks: np.ndarray, cache: KVCache) -> np.ndarray:
    return np.concatenate([blocks, blocks + cache.blocks])


def _long_chunk(seq: Sequence, at: int, count: int, cache: KVCache, put) -> LongChunk:
    length = seq.computed + count
    blocks = np.array(seq.blocks[: -(-length // cache.block_size)], np.int64)
    mask = np.arange(length) <= np.arange(seq.computed, length)[:, None]
    return LongChunk(at, at + count, put(_pieces(blocks, cache)), length=length, mask=put(mask))


def _sampled_rows(step: Step, pieces: list[Piece], ends: np.ndarray, put) -> torch.Tensor | None:
    if not step.chunks:
        return None
    row_of = {id(seq): end - 1 for (seq, _), end in zip(pieces, ends.tolist(), strict=True)}
    return put(np.fromiter((row_of[id(seq)] for seq in step.sampled), np.int64, len(step.sampled)))

"""The tensors of one step, laid out once and read by every layer.

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

from fusion.inference.scheduler import Sequence, Step

Piece = tuple[Sequence, int]
"""A sequence and how many tokens of it the step computes."""

SHORT_CHUNK_TOKENS = 16
"""Chunks up to this length are computed as paged rows: one call for all of them instead of one for each."""


@dataclass(frozen=True)
class RowSlice:
    """Neighbouring paged rows and the P blocks they attend over, row after row.

    ``pieces`` [2P]: the blocks' rows of a pool, all keys before all values. ``owner``: of each pair its row in the
    slice. ``bias`` [P, 1, block_size]: 0, or -inf behind the row's position. ``width``: blocks of the longest row.
    ``place``: of each pair its cell in [rows, width].
    """

    start: int
    stop: int
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
    ``sampled`` [S]: the rows whose logits are wanted; None: all rows.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: tuple[RowSlice, ...]
    packed: tuple[int, int, list[int]]
    long: tuple[LongChunk, ...]
    sampled: torch.Tensor | None


def build_batch(
    step: Step,
    block_size: int,
    kv_heads: int,
    slice_blocks: int,
    device: torch.device,
    masks: torch.Tensor,
    invariant: bool = False,
) -> Batch:
    """Lays out a step.

    Args:
        slice_blocks: most pairs of a slice of paged rows; no row has more.
        masks: see `KVCache.masks`.
    """
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
    heads = np.arange(2 * kv_heads).reshape(2, 1, kv_heads) * block_size
    slots = (table[first + block] * (2 * kv_heads * block_size) + offset)[:, None] + heads

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    row_count = len(step.decodes) + sum(count for _, count in short)
    packed_stop = row_count + sum(count for _, count in whole)
    chunks, at = [], packed_stop
    for seq, count in long:
        chunks.append(_long_chunk(seq, at, count, block_size, put))
        at += count
    return Batch(
        ids=put(ids),
        positions=put(positions),
        slots=put(slots.ravel()),
        rows=tuple(_slice_rows(positions[:row_count], first[:row_count], table, block_size, slice_blocks, put, masks)),
        packed=(row_count, packed_stop, [count for _, count in whole]),
        long=tuple(chunks),
        sampled=_sampled_rows(step, pieces, ends, put),
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


def _slice_rows(positions, first, table, block_size: int, slice_blocks: int, put, masks: torch.Tensor):
    """Cuts paged rows into slices of at most ``slice_blocks`` pairs."""
    counts = positions // block_size + 1
    ends = np.cumsum(counts)
    start = 0
    while start < len(counts):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + slice_blocks, side="right")))
        count = counts[start:stop]
        owner = np.repeat(np.arange(stop - start), count)
        index = np.arange(before, int(ends[stop - 1])) - (ends[start:stop] - count)[owner]
        valid = np.minimum(positions[start:stop][owner] + 1 - index * block_size, block_size)
        width = int(count.max())
        yield RowSlice(
            start,
            stop,
            put(_pieces(table[first[start:stop][owner] + index])),
            put(owner),
            masks.index_select(0, put(valid)),
            width,
            put(owner * width + index),
        )
        start = stop


def _pieces(blocks: np.ndarray) -> np.ndarray:
    return np.concatenate([2 * blocks, 2 * blocks + 1])


def _long_chunk(seq: Sequence, at: int, count: int, block_size: int, put) -> LongChunk:
    length = seq.computed + count
    blocks = np.array(seq.blocks[: -(-length // block_size)], np.int64)
    mask = np.arange(length) <= np.arange(seq.computed, length)[:, None]
    return LongChunk(at, at + count, put(_pieces(blocks)), length, put(mask))


def _sampled_rows(step: Step, pieces: list[Piece], ends: np.ndarray, put) -> torch.Tensor | None:
    if not step.chunks:
        return None
    row_of = {id(seq): end - 1 for (seq, _), end in zip(pieces, ends.tolist(), strict=True)}
    return put(np.fromiter((row_of[id(seq)] for seq in step.sampled), np.int64, len(step.sampled)))

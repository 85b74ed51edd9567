"""Build the tensors of one step, which every layer reads: planned in numpy, then sent to the card by one copy.

Rows of a batch, in this order:

    decodes            one row per sequence                        ┐ paged rows: each attends over its own blocks
    short chunks       the few tokens that follow a shared prefix  ┘
    whole prompts      no token of them is cached: packed          causal attention inside each
    long chunks        part of a prompt after cached tokens        ┐ one attention call per chunk
    drafts             the rows of one path each                   ┘

With ``invariant`` every token is a paged row, those of drafts behind the decodes: the only form whose result does not
depend on the rest of the batch. With a fused operator for paged rows, those of drafts are paged rows too."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from fusion.inference.kv_cache import KVCache
from fusion.inference.sequence import Blocks, EngineStep, Sequence
from fusion.inference.verification import Verification
from fusion.npu import Device
from fusion.npu.operators import PagedRows


class PathRows(NamedTuple):
    """Rows of a draft's path: ``tokens`` at the positions from ``computed`` on, in the path's ``blocks``."""

    blocks: Blocks
    computed: int
    tokens: list[int]


Piece = tuple[Sequence | PathRows, int]
"""A sequence or path, and how many tokens of it the step computes."""

SHORT_CHUNK_TOKENS = 16
"""Chunks up to this length are computed as paged rows: one call for all of them instead of one for each."""


PagedPlan = tuple[list[np.ndarray], Callable[[Iterator[torch.Tensor]], PagedRows | None]]
"""Arrays that go to the card, int64 [n] each; and what takes them from the card's tensors. None: there are no rows"""


@dataclass(frozen=True)
class LongChunk:
    """Rows ``start:stop`` attend to the tokens in ``pieces`` (rows of a pool), of which they are the last.
    ``lengths``: number of rows; ``kv_lengths``: of tokens; a list each, for which a card may keep what it makes."""

    start: int
    stop: int
    pieces: torch.Tensor
    lengths: list[int]
    kv_lengths: list[int]


@dataclass(frozen=True)
class Batch:
    """Inputs of one forward pass of N tokens.

    ``slots`` [P * W * K]: where each of the P parts of what a token keeps (`KVLayout`: its key of each head, then
    each value; or one latent) goes in a pool seen as rows of ``width``, for each of the W rows that are written here.
    ``repeated`` [M]: rows that are written a second time, to other paths of their draft or for a shared prefill; None:
    there are none.
    ``own`` [W]: the row of each that is written here; ``empty`` [E]: the paged rows none of whose tokens are here, and
    which attend to an arbitrary one; None, both: all KV is here (`Context`).
    ``sampled`` [S]: the rows whose logits are required; None: all rows."""

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    repeated: torch.Tensor | None
    own: torch.Tensor | None
    empty: torch.Tensor | None
    rows: PagedRows | None
    packed: tuple[int, int, list[int]]
    long: tuple[LongChunk, ...]
    sampled: torch.Tensor | None


class BatchSize(NamedTuple):
    """What a step that only decodes is padded to: ``rows``, of which the last are the last sequence again, which write
    what it writes; and ``blocks`` of each row."""

    rows: int
    blocks: int


class Places(NamedTuple):
    """Where a step writes in the cache, int64 [N + M] each: ``blocks``, ``offsets`` in them, and the ``rows`` that are
    written there."""

    blocks: np.ndarray
    offsets: np.ndarray
    rows: np.ndarray


class BatchPlan(NamedTuple):
    """``arrays``: what goes to the card, int64 [n] each; ``on_card``: makes a batch of the tensors there; ``lengths``
    int64 [R]: tokens to which each paged row attends."""

    arrays: list[np.ndarray]
    on_card: Callable[[Iterator[torch.Tensor]], Batch]
    places: Places
    lengths: np.ndarray

    def on_host(self, device: Device) -> torch.Tensor:
        """Join the arrays in memory from which one copy brings them to the card, pinned where the card has it."""
        host = device.host_empty((sum(map(len, self.arrays)),), torch.int64)
        np.concatenate(self.arrays, out=host.numpy())
        return host

    def of(self, joined: torch.Tensor) -> Batch:
        """Return the batch of what `on_host` has joined, on the card."""
        return self.on_card(iter(joined.split([len(array) for array in self.arrays])))

    def send(self, device: Device) -> Batch:
        return self.of(self.on_host(device).to(device.torch_device, non_blocking=True))


def plan_batch(step: EngineStep, cache: KVCache, invariant: bool = False, size: BatchSize | None = None) -> BatchPlan:
    """Plan the tensors of a step; with ``size`` it only decodes."""
    context, page_size, heads = cache.context, cache.page_size, cache.layout.heads
    short, whole, long = _sort_chunks(step, invariant)
    paths: list[Piece] = [piece for draft in step.verified for piece in _paths(draft)]
    paged_paths = invariant or cache.reads_blocks
    before, behind = (paths, []) if paged_paths else ([], paths)
    decodes = step.decodes + step.decodes[-1:] * (size.rows - len(step.decodes) if size else 0)
    pieces = [(seq, 1) for seq in decodes] + before + short + whole + long + behind
    table, first_of_piece = _block_table([rows for rows, _ in pieces] + [seq for seq, _ in step.shared_prefill])
    starts = np.fromiter((rows.computed for rows, _ in pieces), np.int64, len(pieces))
    if only_decodes := not (step.chunks or paths):
        positions, first, ends = starts, first_of_piece, np.arange(1, len(pieces) + 1)
        ids = np.fromiter((seq.tokens[-1] for seq in decodes), np.int64, len(pieces))
    else:
        counts = np.fromiter((count for _, count in pieces), np.int64, len(pieces))
        ends = np.cumsum(counts)
        positions = np.arange(ends[-1]) + np.repeat(starts - (ends - counts), counts)
        first = np.repeat(first_of_piece[: len(pieces)], counts)
        ids = np.fromiter(chain.from_iterable(_new_tokens(*piece) for piece in pieces), np.int64, len(positions))
    first_path = len(decodes) if paged_paths else len(pieces) - len(paths)
    first_row = int(ends[first_path - 1]) if first_path else 0  # of the drafts, whose rows lie one behind the other
    end_of = {} if only_decodes else {id(rows): end for (rows, _), end in zip(pieces, ends.tolist(), strict=True)}
    repeated, holders = _repeated_rows(step, first_row, first_path, end_of=end_of, first_shared=len(pieces))
    written = np.concatenate([np.arange(len(positions)), repeated])
    block, offset = np.divmod(positions[written], cache.block_size)
    block = table[np.concatenate([first, first_of_piece[holders]]) + block]
    keys = (block * (heads * page_size) + offset % page_size)[:, None] + np.arange(heads) * page_size
    own = np.flatnonzero(context.is_own(offset)) if context.is_shared else slice(None)
    slots = np.stack([keys[own] + part * cache.blocks * heads * page_size for part in range(cache.layout.parts)])

    row_count = len(decodes) + sum(count for _, count in before + short)
    packed_stop = row_count + sum(count for _, count in whole)
    lasts, divided = positions[:row_count], []
    if context.is_shared:
        held = context.count_own(lasts + 1)
        lasts, divided = np.maximum(held, 1) - 1, [written[own], np.flatnonzero(held == 0)]
    options: dict[str, Any] = dict(cache=cache, invariant=invariant, width=size.blocks if size else 0)
    paged, take_paged = _plan_paged_rows(lasts, first[:row_count], table, **options)
    arrays = [ids, positions, slots.ravel(), repeated, *divided, *paged]
    arrays += [_pieces_of(*piece, cache) for piece in long + behind]
    arrays += [] if only_decodes else [_sampled_rows(step, end_of, first_row=first_row)]

    def on_card(tensors: Iterator[torch.Tensor]) -> Batch:
        ids_N, positions_N, slots_PWK, repeated_M = (next(tensors) for _ in range(4))
        own_W, empty_E = (next(tensors) for _ in divided) if divided else (None, None)
        rows = take_paged(tensors)
        return Batch(
            ids=ids_N,
            positions=positions_N,
            slots=slots_PWK,
            repeated=repeated_M if len(repeated) else None,
            own=own_W,
            empty=empty_E,
            rows=rows,
            packed=(row_count, packed_stop, [count for _, count in whole]),
            long=tuple(_long_chunks(long + behind, packed_stop, pieces=tensors)),
            sampled=None if only_decodes else next(tensors),
        )

    return BatchPlan(arrays, on_card, Places(block, offset, written), lasts + 1)


def _plan_paged_rows(
    positions: np.ndarray, first: np.ndarray, table: np.ndarray, *, cache: KVCache, invariant: bool, width: int = 0
) -> PagedPlan:
    """Plan rows at these ``positions`` among the tokens that this rank stores, int64 [R]; row r's blocks are
    ``table[first[r]]`` and those behind it. ``width``: blocks of each row, for `blocks_RB`; 0: as many as needed."""
    lengths, of_rows = positions + 1, cache.needs_block_rows and len(positions) > 0
    if of_rows:  # rows of one width, which an operator reads as they are
        width = width or int(positions.max()) // cache.page_size + 1
        table = table[np.minimum(first[:, None] + np.arange(width), len(table) - 1)].ravel()
        first = np.arange(len(positions)) * width

    def take(tensors: Iterator[torch.Tensor]) -> PagedRows | None:
        rows = PagedRows(next(tensors), next(tensors), next(tensors))
        if of_rows:
            blocks_RB = rows.table.view(-1, width).to(torch.int32)
            rows = rows._replace(blocks_RB=blocks_RB, host_lengths=tuple(lengths.tolist()), invariant=invariant)
        return rows if len(lengths) else None

    return [table, first, lengths], take


def _paths(one: Verification) -> Iterator[Piece]:
    start = len(one.seq.tokens) - 1
    for path in one.paths:
        rows = PathRows(one.table(path.number), start + one.depths[path.start], one.tokens[path.start : path.stop])
        yield rows, path.stop - path.start


def _new_tokens(rows: Sequence | PathRows, count: int) -> list[int]:
    return rows.tokens if isinstance(rows, PathRows) else rows.tokens[rows.computed : rows.computed + count]


def _repeated_rows(
    step: EngineStep, row: int, piece: int, *, end_of: dict[int, int], first_shared: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows that are written a second time, and the number in the block table of the holder of the blocks,
    int64 both: rows that a path of a draft has in common with an earlier one, and those that fill the last block of a
    shared prefill. ``row``: first row of the drafts; ``piece``: first piece; ``first_shared``: number of the first
    shared prefill. ``end_of``: the row behind those of each sequence."""
    rows: list[int] = []
    pieces: list[int] = []
    for one in step.verified:
        for shared in one.shared:
            rows += [row + before for before in shared]
            pieces += [piece] * len(shared)
            piece += 1
        row += len(one)
    for number, (seq, other) in enumerate(step.shared_prefill, first_shared):
        count, end = len(seq.tokens) - seq.computed, end_of[id(other)]
        rows += range(end - count, end)
        pieces += [number] * count
    return np.array(rows, np.int64), np.array(pieces, np.int64)


def _sort_chunks(step: EngineStep, invariant: bool) -> tuple[list[Piece], list[Piece], list[Piece]]:
    if invariant:
        return list(step.chunks), [], []
    short: list[Piece] = []
    whole: list[Piece] = []
    long: list[Piece] = []
    for seq, count in step.chunks:
        (whole if seq.computed == 0 else short if count <= SHORT_CHUNK_TOKENS else long).append((seq, count))
    whole.sort(key=lambda piece: piece[1])  # neighbours of one length share a kernel call
    return short, whole, long


def _block_table(holders: list[Sequence | PathRows]) -> tuple[np.ndarray, np.ndarray]:
    """All blocks that these hold in one array, and where each one's begin."""
    lengths = np.fromiter((len(holder.blocks) for holder in holders), np.int64, len(holders))
    table = np.frombuffer(b"".join([holder.blocks for holder in holders]), np.int64)  # arrays, joined as bytes
    return table, np.cumsum(lengths) - lengths


def _pieces_of(rows: Sequence | PathRows, count: int, cache: KVCache) -> np.ndarray:
    """Return the rows of a pool that hold the tokens which are computed after ``count`` more: all keys before all
    values, or latents."""
    blocks = np.array(rows.blocks[: -(-(rows.computed + count) // cache.block_size)], np.int64)
    return np.concatenate([blocks + part * cache.blocks for part in range(cache.layout.parts)])


def _long_chunks(long: Iterable[Piece], start: int, *, pieces: Iterator[torch.Tensor]) -> Iterator[LongChunk]:
    """Long chunks, of which the first begins at row ``start``; ``pieces`` yields the blocks of each."""
    for seq, count in long:
        yield LongChunk(start, start + count, next(pieces), [count], [seq.computed + count])
        start += count


def _sampled_rows(step: EngineStep, end_of: dict[int, int], first_row: int) -> np.ndarray:
    """The rows of ``step.drawn``. ``end_of``: as in `_repeated_rows`; ``first_row``: of the drafts."""
    rows = [end_of[id(seq)] - 1 for seq in step.sampled[: len(step.sampled) - len(step.shared_prefill)]]
    rows += [end_of[id(other)] - 1 for _, other in step.shared_prefill]
    return np.concatenate([np.array(rows, np.int64), np.arange(first_row, first_row + sum(map(len, step.verified)))])

"""Plan how paged rows, each a token that attends over its own blocks, read the KV cache by a table."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from fusion.inference.kv_cache import KVCache
from fusion.npu.operators import PagedRows

PagedPlan = tuple[list[np.ndarray], Callable[[Iterator[torch.Tensor]], PagedRows | None]]
"""Arrays that go to the card, int64 [n] each; and what takes them from the card's tensors. None: there are no rows"""


def plan_paged_rows(
    positions: np.ndarray, first: np.ndarray, table: np.ndarray, *, cache: KVCache, invariant: bool, width: int = 0
) -> PagedPlan:
    """Plan rows at these ``positions`` among the tokens that this rank stores, int64 [R]; row r's blocks are
    ``table[first[r]]`` and those behind it. ``width``: blocks of each row, for `blocks_RB`; 0: as many as
    needed."""
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


def pieces_of(blocks: np.ndarray, cache: KVCache) -> np.ndarray:
    """Return the rows of a pool that hold these blocks: all keys before all values, or latents."""
    return np.concatenate([blocks + part * cache.blocks for part in range(cache.layout.parts)])

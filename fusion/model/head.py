"""Compute logits from hidden states: for this TP rank's share of the vocabulary, or for a range of it.

The logits of a micro-batch would be the largest tensor of a training step: those of 16,384 rows and 151,936 ids are
10 GB in float32. What reduces them (`fusion/training/logprobs.py`) computes one tile after the other instead, a
rectangle of rows and ids of at most `TILE_BYTES`; `tile_shape` decides its shape, for a pass and for the estimate of
its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fusion.model.id_mask import IdMask
from fusion.npu.operators import linear

TILE_BYTES = 256 << 20
"""Bytes of the float32 logits of a tile. A product of this size with 2,048 channels takes 0.3 ms or more on a card,
several times as long as the launches of the operations on its result; the copies beside it take up to 1 GB."""
LOGIT_BYTES = 14
"""Bytes of a logit of a tile in the backward pass: bf16 as computed; scaled, its probability and gradient in float32"""
TILE_ROWS = 4096
"""Rows of a tile whose ids do not all fit: in the backward pass a tile of few rows would read and write more bytes of
the head's gradient than of logits, one of few ids more bytes of the hidden states' gradient."""
ALIGNED = 64
"""Sizes of a tile are multiples of it, so that the rows of its logits are aligned for matrix products."""


def tile_shape(rows: int, ids: int, tile_bytes: int = TILE_BYTES) -> tuple[int, int]:
    """Return the rows and ids of a tile of logits [``rows``, ``ids``]; both of all of them where they fit."""
    limit = max(1, tile_bytes // 4)
    if rows * ids <= limit:
        return max(1, rows), ids
    tile_ids = min(ids, _aligned(limit // min(rows, TILE_ROWS)))
    return min(rows, _aligned(limit // tile_ids)), tile_ids


def _aligned(size: int) -> int:
    return max(1, size - size % ALIGNED or size)


class Head:
    """Computes logits with the weights of a language model's head.

    Attributes:
        blocks: the weights [ids, D] of this TP rank's ids, in consecutive blocks of rows.
        mask: of ids that no token has; None: the model masks no id.
        row_multiple: as of `fusion.npu.operators.rows.linear`.
    """

    def __init__(self, blocks: Sequence[torch.Tensor], mask: IdMask | None = None, row_multiple: int = 1):
        self.blocks, self.mask, self.row_multiple = list(blocks), mask, row_multiple
        self.num_ids = sum(len(block) for block in self.blocks)

    def logits(self, hidden_nD: torch.Tensor) -> torch.Tensor:
        """Compute this TP rank's columns of the logits, [n, V / tp], from hidden states [n, D]."""
        return self.logits_of(hidden_nD, self.blocks, range(self.num_ids))

    def logits_of(
        self,
        hidden_nD: torch.Tensor,
        weights: Sequence[torch.Tensor],
        ids: range,
        removed: list[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute the logits [n, ids] of a range of this rank's ids with their ``weights`` (`weights_of`, or copies
        with gradients of their own). ``removed``: as of `IdMask`."""
        logits = [linear(hidden_nD, weight, self.row_multiple) for weight in weights]
        logits_nI = logits[0] if len(logits) == 1 else torch.cat(logits, dim=-1)
        return logits_nI if self.mask is None else self.mask(logits_nI, removed, ids)

    def places_of(self, ids: range) -> list[tuple[int, slice]]:
        """Return where the rows of a range of this rank's ids lie: block and rows of it, in order."""
        places, first = [], 0
        for index, block in enumerate(self.blocks):
            start, stop = max(ids.start - first, 0), min(ids.stop - first, len(block))
            if start < stop:
                places.append((index, slice(start, stop)))
            first += len(block)
        return places

    def weights_of(self, ids: range) -> list[torch.Tensor]:
        """Return the weights of a range of this rank's ids, views of `blocks`."""
        return [self.blocks[index][rows] for index, rows in self.places_of(ids)]

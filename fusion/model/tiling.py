"""Decide the tiles in which the logits of a micro-batch are computed: for a pass, and for the estimate of its memory.

Whole logits would be the largest tensor of a training step: those of 16,384 rows and 151,936 ids are 10 GB in float32.
A tile is a rectangle of rows and ids. Invariants: its logits take at most the given bytes, or are a single one; whole
logits that fit are one tile."""

TILE_BYTES = 256 << 20
"""Bytes of the float32 logits of a tile. A product of this size with 2,048 channels takes 0.3 ms or more on a card,
several times as long as the launches of the operations on its result; the copies beside it take up to 1 GB."""
LOGIT_BYTES = 12
"""Bytes of a logit of a tile at most: as computed, its distance to a number of its row, and its exponential, all in
float32; one that is computed in bf16 takes 10."""
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

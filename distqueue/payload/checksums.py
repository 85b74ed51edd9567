"""Checksums of a column's bytes in a segment: xxh3, one per block of whole samples.

    samples   | a | b  |  c  | d | e                      | f | g |
    stripes   |<-- BLOCK_BYTES -->|                   |                  |
    blocks    [ a   b     c    d ] [ e                   ] [ f   g ]      a block: the samples that begin in one stripe

So a block is as small as one sample if samples are large, and short samples share one, because a checksum of 100 bytes
would cost more in calls than in bytes. Blocks follow from lengths and layout: only their checksums are stored. A reader
verifies every block of which it copied a sample, once: a block that it copied as a whole in its own memory, another one
where it lies. Damage costs the samples of its block."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from distqueue.layout import ColumnLayout

BLOCK_BYTES = 1 << 14
"""Size of a stripe"""


class Blocks(NamedTuple):
    """The blocks of a column of B samples."""

    rows: np.ndarray
    """(K + 1,) int64: block k has samples rows[k] to rows[k + 1] - 1"""
    bytes: np.ndarray
    """(K + 1,) int64: and these bytes of the column"""

    @classmethod
    def of(cls, layout: ColumnLayout, nbytes: int, offsets: np.ndarray | None) -> "Blocks":
        """Divide a column of `nbytes`, which has no block if it is empty. `offsets`: (B + 1,) int64 if it is ragged."""
        if not nbytes:
            return cls(np.zeros(1, np.int64), np.zeros(1, np.int64))
        if nbytes < BLOCK_BYTES:  # all samples begin in the first stripe
            num_samples = nbytes // layout.element_bytes if offsets is None else len(offsets) - 1
            return cls(np.array([0, num_samples]), np.array([0, nbytes]))
        width = layout.element_bytes
        starts = np.arange(0, nbytes, width) if offsets is None else offsets[:-1] * width
        firsts = np.flatnonzero(np.diff(starts // BLOCK_BYTES)) + 1
        rows = np.concatenate([[0], firsts, [len(starts)]])
        return cls(rows, np.concatenate([starts[rows[:-1]], [nbytes]]))

    def __len__(self) -> int:
        return len(self.rows) - 1


def sums_of(pieces: Sequence[tuple[np.ndarray, Blocks]]) -> np.ndarray:
    """Compute the checksums of all blocks of columns (bytes, blocks), one column after the other: (K,) uint64."""
    slices = []
    for data, blocks in pieces:
        view, bounds = data.data, blocks.bytes.tolist()
        slices += [view[start:stop] for start, stop in zip(bounds[:-1], bounds[1:], strict=True)]
    return sum_all(slices)


def sum_all(slices: Sequence[memoryview]) -> np.ndarray:
    """Compute the checksum of each slice: (K,) uint64. On one thread: xxhash holds the interpreter's lock, and is as
    fast as one thread reads memory."""
    return np.array([checksum(view) for view in slices], np.uint64)

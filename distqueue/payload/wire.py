"""Columns as they cross machines: a small header and the bare bytes of their buffers. No padding, no pickle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from distqueue.column import Column
from distqueue.messages import layout_fields, layout_of, pack, smallest, unpack
from distqueue.payload.segment_file import Stretch, bare_bytes

Frames = list[np.ndarray]
"""One uint8 array a column, in the order of the header"""


def to_wire(columns: Mapping[str, Column]) -> tuple[bytes, Frames]:
    """(header, frames); the frames are views of the columns' buffers. Columns of equal lengths share them."""
    distinct: list[np.ndarray] = []
    entries = []
    for name, column in columns.items():
        shared = None
        if column.offsets is not None:
            lengths = column.lengths().numpy()
            known = [i for i, other in enumerate(distinct) if np.array_equal(other, lengths)]
            shared = known[0] if known else len(distinct)
            if not known:
                distinct.append(lengths)
        entries.append((name, *layout_fields(column.layout), shared))
    header = pack({"columns": entries}, {f"lengths{i}": smallest(lengths) for i, lengths in enumerate(distinct)})
    return header, [bare_bytes(column) for column in columns.values()]


def from_wire(header: bytes, frames: Frames) -> dict[str, Stretch]:
    """The columns where the frames lie."""
    told, arrays = unpack(header)
    offsets = {name: np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) for name, lengths in arrays.items()}
    stretches = {}
    for (name, kind, dtype, trailing, ragged, shared), frame in zip(told["columns"], frames, strict=True):
        stretches[name] = Stretch(
            layout_of(kind, dtype, trailing, ragged), frame, None if shared is None else offsets[f"lengths{shared}"]
        )
    return stretches

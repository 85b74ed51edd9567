"""Serializes columns between machines: a small header and the bare bytes of their buffers. No padding, no pickle."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from distqueue.layout import Layout
from distqueue.messages import index_of_lengths, pack, smallest, unpack
from distqueue.payload.segment_file import Stretch

Frames = list[np.ndarray]
"""One uint8 array per column, in the order of the header"""


def to_wire(columns: Mapping[str, Stretch]) -> tuple[bytes, Frames]:
    """Serialize columns as (header, frames). Frames are the columns' bytes, not copies; equal lengths are sent once."""
    distinct: list[np.ndarray] = []
    entries = []
    for name, column in columns.items():
        lengths = None if column.offsets is None else np.diff(column.offsets)
        shared = index_of_lengths(lengths, distinct)
        entries.append((name, *column.layout.fields, shared))
    header = pack({"columns": entries}, {f"lengths{i}": smallest(lengths) for i, lengths in enumerate(distinct)})
    return header, [column.data for column in columns.values()]


def from_wire(header: bytes, frames: Frames) -> dict[str, Stretch]:
    """Restore columns as views of the frames."""
    fields, arrays = unpack(header)
    offsets = {name: np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]) for name, lengths in arrays.items()}
    stretches = {}
    for (name, *layout, shared), frame in zip(fields["columns"], frames, strict=True):
        offsets_B = None if shared is None else offsets[f"lengths{shared}"]
        stretches[name] = Stretch(Layout.from_fields(name, layout), frame, offsets_B)
    return stretches

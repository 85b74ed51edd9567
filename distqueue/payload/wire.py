"""Serialize columns between machines: a small header and the bare bytes of their buffers. No padding, no pickle. The
header begins with its own checksum and has that of each buffer; the receiver verifies them."""

from collections.abc import Mapping

import numpy as np
from xxhash import xxh3_64_intdigest as checksum

from distqueue.layout import ColumnLayout
from distqueue.messages import index_of_lengths, offsets_of, pack, smallest, unpack
from distqueue.payload.checksums import sum_all
from distqueue.payload.segment_file import Stretch

Frames = list[np.ndarray]
"""One uint8 array per column, in the order of the header"""
SUM_BYTES = 8
"""Size of the checksum in front of a header"""


class DamagedInTransit(LookupError):
    """Columns arrived with other bytes than were sent: send them again."""


def to_wire(columns: Mapping[str, Stretch]) -> tuple[bytes, Frames]:
    """Serialize columns as (header, frames). Frames are the columns' bytes, not copies; equal lengths are sent once."""
    distinct: list[np.ndarray] = []
    entries = []
    for name, column in columns.items():
        lengths = None if column.offsets is None else np.diff(column.offsets)
        shared = index_of_lengths(lengths, distinct)
        entries.append((name, *column.layout.fields, shared))
    frames = [column.data for column in columns.values()]
    arrays = {f"lengths{i}": smallest(lengths) for i, lengths in enumerate(distinct)}
    header = pack({"columns": entries}, arrays | {"sums": sum_all([frame.data for frame in frames])})
    return with_checksum(header), frames


def with_checksum(header: bytes) -> bytes:
    return checksum(header).to_bytes(SUM_BYTES, "little") + header


def from_wire(header: bytes, frames: Frames) -> dict[str, Stretch]:
    """Restore columns as views of the frames. DamagedInTransit: they are not what was sent."""
    header, expected = header[SUM_BYTES:], int.from_bytes(header[:SUM_BYTES], "little")
    if checksum(header) != expected:
        raise DamagedInTransit("the lengths of columns arrived with another checksum")
    fields, arrays = unpack(header)
    wrong = np.flatnonzero(sum_all([frame.data for frame in frames]) != arrays.pop("sums"))
    if len(wrong):
        raise DamagedInTransit(f"column {fields['columns'][wrong[0]][0]!r} arrived with another checksum")
    offsets = {name: offsets_of(lengths) for name, lengths in arrays.items()}
    stretches = {}
    for (name, *layout, shared), frame in zip(fields["columns"], frames, strict=True):
        offsets_B = None if shared is None else offsets[f"lengths{shared}"]
        stretches[name] = Stretch(ColumnLayout.from_fields(name, layout), frame, offsets_B)
    return stretches

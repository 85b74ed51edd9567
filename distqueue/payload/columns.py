"""The client's side of payload: columns of tensors viewed as stretches of bytes, and gathered stretches as columns.

Nothing is copied but by `gather_columns`, once. The queue's actor and its shards do not import this file: it loads
torch."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from distqueue.column import Column, torch_dtype
from distqueue.messages import Delivery, DeliveryPart
from distqueue.packed import PackedBatch
from distqueue.payload.buffers import BufferPool
from distqueue.payload.gather import gather
from distqueue.payload.segment_file import Stretch


def stretches_of(batch: PackedBatch) -> dict[str, Stretch]:
    stretches = {}
    for name, column in batch.columns.items():
        buffer, offsets = column.buffer, column.offsets
        data = buffer.view(torch.uint8).numpy().reshape(-1) if buffer.numel() else np.empty(0, np.uint8)
        stretches[name] = Stretch(column.layout, data, None if offsets is None else offsets.numpy())
    return stretches


def gather_columns(
    parts: Sequence[DeliveryPart], sources: Sequence[Mapping[str, Stretch]], buffers: BufferPool
) -> dict[str, Column]:
    """Gather all columns of all parts into one buffer; the runs of a part index `sources`. SourcesDamaged: see
    `gather`."""
    gathered = gather(parts, sources, buffers)
    columns: dict[str, Column] = {}
    for part in parts:
        num_samples = part.num_samples
        columns |= {name: _column_of(name, gathered[name], num_samples) for name in part.columns}
    return columns


def packed(delivery: Delivery, columns: dict[str, Column]) -> PackedBatch:
    """Return a delivery's samples with their columns."""
    return PackedBatch(
        ids=delivery.ids,
        columns=columns,
        groups=delivery.groups,
        versions=delivery.versions,
        lengths={name: lengths_B.tolist() for name, lengths_B in delivery.lengths.items()},
    )


def _column_of(name: str, stretch: Stretch, num_samples: int) -> Column:
    """View a stretch, whose arrays are writable."""
    layout, offsets = stretch.layout, stretch.offsets
    shape = (num_samples if offsets is None else int(offsets[-1]), *layout.trailing)
    dtype = torch_dtype(name, layout)
    if stretch.data.nbytes:
        buffer = torch.from_numpy(stretch.data).view(dtype).reshape(shape)
    else:
        buffer = torch.empty(shape, dtype=dtype)
    return Column(buffer, None if offsets is None else torch.from_numpy(offsets), layout.kind)

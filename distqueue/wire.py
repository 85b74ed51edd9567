"""A batch as it travels: one small JSON header and the bare bytes of its buffers. No padding, no pickle."""

from __future__ import annotations

import json
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from distqueue.column import Column
from distqueue.packed import PackedBatch

Frames = list[np.ndarray]
"""One uint8 array per buffer, and one per offsets table of a ragged column, in the order of the header"""


def to_wire(batch: PackedBatch) -> tuple[bytes, Frames]:
    """(header, frames); the frames are views of the batch's buffers."""
    dtypes = {name: str(column.buffer.dtype).removeprefix("torch.") for name, column in batch.columns.items()}
    header = {
        "ids": batch.ids,
        "groups": batch.groups,
        "versions": batch.versions,
        "columns": [
            (name, column.kind, dtypes[name], column.buffer.shape, column.layout.ragged)
            for name, column in batch.columns.items()
        ],
    }
    tensors = chain.from_iterable((column.buffer, column.offsets) for column in batch.columns.values())
    return json.dumps(header).encode(), [_bytes_of(tensor) for tensor in tensors if tensor is not None]


def from_wire(header: bytes, frames: Frames) -> PackedBatch:
    """The batch, in memory of its own where a frame is read-only (as Ray's shared memory is)."""
    fields = json.loads(header)
    remaining = iter(frames)
    columns = {}
    for name, kind, dtype, shape, ragged in fields["columns"]:
        buffer = _tensor_of(next(remaining), getattr(torch, dtype)).reshape(shape)
        columns[name] = Column(buffer, _tensor_of(next(remaining), torch.int64) if ragged else None, kind)
    versions = tuple((oldest, newest) for oldest, newest in fields["versions"])
    return PackedBatch(tuple(fields["ids"]), columns, tuple(fields["groups"]), versions)


def _bytes_of(tensor: Tensor) -> np.ndarray:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy()


def _tensor_of(frame: np.ndarray, dtype: torch.dtype) -> Tensor:
    if not frame.size:  # an empty array may have stride 0, which torch refuses to view
        return torch.empty(0, dtype=dtype)
    return torch.from_numpy(frame if frame.flags.writeable else frame.copy()).view(dtype)

"""One read for a group of ranks that need the same samples: the leader asks the queue, the group gets it by broadcast.

Two messages over the group's own process group: the sizes, then everything: | frame sizes | header | frames |.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist

from distqueue.packed import PackedBatch
from distqueue.wire import from_wire, to_wire


class Readable(Protocol):
    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch: ...


def read_once(
    queue: Readable, ids: Sequence[str], columns: Sequence[str], group: dist.ProcessGroup | None
) -> PackedBatch:
    """`queue.read` for every rank of ``group`` (None: this process alone), with one request to the queue.

    Collective over the group, whose rank 0 is the leader; all pass the same arguments.

    Raises:
        ValueError: on every rank, with the leader's message, where its read was refused.
    """
    if group is None:
        return queue.read(ids, columns)
    leader = dist.get_rank(group) == 0
    pieces: list[np.ndarray] = []
    frames = -1
    if leader:
        try:
            header, payload = to_wire(queue.read(ids, columns))
            bounds = np.array([len(header), *(len(frame) for frame in payload)], np.int64)
            pieces, frames = [bounds.view(np.uint8), np.frombuffer(header, np.uint8), *payload], len(payload)
        except Exception as refused:
            pieces = [np.frombuffer(str(refused).encode(), np.uint8)]
    sizes = torch.tensor([frames, sum(len(piece) for piece in pieces)])
    dist.broadcast(sizes, group=group, group_src=0)
    frames, total = sizes.tolist()
    wire = torch.from_numpy(np.concatenate(pieces)) if leader else torch.empty(total, dtype=torch.uint8)
    dist.broadcast(wire, group=group, group_src=0)
    if frames < 0:
        raise ValueError(wire.numpy().tobytes().decode())
    table = 8 * (frames + 1)
    bounds = np.cumsum(wire[:table].numpy().view(np.int64))
    first, *rest = np.split(wire[table:].numpy(), bounds[:-1])
    return from_wire(first.tobytes(), [frame.copy() for frame in rest])

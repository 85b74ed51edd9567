"""The interface of a group that reads once: `GroupReader` is to its ranks what a queue is to a process.

Invariants: one request to the queue per batch, for any number of ranks; every rank gets its own columns, bitwise as the
queue handed them out, and the lengths of all; an error of the leader's request is raised on all ranks, with its type
and message. If a rank dies, the others raise ConnectionError by their group's timeout at the latest.

Only the leader asks, so only its error can differ from the other ranks', and it is broadcast in place of the samples:
no agreement of the whole group is needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distqueue.column import Column
from distqueue.errors import JournalFull, QueueClosed, SamplesLost
from distqueue.hierarchy.exchange import GroupExchange
from distqueue.messages import ColumnInfo, Put, pack, spans_of, unpack
from distqueue.packed import PackedBatch

RAISED = (JournalFull, QueueClosed, ValueError)
"""Errors that all ranks raise as the leader does, besides SamplesLost; any other error is a RuntimeError on the other
ranks."""


class Readable(Protocol):
    """The part of a queue that `GroupReader.read` uses."""

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch: ...


@dataclass(frozen=True, eq=False)
class Received:
    """B samples as one rank of a group receives them: ``batch`` with the columns it needs, and ``lengths`` (int64 [B],
    see `Column.lengths`) of every column that any rank of the group needs."""

    batch: PackedBatch
    lengths: dict[str, Tensor]

    @classmethod
    def of(cls, batch: PackedBatch, columns: Sequence[str] | None = None) -> "Received":
        """Select the ``columns`` (None: all) that a rank needs of ``batch``, and the lengths of all."""
        return cls(batch.select(columns=columns), {name: column.lengths() for name, column in batch.columns.items()})


class GroupReader(GroupExchange):
    """Read a queue for a group of ranks. Created once, by all of them together.

    Args:
        queue: used by the leader, rank 0 of the group, only.
        group: with a backend for the CPU, where messages lie; None: this process alone.
        columns: the columns this rank needs. They may differ between ranks, and be empty if lengths are enough.
        place: name of the machine; ranks of one place are close to each other. Default: the running kernel's.

    Attributes:
        tree: the edges along which batches are forwarded.
        union: the columns that the leader requests.
        requests: made by this rank to the queue.
        sent_bytes, sent_messages: sent by this rank in the group; messages by destination rank.

    >>> import torch
    >>> from distqueue import LocalQueue, PackedBatch
    >>> from distqueue.hierarchy import GroupReader
    >>> queue = LocalQueue(["train"])
    >>> queue.put(PackedBatch.from_samples(["a"], {"prompt": [torch.tensor([1, 2])], "reward": torch.tensor([0.5])}))
    ()
    >>> reader = GroupReader(queue, group=None, columns=["reward"])  # in a group: on every rank, with its own columns
    >>> received = reader.read(["a"])
    >>> received.batch["reward"].buffer.tolist(), received.lengths["reward"].tolist()
    ([0.5], [1])
    """

    def __init__(
        self, queue: Readable, group: dist.ProcessGroup | None, columns: Sequence[str], *, place: str | None = None
    ):
        super().__init__(group, tuple(columns), place=place)
        self.queue = queue
        self.requests = 0

    def read(self, ids: Sequence[str]) -> Received:
        """Call `queue.read` for all ranks. Collective over the group; the leader's ids are used, and its errors are
        raised on all ranks."""
        if self.alone:
            self.requests += 1
            return Received.of(self.queue.read(ids, self.union), self.columns)
        batch, failure, message = None, None, b""
        if self.rank == 0:
            self.requests += 1
            try:
                batch = self.queue.read(ids, self.union)
                message = pack({}, {"samples": np.frombuffer(Put.of(batch).to_bytes(), np.uint8)})
            except Exception as error:
                failure, message = error, pack({"error": _describe(error)}, {})
        try:
            return self._distribute(message, batch, failure)
        finally:
            self.finish()

    def _distribute(self, message: bytes, batch: PackedBatch | None, failure: Exception | None) -> Received:
        fields, arrays = unpack(self.broadcast_metadata(message))
        if "error" in fields:
            raise failure or _error_of(*fields["error"])
        manifest = Put.from_bytes(arrays["samples"].tobytes())
        if batch is None:
            return self._received(manifest, self.forward_payload(manifest))
        self.send_payload(manifest, batch)
        return Received.of(batch, self.columns)

    def _received(self, manifest: Put, buffers: dict[str, Tensor]) -> Received:
        lengths = {
            name: torch.ones(len(manifest.ids), dtype=torch.int64)
            if info.lengths is None
            else torch.from_numpy(info.lengths.copy())
            for name, info in manifest.columns.items()
        }
        columns = {name: _column(manifest.columns[name], buffers[name], lengths[name]) for name in self.columns}
        batch = PackedBatch(
            ids=manifest.ids,
            columns=columns,
            groups=manifest.groups,
            versions=() if manifest.versions is None else spans_of(manifest.versions),
        )
        return Received(batch, lengths)


def _describe(failure: Exception) -> tuple[str, str, tuple[str, ...]]:
    """Return (type, message, ids of the samples that were lost)."""
    if isinstance(failure, SamplesLost):
        return SamplesLost.__name__, str(failure), failure.ids
    kind = next((kind for kind in RAISED if isinstance(failure, kind)), None)
    if kind is None:
        return "", f"the leader of the group: {type(failure).__name__}: {failure}", ()
    return kind.__name__, str(failure), ()


def _error_of(name: str, text: str, lost: Sequence[str]) -> Exception:
    if name == SamplesLost.__name__:
        return SamplesLost(lost, text)
    return next((kind for kind in RAISED if kind.__name__ == name), RuntimeError)(text)


def _column(info: ColumnInfo, flat: Tensor, lengths: Tensor) -> Column:
    buffer = flat.view(int(lengths.sum()), *info.layout.trailing)
    return Column(buffer, F.pad(lengths.cumsum(0), (1, 0)) if info.layout.ragged else None, info.layout.kind)

"""The interface of a group that reads once: `GroupReader` is to its ranks what a queue is to a process.

Invariants: one request to the queue per batch, for any number of ranks; every rank gets its own columns, bitwise as the
queue handed them out, and the lengths of all; an error of the leader's request is raised on all ranks, with its type
and message. If a rank dies, the others raise ConnectionError by their group's timeout at the latest.

Only the leader asks, so only its error can differ from the other ranks', and it is broadcast in place of the samples:
no agreement of the whole group is needed.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distqueue.column import Column
from distqueue.errors import JournalFull, QueueClosed, QueueDrained, SamplesLost
from distqueue.hierarchy.exchange import GroupExchange
from distqueue.messages import ColumnInfo, Put, pack, spans_of, unpack
from distqueue.packed import PackedBatch
from distqueue.request import GetRequest

MAX_SILENCE_S = 60.0
"""While the leader waits for samples, it messages the other ranks this often: their group's timeout is meant to detect
dead ranks, not slow samples."""

RAISED = (QueueDrained, JournalFull, QueueClosed, TimeoutError, ValueError)
"""Errors that all ranks raise as the leader does, besides SamplesLost; any other error is a RuntimeError on the other
ranks."""


class Readable(Protocol):
    """The part of a queue that `GroupReader.read` uses."""

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch: ...


@runtime_checkable
class Leasing(Protocol):
    """The part of a queue that `GroupReader.get` and `GroupReader.ack` use."""

    get: Callable[..., PackedBatch]
    """called with the fields of `GetRequest` as keyword arguments"""

    def ack(self, task: str, ids: Iterable[str]) -> None: ...


@dataclass(frozen=True, eq=False)
class Received:
    """B samples as one rank of a group receives them: ``batch`` with the columns it needs, and ``lengths`` (int64 [B],
    see `Column.lengths`) of every column that any rank of the group needs."""

    batch: PackedBatch
    lengths: dict[str, Tensor]

    @classmethod
    def of(cls, batch: PackedBatch, columns: Sequence[str] | None = None) -> Received:
        """Select the ``columns`` (None: all) that a rank needs of ``batch``, and the lengths of all."""
        return cls(batch.select(columns=columns), {name: column.lengths() for name, column in batch.columns.items()})


class GroupReader:
    """Reads a queue for a group of ranks. Created once, by all of them together.

    Args:
        queue: used by the leader, rank 0 of the group, only.
        group: None: this process alone.
        columns: the columns this rank needs. They may differ between ranks, and be empty if lengths are enough.
        place: name of the machine; ranks of one place are close to each other. Default: the running kernel's.
        device: where messages lie while they are sent and received; batches are on the CPU in any case. None: the CPU,
            for which the group needs a backend; a group of nccl or hccl alone needs its card here.

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
    >>> received = reader.get("train", count=1)
    >>> received.batch["reward"].buffer.tolist(), received.lengths["reward"].tolist()
    ([0.5], [1])
    >>> reader.ack("train", received.batch.ids)
    """

    def __init__(
        self,
        queue: Readable,
        group: dist.ProcessGroup | None,
        columns: Sequence[str],
        *,
        place: str | None = None,
        device: torch.device | None = None,
    ):
        self.queue, self.group, self.columns = queue, group, tuple(columns)
        self.requests = 0
        self._exchange = GroupExchange(group, self.columns, place=place, device=device)
        self.rank, self.tree, self.union = self._exchange.rank, self._exchange.tree, self._exchange.union

    @property
    def sent_bytes(self) -> int:
        return self._exchange.sent_bytes

    @property
    def sent_messages(self) -> Counter[int]:
        return self._exchange.sent_messages

    def read(self, ids: Sequence[str]) -> Received:
        """Call `queue.read` for all ranks. Collective over the group; the leader's ids are used, and its errors are
        raised on all ranks."""
        received = self._broadcast(lambda: self.queue.read(ids, self.union))
        assert received is not None
        return received

    def get(self, task: str, count: int | None = None, **options: Any) -> Received:
        """Call `queue.get` for all ranks: lease, once, samples that hold the columns of all of them.

        ``options``: the other fields of `GetRequest`. Collective over the group; the leader's arguments are used, and
        its errors are raised on all ranks. A wait takes one request per `MAX_SILENCE_S` seconds."""
        max_wait_s = math.inf if self.group is None else MAX_SILENCE_S
        timeout_s = options.get("timeout_s")
        left_s = math.inf if timeout_s is None else timeout_s
        end_s = time.monotonic() + left_s
        while True:
            wait_s = min(left_s, max_wait_s)

            def lease(wait_s: float = wait_s) -> PackedBatch:
                request = GetRequest(task, self.union, count, **options)
                request = replace(request, timeout_s=None if math.isinf(wait_s) else wait_s)
                return self._leasing.get(**vars(request))

            received = self._broadcast(lease, again=left_s > wait_s)
            if received is not None:
                return received
            left_s = max(0.0, end_s - time.monotonic())

    def ack(self, task: str, ids: Iterable[str]) -> None:
        """Call `queue.ack` on the leader; does nothing on other ranks."""
        if self.rank == 0:
            self.requests += 1
            self._leasing.ack(task, ids)

    @property
    def _leasing(self) -> Leasing:
        assert isinstance(self.queue, Leasing), (
            f"a {type(self.queue).__name__} cannot lease samples: it has no get and ack"
        )
        return self.queue

    def _broadcast(self, request: Callable[[], PackedBatch], *, again: bool = False) -> Received | None:
        """Broadcast what the leader's ``request`` returns. ``again``: return None if it timed out, to repeat it."""
        if self._exchange.alone:
            return self._request(request, again)
        batch, failure, message = None, None, b""
        if self.rank == 0:
            self.requests += 1
            try:
                batch = request()
                samples = np.frombuffer(Put.of(batch).to_bytes(), np.uint8)
                message = pack({"lengths": batch.lengths}, {"samples": samples})
            except Exception as error:
                failure, waits = error, again and isinstance(error, TimeoutError)
                message = pack({"waits": True} if waits else {"error": _describe(error)}, {})
        try:
            return self._distribute(message, batch, failure)
        finally:
            self._exchange.finish()

    def _request(self, request: Callable[[], PackedBatch], again: bool) -> Received | None:
        """`_broadcast` of a group without another rank, which needs no message."""
        self.requests += 1
        try:
            return Received.of(request(), self.columns)
        except TimeoutError:
            if again:
                return None
            raise

    def _distribute(self, message: bytes, batch: PackedBatch | None, failure: Exception | None) -> Received | None:
        fields, arrays = unpack(self._exchange.broadcast_metadata(message))
        if "waits" in fields:
            return None
        if "error" in fields:
            raise failure or _error_of(*fields["error"])
        manifest = Put.from_bytes(arrays["samples"].tobytes())
        if batch is None:
            return self._received(manifest, self._exchange.forward_payload(manifest), fields)
        self._exchange.send_payload(manifest, batch)
        return Received.of(batch, self.columns)

    def _received(self, manifest: Put, buffers: dict[str, Tensor], fields: Mapping[str, Any]) -> Received:
        lengths = {
            name: torch.ones(len(manifest.ids), dtype=torch.int64) if info.lengths is None else _owned(info.lengths)
            for name, info in manifest.columns.items()
        }
        columns = {name: _column(manifest.columns[name], buffers[name], lengths[name]) for name in self.columns}
        batch = PackedBatch(
            ids=manifest.ids,
            columns=columns,
            groups=manifest.groups,
            versions=() if manifest.versions is None else spans_of(manifest.versions),
            lengths=fields["lengths"],
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


def _owned(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())

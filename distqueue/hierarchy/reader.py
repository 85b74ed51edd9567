"""The face of a group that reads once: `GroupReader` is to its ranks what a queue is to a process.

Invariants: one request to the queue for a batch, however many ranks; every rank gets its own columns, bitwise as the
queue handed them out, and the lengths of all; what the leader's request raises all ranks raise, with its message. A
rank that dies ends the others by their group's timeout, at the latest.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distqueue.column import Column
from distqueue.core import QueueClosed, QueueDrained
from distqueue.hierarchy.exchange import Exchange
from distqueue.messages import ColumnInfo, Put, pack, unpack
from distqueue.packed import PackedBatch

BEAT_S = 60.0
"""While the leader waits for samples the other ranks hear from it this often: their group's timeout is about ranks that
have died, not about how long samples take."""

RAISED = (QueueDrained, QueueClosed, TimeoutError, ValueError)
"""What all ranks raise as the leader does; anything else is a RuntimeError on those that did not ask."""


class Readable(Protocol):
    """The part of a queue's face that `GroupReader.read` uses."""

    def read(self, ids: Sequence[str], columns: Sequence[str]) -> PackedBatch: ...


@runtime_checkable
class Leasing(Protocol):
    """The part that `GroupReader.get` and `GroupReader.ack` use."""

    def get(self, task: str, columns: Sequence[str], count: int | None = None, **options: Any) -> PackedBatch: ...

    def ack(self, task: str, ids: Iterable[str]) -> None: ...


@dataclass(frozen=True, eq=False)
class Received:
    """B samples as a rank of a group gets them: ``batch`` with the columns that it needs, and ``lengths`` (int64 [B],
    see `Column.lengths`) of every column that any rank of its group needs."""

    batch: PackedBatch
    lengths: dict[str, Tensor]

    @classmethod
    def of(cls, batch: PackedBatch, columns: Sequence[str] | None = None) -> Received:
        """What a rank that needs ``columns`` (None: all) gets of ``batch``."""
        return cls(batch.select(columns=columns), {name: column.lengths() for name, column in batch.columns.items()})


class GroupReader:
    """Reads for a group of ranks. Made once, by all of them together.

    Args:
        queue: only the leader, rank 0 of the group, uses it.
        group: None: this process alone.
        columns: what this rank needs. It may differ from rank to rank, and be nothing where lengths are enough.
        place: the machine by name; ranks of one place are near one another. Default: that of the running kernel.
        device: where messages lie when they are sent and received; batches are on the CPU in any case. None: the CPU,
            which the group needs a backend for; one of nccl or hccl alone takes its card.

    Attributes:
        tree: who passes on what to whom.
        union: what the leader asks the queue for.
        requests: that this rank made to the queue.
        sent_bytes, sent_messages: that this rank sent in the group, messages by the rank they went to.
    """

    def __init__(
        self,
        queue: Readable,
        group: dist.ProcessGroup | None,
        columns: Sequence[str],
        place: str | None = None,
        device: torch.device | None = None,
    ):
        self.queue, self.group, self.columns = queue, group, tuple(columns)
        self.requests = 0
        self._exchange = Exchange(group, self.columns, place, device)
        self.rank, self.tree, self.union = self._exchange.rank, self._exchange.tree, self._exchange.union

    @property
    def sent_bytes(self) -> int:
        return self._exchange.sent_bytes

    @property
    def sent_messages(self) -> Counter[int]:
        return self._exchange.sent_messages

    def read(self, ids: Sequence[str]) -> Received:
        """`queue.read` for every rank. Collective over the group; the leader's ids count, and its errors are raised by
        all."""
        delivery = self._share(lambda: self.queue.read(ids, self.union))
        assert delivery is not None
        return delivery

    def get(
        self,
        task: str,
        count: int | None = None,
        *,
        token_budget: int | None = None,
        whole_groups: bool = False,
        min_version: int | None = None,
        share: tuple[int, int] | None = None,
        timeout_s: float | None = None,
    ) -> Received:
        """`queue.get` for every rank: samples that have the columns of all of them, leased once. Collective over the
        group; the leader's arguments count, and its errors are raised by all. Of a wait, every `BEAT_S` seconds are a
        request."""
        options: dict[str, Any] = {"token_budget": token_budget, "whole_groups": whole_groups}
        options |= {
            name: given for name, given in {"min_version": min_version, "share": share}.items() if given is not None
        }
        patience_s = math.inf if self.group is None else BEAT_S
        left_s = math.inf if timeout_s is None else timeout_s
        end_s = time.monotonic() + left_s
        while True:
            wait_s = min(left_s, patience_s)
            options["timeout_s"] = None if math.isinf(wait_s) else wait_s
            delivery = self._share(lambda: self._leasing.get(task, self.union, count, **options), left_s > wait_s)
            if delivery is not None:
                return delivery
            left_s = max(0.0, end_s - time.monotonic())

    def ack(self, task: str, ids: Iterable[str]) -> None:
        """`queue.ack` by the leader; nothing on other ranks."""
        if self.rank == 0:
            self.requests += 1
            self._leasing.ack(task, ids)

    @property
    def _leasing(self) -> Leasing:
        assert isinstance(self.queue, Leasing), f"a {type(self.queue).__name__} leases no samples"
        return self.queue

    def _share(self, ask: Callable[[], PackedBatch], again: bool = False) -> Received | None:
        """What the leader gets by ``ask``, on every rank. With ``again``, None where it is still waiting."""
        batch, failure, news = None, None, b""
        if self.rank == 0:
            self.requests += 1
            try:
                batch = ask()
                samples = np.frombuffer(Put.of(batch).to_bytes(), np.uint8)
                news = pack({"too_old": batch.too_old}, {"samples": samples})
            except Exception as error:
                failure, waits = error, again and isinstance(error, TimeoutError)
                news = pack({"waits": True} if waits else {"error": _described(error)}, {})
        try:
            return self._spread(news, batch, failure)
        finally:
            self._exchange.finish()

    def _spread(self, news: bytes, batch: PackedBatch | None, failure: Exception | None) -> Received | None:
        fields, arrays = unpack(self._exchange.pass_on_metadata(news))
        if "waits" in fields:
            return None
        if "error" in fields:
            raise failure or _error_of(*fields["error"])
        manifest = Put.from_bytes(arrays["samples"].tobytes())
        if batch is None:
            return self._delivery(manifest, self._exchange.pass_on_payload(manifest), fields["too_old"])
        self._exchange.send_payload(manifest, batch)
        return Received.of(batch, self.columns)

    def _delivery(self, manifest: Put, held: dict[str, Tensor], too_old: Iterable[str]) -> Received:
        lengths = {
            name: torch.ones(len(manifest.ids), dtype=torch.int64) if info.lengths is None else _owned(info.lengths)
            for name, info in manifest.columns.items()
        }
        columns = {name: _column(manifest.columns[name], held[name], lengths[name]) for name in self.columns}
        spans = () if manifest.versions is None else manifest.versions.tolist()
        versions = tuple((oldest, newest) for oldest, newest in spans)
        return Received(PackedBatch(manifest.ids, columns, manifest.groups, versions, tuple(too_old)), lengths)


def _described(failure: Exception) -> tuple[str, str]:
    kind = next((kind for kind in RAISED if isinstance(failure, kind)), None)
    if kind is None:
        return "", f"the leader of the group: {type(failure).__name__}: {failure}"
    return kind.__name__, str(failure)


def _error_of(name: str, text: str) -> Exception:
    return next((kind for kind in RAISED if kind.__name__ == name), RuntimeError)(text)


def _column(info: ColumnInfo, flat: Tensor, lengths: Tensor) -> Column:
    buffer = flat.view(int(lengths.sum()), *info.layout.trailing)
    return Column(buffer, F.pad(lengths.cumsum(0), (1, 0)) if info.layout.ragged else None, info.layout.kind)


def _owned(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())

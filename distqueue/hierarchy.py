"""Ranks that need the same samples read once: the leader asks the queue, and a tree of ranks passes on what it got.

    queue ◄─ one request ─ leader ─► metadata: 1 message │ payload: 1 message a dtype ─► children ─► theirs …

The metadata is what the queue knows of the samples, and the lengths of all columns, each table of lengths once. The
payload of an edge is the columns that its subtree needs (`tree`). A rank forwards a dtype as soon as it has arrived,
while the next is under way.

Invariants: one request to the queue for a batch, however many ranks; every rank gets its own columns, bitwise as the
queue handed them out, and the lengths of all; what the leader's request raises all ranks raise, with its message;
payload is neither pickled nor padded. A rank that dies ends the others by their group's timeout, at the latest.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distqueue.column import Column
from distqueue.core import QueueClosed, QueueDrained
from distqueue.messages import ColumnInfo, Put, pack, unpack
from distqueue.packed import PackedBatch
from distqueue.tree import Member, plan_tree

BEAT_S = 60.0
"""While the leader waits for samples the other ranks hear from it this often: their group's timeout is about ranks that
have died, not about how long samples take."""

FIRST_ROOM = 4096
"""Bytes of the metadata's message, so that both ends know its size. Metadata that does not fit takes a second message,
once: then there is room for as much."""

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
        self.rank = 0 if group is None else dist.get_rank(group)
        self.requests = self.sent_bytes = 0
        self.sent_messages: Counter[int] = Counter()
        self._device = device or torch.device("cpu")
        self._room = FIRST_ROOM
        self._sending: list[tuple[dist.Work, Tensor]] = []
        members = self._meet(place or this_machine())
        self.tree = plan_tree(members)
        self.union = tuple(sorted(frozenset[str]().union(*(member.columns for member in members))))
        """What the leader asks the queue for"""
        self._parent, self._children = self.tree.incoming(self.rank), self.tree.outgoing(self.rank)

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

    def _meet(self, place: str) -> list[Member]:
        """Every rank's place and needs. Collective; NCCL and HCCL want one before messages between some of a group."""
        if self.group is None:
            return [Member(0, place, frozenset(self.columns))]
        mine = _to_tensor(json.dumps([place, self.columns]).encode())
        sizes = self._gather(torch.tensor([len(mine)])).flatten().tolist()
        rows = self._gather(F.pad(mine, (0, max(sizes) - len(mine))))
        told = [json.loads(_to_bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
        return [Member(rank, place, frozenset(columns)) for rank, (place, columns) in enumerate(told)]

    def _gather(self, mine: Tensor) -> Tensor:
        """Every rank's row, on the CPU."""
        mine = mine.to(self._device)
        rows = mine.new_empty(dist.get_world_size(self.group) * len(mine))
        dist.all_gather_into_tensor(rows, mine, group=self.group)
        return rows.cpu().view(-1, len(mine))

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
            sending, self._sending = self._sending, []
            for work, _ in sending:
                work.wait()

    def _spread(self, news: bytes, batch: PackedBatch | None, failure: Exception | None) -> Received | None:
        fields, arrays = unpack(self._pass_on_metadata(news))
        if "waits" in fields:
            return None
        if "error" in fields:
            raise failure or _error_of(*fields["error"])
        manifest = Put.from_bytes(arrays["samples"].tobytes())
        if batch is None:
            return self._delivery(manifest, self._pass_on_payload(manifest), fields["too_old"])
        for names in _by_dtype(manifest, self.union):
            self._pass_on({name: batch[name].buffer.flatten().to(self._device) for name in names})
        return Received.of(batch, self.columns)

    def _pass_on_metadata(self, news: bytes) -> bytes:
        """The leader's ``news``, on every rank."""
        room = self._room
        if self._parent is None:
            framed = _to_tensor(len(news).to_bytes(8, "little") + news).to(self._device)
            messages = [F.pad(framed, (0, max(0, room - len(framed))))[:room], framed[room:]]
        else:
            first = self._received(torch.uint8, room)
            rest = 8 + int.from_bytes(_to_bytes(first[:8]), "little") - room
            messages = [first, self._received(torch.uint8, max(0, rest))]
        for edge in self._children:
            for message in messages:
                self._send(message, edge.child)
        told = _to_bytes(torch.cat(messages))
        size = 8 + int.from_bytes(told[:8], "little")
        if size > room:
            self._room = 1 << (size - 1).bit_length()
        return told[8:size]

    def _pass_on_payload(self, manifest: Put) -> dict[str, Tensor]:
        """What arrives from the parent, passed on to the children: flat buffers on the CPU by column."""
        assert self._parent is not None
        dtypes = list(_by_dtype(manifest, self._parent.columns))
        sizes = [[_numel(manifest.columns[name]) for name in names] for names in dtypes]
        coming = [
            self._receive(manifest.columns[names[0]].layout.dtype, sum(parts))
            for names, parts in zip(dtypes, sizes, strict=True)
        ]
        held: dict[str, Tensor] = {}
        for names, parts, (message, works) in zip(dtypes, sizes, coming, strict=True):
            for work in works:
                work.wait()
            self._pass_on(dict(zip(names, message.split(parts), strict=True)), message)
            held |= dict(zip(names, message.cpu().split(parts), strict=True))
        return held

    def _pass_on(self, flat: dict[str, Tensor], together: Tensor | None = None) -> None:
        """Starts to send columns of one dtype to the children, each what its subtree needs. ``together``: all of them
        as one tensor, where they lie so."""
        messages: dict[tuple[str, ...], Tensor] = {(name,): part for name, part in flat.items()}
        if together is not None:
            messages[tuple(flat)] = together
        for edge in self._children:
            names = tuple(name for name in flat if name in edge.columns)
            if names and names not in messages:
                messages[names] = torch.cat([flat[name] for name in names])
            if names:
                self._send(messages[names], edge.child)

    def _delivery(self, manifest: Put, held: dict[str, Tensor], too_old: Iterable[str]) -> Received:
        lengths = {
            name: torch.ones(len(manifest.ids), dtype=torch.int64) if info.lengths is None else _owned(info.lengths)
            for name, info in manifest.columns.items()
        }
        columns = {name: _column(manifest.columns[name], held[name], lengths[name]) for name in self.columns}
        spans = () if manifest.versions is None else manifest.versions.tolist()
        versions = tuple((oldest, newest) for oldest, newest in spans)
        return Received(PackedBatch(manifest.ids, columns, manifest.groups, versions, tuple(too_old)), lengths)

    def _received(self, dtype: torch.dtype, numel: int) -> Tensor:
        message, works = self._receive(dtype, numel)
        for work in works:
            work.wait()
        return message

    def _receive(self, dtype: torch.dtype, numel: int) -> tuple[Tensor, list[dist.Work]]:
        """Room for a message from the parent, and what to wait for until it is there. Nothing is no message."""
        assert self._parent is not None
        message = torch.empty(numel, dtype=dtype, device=self._device)
        return message, self._start(dist.irecv, message, self._parent.parent) if numel else []

    def _send(self, message: Tensor, child: int) -> None:
        if message.numel():
            self._sending += [(work, message) for work in self._start(dist.isend, message, child)]
            self.sent_bytes += message.nbytes
            self.sent_messages[child] += 1

    def _start(self, way: Callable, message: Tensor, peer: int) -> list[dist.Work]:
        # as bytes: not every backend knows every dtype
        return dist.batch_isend_irecv([dist.P2POp(way, message.view(torch.uint8), group=self.group, group_peer=peer)])


def this_machine() -> str:
    """The same in all processes that run on one kernel, whatever their containers call it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _described(failure: Exception) -> tuple[str, str]:
    kind = next((kind for kind in RAISED if isinstance(failure, kind)), None)
    if kind is None:
        return "", f"the leader of the group: {type(failure).__name__}: {failure}"
    return kind.__name__, str(failure)


def _error_of(name: str, text: str) -> Exception:
    return next((kind for kind in RAISED if kind.__name__ == name), RuntimeError)(text)


def _by_dtype(manifest: Put, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The columns of each message: an order that is the same on both ends of an edge."""
    columns = sorted((str(manifest.columns[name].layout.dtype), name) for name in names)
    for _, group in groupby(columns, key=lambda column: column[0]):
        yield tuple(name for _, name in group)


def _numel(info: ColumnInfo) -> int:
    return info.nbytes // info.layout.dtype.itemsize


def _column(info: ColumnInfo, flat: Tensor, lengths: Tensor) -> Column:
    buffer = flat.view(int(lengths.sum()), *info.layout.trailing)
    return Column(buffer, F.pad(lengths.cumsum(0), (1, 0)) if info.layout.ragged else None, info.layout.kind)


def _owned(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array if array.flags.writeable else array.copy())


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()

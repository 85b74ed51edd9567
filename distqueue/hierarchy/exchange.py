"""A rank's messages in a group that reads once: from its parent, and on to its children.

The metadata is what the queue knows of the samples, and the lengths of all columns, each table of lengths once. The
payload of an edge is the columns that its subtree needs (`tree.py`). A rank forwards a dtype as soon as it has arrived,
while the next is under way.

Invariants: payload is neither pickled nor padded; every message is counted by who sends it.
"""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distqueue.hierarchy.tree import Member, plan_tree
from distqueue.messages import ColumnInfo, Put
from distqueue.packed import PackedBatch

FIRST_ROOM = 4096
"""Bytes of the metadata's message, so that both ends know its size. Metadata that does not fit takes a second message,
once: then there is room for as much."""


class Exchange:
    """One rank's end of the group's tree. Made once, by all ranks together; arguments as of `GroupReader`.

    Attributes:
        union: the columns that any rank of the group needs.
        sent_bytes, sent_messages: that this rank sent, messages by the rank they went to.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        columns: Sequence[str],
        place: str | None = None,
        device: torch.device | None = None,
    ):
        self.rank = 0 if group is None else dist.get_rank(group)
        self.sent_bytes = 0
        self.sent_messages: Counter[int] = Counter()
        self._group, self._device = group, device or torch.device("cpu")
        self._room = FIRST_ROOM
        self._sending: list[tuple[dist.Work, Tensor]] = []
        members = self._meet(place or this_machine(), columns)
        self.tree = plan_tree(members)
        self.union = tuple(sorted(frozenset[str]().union(*(member.columns for member in members))))
        self._parent, self._children = self.tree.incoming(self.rank), self.tree.outgoing(self.rank)

    def pass_on_metadata(self, news: bytes) -> bytes:
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

    def send_payload(self, manifest: Put, batch: PackedBatch) -> None:
        """Starts to send the leader's batch to its children."""
        for names in _by_dtype(manifest, self.union):
            self._pass_on({name: batch[name].buffer.flatten().to(self._device) for name in names})

    def pass_on_payload(self, manifest: Put) -> dict[str, Tensor]:
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

    def finish(self) -> None:
        """Waits until what this rank sends has left."""
        sending, self._sending = self._sending, []
        for work, _ in sending:
            work.wait()

    def _meet(self, place: str, columns: Sequence[str]) -> list[Member]:
        """Every rank's place and needs. Collective; NCCL and HCCL want one before messages between some of a group."""
        if self._group is None:
            return [Member(0, place, frozenset(columns))]
        mine = _to_tensor(json.dumps([place, columns]).encode())
        sizes = self._gather(torch.tensor([len(mine)])).flatten().tolist()
        rows = self._gather(F.pad(mine, (0, max(sizes) - len(mine))))
        told = [json.loads(_to_bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
        return [Member(rank, place, frozenset(columns)) for rank, (place, columns) in enumerate(told)]

    def _gather(self, mine: Tensor) -> Tensor:
        """Every rank's row, on the CPU."""
        mine = mine.to(self._device)
        rows = mine.new_empty(dist.get_world_size(self._group) * len(mine))
        dist.all_gather_into_tensor(rows, mine, group=self._group)
        return rows.cpu().view(-1, len(mine))

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
        return dist.batch_isend_irecv([dist.P2POp(way, message.view(torch.uint8), group=self._group, group_peer=peer)])


def this_machine() -> str:
    """The same in all processes that run on one kernel, whatever their containers call it."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _by_dtype(manifest: Put, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """The columns of each message: an order that is the same on both ends of an edge."""
    columns = sorted((str(manifest.columns[name].layout.dtype), name) for name in names)
    for _, group in groupby(columns, key=lambda column: column[0]):
        yield tuple(name for _, name in group)


def _numel(info: ColumnInfo) -> int:
    return info.nbytes // info.layout.dtype.itemsize


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.cpu().numpy().tobytes()

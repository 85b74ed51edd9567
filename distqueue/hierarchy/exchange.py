"""A rank's messages in a group that reads once: received from its parent, forwarded to its children.

The metadata describes the samples and the lengths of all columns, each distinct table of lengths once. The payload of
an edge is the columns that its subtree needs (`tree.py`). A rank forwards a dtype as soon as it has arrived, while the
next is in flight.

Invariants: payload is neither pickled nor padded; the sender counts every message; if another rank has ended or left
the group, every method raises ConnectionError by the group's timeout at the latest."""

import json
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from distqueue.column import torch_dtype
from distqueue.hierarchy.tree import Member, plan_tree
from distqueue.messages import Put
from distqueue.packed import PackedBatch

INITIAL_METADATA_BYTES = 4096
"""Bytes of the metadata message, whose size both ends must know. Metadata that does not fit takes a second message
once; from then on the message is as large as needed."""


class GroupExchange:
    """One rank's end of the group's tree. Created once, by all ranks together; arguments and attributes as of
    `GroupReader`."""

    def __init__(self, group: dist.ProcessGroup | None, columns: Sequence[str], *, place: str | None):
        self.rank = 0 if group is None else dist.get_rank(group)
        self.sent_bytes = 0
        self.sent_messages: Counter[int] = Counter()
        self.group, self.columns = group, tuple(columns)
        self._room = INITIAL_METADATA_BYTES
        self._sending: list[tuple[dist.Work, Tensor]] = []
        members = self._meet(place or this_machine(), columns)
        self.tree = plan_tree(members)
        self.union = tuple(sorted(frozenset[str]().union(*(member.columns for member in members))))
        self._parent, self._children = self.tree.incoming(self.rank), self.tree.outgoing(self.rank)

    @property
    def alone(self) -> bool:
        """Whether the group has no other rank."""
        return self._parent is None and not self._children

    def broadcast_metadata(self, message: bytes) -> bytes:
        """Return the leader's ``message`` on every rank."""
        room = self._room
        if self._parent is None:
            framed = _to_tensor(len(message).to_bytes(8, "little") + message)
            frames = [F.pad(framed, (0, max(0, room - len(framed))))[:room], framed[room:]]
        else:
            first = self._receive(torch.uint8, room)
            rest = 8 + int.from_bytes(_to_bytes(first[:8]), "little") - room
            frames = [first, self._receive(torch.uint8, max(0, rest))]
        for edge in self._children:
            for frame in frames:
                self._send(frame, edge.child)
        received = _to_bytes(torch.cat(frames))
        size = 8 + int.from_bytes(received[:8], "little")
        if size > room:
            self._room = 1 << (size - 1).bit_length()
        return received[8:size]

    def send_payload(self, manifest: Put, batch: PackedBatch) -> None:
        """Start sending the leader's batch to its children."""
        for names in _by_dtype(manifest, self.union):
            self._forward({name: batch[name].buffer.flatten() for name in names})

    def forward_payload(self, manifest: Put) -> dict[str, Tensor]:
        """Receive the payload from the parent and forward it to the children. Return flat CPU buffers by column."""
        assert self._parent is not None
        dtypes = list(_by_dtype(manifest, self._parent.columns))
        sizes = [
            [info.nbytes // info.layout.item_bytes for info in map(manifest.columns.__getitem__, names)]
            for names in dtypes
        ]
        incoming = [
            self._start_receiving(torch_dtype(names[0], manifest.columns[names[0]].layout), sum(numels))
            for names, numels in zip(dtypes, sizes, strict=True)
        ]
        buffers: dict[str, Tensor] = {}
        for names, numels, (message, works) in zip(dtypes, sizes, incoming, strict=True):
            for work in works:
                _wait(work)
            self._forward(dict(zip(names, message.split(numels), strict=True)), message)
            buffers |= dict(zip(names, message.split(numels), strict=True))
        return buffers

    def finish(self) -> None:
        """Wait until all messages of this rank are sent."""
        sending, self._sending = self._sending, []
        for work, _ in sending:
            _wait(work)

    def _meet(self, place: str, columns: Sequence[str]) -> list[Member]:
        """Exchange all ranks' places and needs. Collective."""
        if self.group is None:
            return [Member(0, place, frozenset(columns))]
        row = _to_tensor(json.dumps([place, columns]).encode())
        sizes = self._gather(torch.tensor([len(row)])).flatten().tolist()
        rows = self._gather(F.pad(row, (0, max(sizes) - len(row))))
        needs = [json.loads(_to_bytes(row[:size])) for row, size in zip(rows, sizes, strict=True)]
        return [Member(rank, place, frozenset(columns)) for rank, (place, columns) in enumerate(needs)]

    def _gather(self, row: Tensor) -> Tensor:
        rows = row.new_empty(dist.get_world_size(self.group) * len(row))
        with _communication():
            dist.all_gather_into_tensor(rows, row, group=self.group)
        return rows.view(-1, len(row))

    def _forward(self, flat: dict[str, Tensor], whole: Tensor | None = None) -> None:
        """Start sending columns of one dtype to the children, to each what its subtree needs. ``whole``: all of them
        as one tensor, if they are contiguous."""
        messages: dict[tuple[str, ...], Tensor] = {(name,): part for name, part in flat.items()}
        if whole is not None:
            messages[tuple(flat)] = whole
        for edge in self._children:
            names = tuple(name for name in flat if name in edge.columns)
            if names and names not in messages:
                messages[names] = torch.cat([flat[name] for name in names])
            if names:
                self._send(messages[names], edge.child)

    def _receive(self, dtype: torch.dtype, numel: int) -> Tensor:
        message, works = self._start_receiving(dtype, numel)
        for work in works:
            _wait(work)
        return message

    def _start_receiving(self, dtype: torch.dtype, numel: int) -> tuple[Tensor, list[dist.Work]]:
        """Start receiving a message from the parent. Return it and the works to wait for; none if it is empty."""
        assert self._parent is not None
        message = torch.empty(numel, dtype=dtype)
        return message, self._start(dist.irecv, message, self._parent.parent) if numel else []

    def _send(self, message: Tensor, child: int) -> None:
        if message.numel():
            self._sending += [(work, message) for work in self._start(dist.isend, message, child)]
            self.sent_bytes += message.nbytes
            self.sent_messages[child] += 1

    def _start(self, way: Callable, message: Tensor, peer: int) -> list[dist.Work]:
        # as bytes: not every backend knows every dtype
        post = dist.P2POp(way, message.view(torch.uint8), group=self.group, group_peer=peer)
        with _communication():
            return dist.batch_isend_irecv([post])


def _wait(work: dist.Work) -> None:
    with _communication():
        work.wait()


@contextmanager
def _communication() -> Iterator[None]:
    """Convert the errors of posting a message, gathering, or waiting.
    Raise ConnectionError: another rank of the group has ended or has left it; gloo raises a plain RuntimeError then."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"a message between the ranks of a reading group failed: {error}") from error


def this_machine() -> str:
    """Identify the running kernel: equal in all its processes, also in containers with different host names."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else socket.gethostname()


def _by_dtype(manifest: Put, names: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Group columns into messages, in an order that is the same on both ends of an edge."""
    columns = sorted((manifest.columns[name].layout.dtype, name) for name in names)
    for _, group in groupby(columns, key=lambda column: column[0]):
        yield tuple(name for _, name in group)


def _to_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _to_bytes(tensor: Tensor) -> bytes:
    return tensor.numpy().tobytes()

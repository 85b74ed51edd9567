"""Send control calls to an engine: any thread calls its leader at any time, and they apply on every rank at one step.

any thread ─ submit, abort, … ─────► Inbox (leader) ─┐
                                              ├─ one small all_gather per step (CPU): counters of every rank, and
step of every rank ────────────────────────── ┘  size of what it sends; a broadcast of the leader's orders, and messages
any thread ─ report ───────────────► Inbox (others) ─ of other ranks to the leader, only if there are any
"""

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fusion.inference.counters import COLUMNS, RankState, RankStates
from fusion.inference.request import Request
from fusion.inference.request_columns import from_columns, to_columns
from fusion.model import Mesh


@dataclass
class Orders:
    """The control calls that the leader broadcasts at one step. ``forget`` is applied first, aborts last: aborts also
    apply to requests submitted at the same step."""

    forget: list[str] = field(default_factory=list)
    """Requests whose parked KV is freed"""
    submit: list[Request] = field(default_factory=list)
    abort: list[str] = field(default_factory=list)
    abort_all: bool = False
    pause: bool = False
    version: int | None = None
    """Policy to adopt"""

    def __bool__(self) -> bool:
        orders = self.forget, self.submit, self.abort, self.abort_all, self.pause
        return any(orders) or self.version is not None

    def encode(self) -> bytes:
        return json.dumps(vars(self) | {"submit": to_columns(self.submit)}, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> "Orders":
        orders = json.loads(data)
        return cls(**orders | {"submit": from_columns(orders["submit"])})


class Inbox:
    """Collect control calls from any thread until the leader's next step takes them. They have been checked in the
    calling thread (`validation`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders = Orders()
        self._reports: list[dict[str, Any]] = []

    def add(self, **calls: Any) -> None:
        """Add control calls, by field of `Orders`: lists are extended, everything else is set."""
        with self._lock:
            for name, value in calls.items():
                if isinstance(value, list):
                    getattr(self._orders, name).extend(value)
                else:
                    setattr(self._orders, name, value)

    def report(self, items: Iterable[Mapping[str, Any]]) -> None:
        with self._lock:
            self._reports += map(dict, items)

    def take_reports(self) -> list[dict[str, Any]]:
        with self._lock:
            reports, self._reports = self._reports, []
        return reports

    def take(self) -> Orders:
        with self._lock:
            orders, self._orders = self._orders, Orders()
        return orders

    def __len__(self) -> int:
        return len(self._orders.submit)


class ControlChannel:
    """One rank's end of the control channel. A single rank sends nothing."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.inbox = Inbox()
        self.states = RankStates(np.zeros((mesh.parallel.world, COLUMNS)))
        """States of all ranks at the last `exchange`"""
        ranks, own = range(mesh.parallel.world), mesh.dp_rank
        self._same_schedule = [rank for rank in ranks if mesh.parallel.coordinate("dp", rank) == own]

    def exchange(self, state: RankState) -> Orders:
        """Return this step's orders, the same on every rank, update `states`, and send what other ranks report to the
        leader's inbox. Collective."""
        orders = self.inbox.take() if self.mesh.rank == 0 else Orders()
        if self.mesh.world_group is None:
            self.states = RankStates(np.array([state.row()]))
            return orders
        reports = self.inbox.take_reports() if self.mesh.rank else []
        payload = orders.encode() if orders else json.dumps(reports).encode() if reports else b""
        row = torch.tensor([len(payload), *state.row()], dtype=torch.float64)
        rows = row.new_empty(self.mesh.parallel.world * row.numel())
        dist.all_gather_into_tensor(rows, row, group=self.mesh.world_group)
        table = rows.view(-1, row.numel()).numpy()
        self.states = RankStates(table[:, 1:])
        size, *reported = table[:, 0].astype(int).tolist()
        self._send_reports(payload, reported)
        if not size:
            return orders
        data = _bytes_of(payload) if orders else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, group=self.mesh.world_group, group_src=0)
        return orders if orders else Orders.decode(data.numpy().tobytes())

    def _send_reports(self, payload: bytes, sizes: Sequence[int]) -> None:
        """Send this rank's reports to the leader, which receives those of all others; ``sizes``: in bytes."""
        group, rank = self.mesh.world_group, self.mesh.rank
        if rank:
            if payload:
                dist.send(_bytes_of(payload), group=group, group_dst=0)
            return
        for source, size in enumerate(sizes, start=1):
            if size:
                data = torch.empty(size, dtype=torch.uint8)
                dist.recv(data, group=group, group_src=source)
                self.inbox.report(json.loads(data.numpy().tobytes()))

    def spread(self, update: bytes) -> bytes:
        """Return on every rank what the first rank with the same schedule passes; its size was exchanged by
        `exchange`. Collective over these ranks; send nothing if there is nothing."""
        first, *others = self._same_schedule
        size = self.states.update_bytes(first)
        if not (size and others):
            return update
        group, rank = self.mesh.world_group, self.mesh.rank
        if rank == first:
            for other in others:
                dist.send(_bytes_of(update), group=group, group_dst=other)
            return update
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, group=group, group_src=first)
        return data.numpy().tobytes()

    def min_over_ranks(self, values: list[int]) -> list[int]:
        """Return the smallest value over all ranks, of each place of the list. Collective."""
        if self.mesh.world_group is None:
            return values
        tensor = torch.tensor(values)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.mesh.world_group)
        return tensor.tolist()


def _bytes_of(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

"""Send control calls to an engine: any thread calls its leader at any time, and they apply on every rank at one step.

any thread ─ submit, abort, … ─────► Inbox (leader) ─┐
                                              ├─ one small all_gather per step (CPU): counters of every rank, and
step of every rank ────────────────────────── ┘  size of the leader's orders; a broadcast only if there are any
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields

import torch
import torch.distributed as dist

from fusion.inference.request import Request, SamplingParams
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
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, data: bytes) -> Orders:
        orders = cls(**json.loads(data))
        orders.submit = [_request(item) for item in orders.submit]  # type: ignore[arg-type]
        return orders


def _request(item: dict) -> Request:
    params = dict(item["params"])
    if params["stop_token_ids"] is not None:
        params["stop_token_ids"] = tuple(params["stop_token_ids"])
    tuples = {"prompt": tuple(item["prompt"]), "response": tuple(item["response"])}
    return Request(**(item | tuples | {"params": SamplingParams(**params)}))


class Inbox:
    """Collects control calls from any thread until the leader's next step takes them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders = Orders()

    def submit(self, requests: Iterable[Request]) -> None:
        with self._lock:
            self._orders.submit += requests

    def abort(self, ids: Iterable[str] | None) -> None:
        with self._lock:
            if ids is None:
                self._orders.abort_all = True
            else:
                self._orders.abort += ids

    def forget(self, ids: Iterable[str]) -> None:
        with self._lock:
            self._orders.forget += ids

    def pause(self) -> None:
        with self._lock:
            self._orders.pause = True

    def adopt(self, version: int) -> None:
        with self._lock:
            self._orders.version = version

    def take(self) -> Orders:
        with self._lock:
            orders, self._orders = self._orders, Orders()
        return orders

    def __len__(self) -> int:
        return len(self._orders.submit)


@dataclass
class Counters:
    """One rank's counters, exchanged at every step; totals since construction. A request is counted only by the first
    TP rank of the attention rank that owns it, so that sums over ranks are correct."""

    waiting: int = 0
    running: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_hit_tokens: int = 0
    dummy_steps: int = 0
    kv_restored_tokens: int = 0
    recomputed_tokens: int = 0
    interrupted: int = 0

    def row(self) -> list[int]:
        return [getattr(self, f.name) for f in fields(self)]


class ControlChannel:
    """One rank's end of the control channel. A single rank sends nothing."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.inbox = Inbox()
        self.table: list[Counters] = [Counters()] * mesh.parallel.world
        """Counters of every rank at the last `exchange`"""

    def exchange(self, counters: Counters) -> Orders:
        """Returns this step's orders, the same on every rank, and updates `table`. Collective."""
        orders = self.inbox.take() if self.mesh.rank == 0 else Orders()
        if self.mesh.world_group is None:
            self.table = [counters]
            return orders
        payload = orders.encode() if orders else b""
        row = torch.tensor([len(payload), *counters.row()])
        rows = row.new_empty(self.mesh.parallel.world * row.numel())
        dist.all_gather_into_tensor(rows, row, group=self.mesh.world_group)
        lists = rows.view(-1, row.numel()).tolist()
        self.table = [Counters(*values[1:]) for values in lists]
        size = lists[0][0]
        if not size:
            return orders
        data = torch.empty(size, dtype=torch.uint8)
        if payload:
            data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        dist.broadcast(data, group=self.mesh.world_group, group_src=0)
        return orders if payload else Orders.decode(data.numpy().tobytes())

    def min_over_ranks(self, value: int) -> int:
        """Returns the smallest value over all ranks. Collective."""
        if self.mesh.world_group is None:
            return value
        tensor = torch.tensor([value])
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.mesh.world_group)
        return int(tensor)

    def totals(self) -> Counters:
        """Returns the sums of `table`."""
        return Counters(*(sum(column) for column in zip(*(counters.row() for counters in self.table), strict=True)))

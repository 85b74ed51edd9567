"""Send control calls to an engine: any thread calls its leader at any time, and they apply on every rank at one step.

any thread ─ submit, abort, … ─────► Inbox (leader) ─┐
                                              ├─ one small all_gather per step (CPU): counters of every rank, and
step of every rank ────────────────────────── ┘  size of what it sends; a broadcast of the leader's orders, and messages
any thread ─ report ───────────────► Inbox (others) ─ of other ranks to the leader, only if there are any
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fusion.inference.request import Request
from fusion.inference.request_columns import from_columns, to_columns
from fusion.inference.validation import checked_ids, checked_version
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
    def decode(cls, data: bytes) -> Orders:
        orders = json.loads(data)
        return cls(**orders | {"submit": from_columns(orders["submit"])})


class Inbox:
    """Collects control calls from any thread until the leader's next step takes them. Requests must have been checked
    (`validation.checked_requests`); ids and versions are checked here, with a `ValueError` in the calling thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._orders = Orders()
        self._reports: list[dict[str, Any]] = []

    def submit(self, requests: Iterable[Request]) -> None:
        with self._lock:
            self._orders.submit += requests

    def abort(self, ids: Iterable[str] | None) -> None:
        names = None if ids is None else checked_ids(ids)
        with self._lock:
            if names is None:
                self._orders.abort_all = True
            else:
                self._orders.abort += names

    def forget(self, ids: Iterable[str]) -> None:
        names = checked_ids(ids)
        with self._lock:
            self._orders.forget += names

    def pause(self) -> None:
        with self._lock:
            self._orders.pause = True

    def adopt(self, version: int) -> None:
        version = checked_version(version)
        with self._lock:
            self._orders.version = version

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
    kv_pool_hits: int = 0
    kv_pool_pulls: int = 0
    kv_pool_remote: int = 0
    kv_pool_misses: int = 0
    kv_pool_damaged: int = 0
    kv_pool_evictions: int = 0
    kv_pool_bytes: int = 0
    kv_pool_us: int = 0
    interrupted: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    decoded_sequences: int = 0
    step_decodes: int = 0
    """Of the last step; `step_us` 0: it computed nothing"""
    step_drafted: int = 0
    step_draft_tokens: int = 0
    step_accepted_tokens: int = 0
    step_prefills: int = 0
    step_us: int = 0
    step_drafting_us: int = 0
    news_bytes: int = 0
    """Of what this rank sends in `ControlChannel.spread`"""

    def of_pool(self) -> dict[str, float]:
        """Returns the figures of the KV pool, as `InferEngine.status` reports them."""
        names = ("hits", "pulls", "remote", "misses", "damaged", "evictions", "bytes")
        counts: dict[str, float] = {f"kv_pool_{name}": getattr(self, f"kv_pool_{name}") for name in names}
        return counts | {"kv_pool_s": self.kv_pool_us * 1e-6}

    def row(self) -> list[int]:
        return [getattr(self, name) for name in COUNTERS]


COUNTERS = [counter.name for counter in fields(Counters)]
WAITING, RUNNING, NEWS = map(COUNTERS.index, ("waiting", "running", "news_bytes"))


class ControlChannel:
    """One rank's end of the control channel. A single rank sends nothing."""

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self.inbox = Inbox()
        self.table = np.zeros((mesh.parallel.world, len(COUNTERS)), np.int64)
        """Counters of every rank at the last `exchange`: int64 [ranks, `COUNTERS`]"""
        ranks, own = range(mesh.parallel.world), mesh.dp_rank
        self._same_schedule = [rank for rank in ranks if mesh.parallel.coordinate("dp", rank) == own]

    def exchange(self, counters: Counters) -> Orders:
        """Returns this step's orders, the same on every rank, updates `table`, and sends what other ranks report to the
        leader's inbox. Collective."""
        orders = self.inbox.take() if self.mesh.rank == 0 else Orders()
        if self.mesh.world_group is None:
            self.table = np.array([counters.row()], np.int64)
            return orders
        reports = self.inbox.take_reports() if self.mesh.rank else []
        payload = orders.encode() if orders else json.dumps(reports).encode() if reports else b""
        row = torch.tensor([len(payload), *counters.row()])
        rows = row.new_empty(self.mesh.parallel.world * row.numel())
        dist.all_gather_into_tensor(rows, row, group=self.mesh.world_group)
        table = rows.view(-1, row.numel()).numpy()
        self.table = table[:, 1:]
        size, *reported = table[:, 0].tolist()
        self._send_reports(payload, reported)
        if not size:
            return orders
        data = _bytes_of(payload) if orders else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(data, group=self.mesh.world_group, group_src=0)
        return orders if orders else Orders.decode(data.numpy().tobytes())

    def _send_reports(self, payload: bytes, sizes: Sequence[int]) -> None:
        """Sends this rank's reports to the leader, which receives those of all others; ``sizes``: in bytes."""
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

    def spread(self, news: bytes) -> bytes:
        """Returns on every rank what the first rank with the same schedule passes; it has said in `exchange` how many
        bytes that is. Collective over these ranks; sends nothing if there is nothing."""
        first, *others = self._same_schedule
        size = int(self.table[first, NEWS])
        if not (size and others):
            return news
        group, rank = self.mesh.world_group, self.mesh.rank
        if rank == first:
            for other in others:
                dist.send(_bytes_of(news), group=group, group_dst=other)
            return news
        data = torch.empty(size, dtype=torch.uint8)
        dist.recv(data, group=group, group_src=first)
        return data.numpy().tobytes()

    def min_over_ranks(self, value: int) -> int:
        """Returns the smallest value over all ranks. Collective."""
        (smallest,) = self.each_min_over_ranks([value])
        return smallest

    def each_min_over_ranks(self, values: list[int]) -> list[int]:
        """Returns the smallest value over all ranks, of each place of the list. Collective."""
        if self.mesh.world_group is None:
            return values
        tensor = torch.tensor(values)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self.mesh.world_group)
        return tensor.tolist()

    @property
    def unfinished(self) -> np.ndarray:
        """Number of requests that wait or run, by rank: int64 [ranks]."""
        return self.table[:, WAITING] + self.table[:, RUNNING]

    def of_leader(self) -> Counters:
        """Returns the leader's counters."""
        return Counters(*self.table[0].tolist())

    def totals(self) -> Counters:
        """Returns the sums of `table` over the ranks."""
        return Counters(*self.table.sum(0).tolist())


def _bytes_of(payload: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8)

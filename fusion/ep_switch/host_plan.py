"""Plan once a host: its first rank plans, and sends every rank of the host its part.

    first rank of a host   plan ─ encode ─┬─ agree ─► all_to_all on the host ─► decode ─ agree
    its other ranks                       ┘

A part is a `Plan` with the moves and units of one rank, of which it reports what the whole plan does. It is sent as
JSON without the layouts, which the receiver has. Invariants: hosts plan alike, which ranks verify before the first
round (`Plan.digest`); a part that is damaged, another rank's or between other layouts is refused by all ranks."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from fusion.ep_switch.layout import Layout, Place
from fusion.ep_switch.moves import Move, Moves, Round
from fusion.ep_switch.peer_sockets import machine
from fusion.ep_switch.plan import Plan
from fusion.ep_switch.topology import Topology
from fusion.npu.all_or_none import all_or_none, gather_json
from fusion.npu.failures import wait_for

Ends = tuple[Layout, Layout]
"""(source, target) of a plan."""

_HASH_BYTES = 16


def plan_for_host(
    plan: Callable[[], Sequence[Plan]], ends: Sequence[Ends], *, rank: int, group: dist.ProcessGroup | None
) -> list[Plan]:
    """Return this rank's parts of the plans that ``plan`` returns between ``ends``. Collective over the group; None:
    this rank alone.
    Raise AbortedOnAllRanks: on all ranks, if planning failed on any, or one did not receive its parts.
    Raise CollectiveFailed: a process has ended."""
    own = all_or_none(machine, group=group, rank=rank, stage="plan")
    ranks = [rank] if group is None else dist.get_process_group_ranks(group)
    of_host = [other for other, its in zip(ranks, gather_json(own, group), strict=True) if tuple(its) == own]

    def parts_of_host() -> list[bytes]:
        plans = plan() if rank == of_host[0] else []
        return [encode(plans, other) if plans and other in of_host else b"" for other in ranks]

    parts = all_or_none(parts_of_host, group=group, rank=rank, stage="plan")
    (part,) = parts if group is None else [_scattered(parts, group)]
    return all_or_none(lambda: decode(part, ends, rank), group=group, rank=rank, stage="plan")


def encode(plans: Sequence[Plan], rank: int) -> bytes:
    """Serialize a rank's parts of plans."""
    data = json.dumps([_part(plan, rank) for plan in plans]).encode()
    return _hash(data, [(plan.source, plan.target) for plan in plans], rank) + data


def decode(part: bytes, ends: Sequence[Ends], rank: int) -> list[Plan]:
    """Invert `encode`. Raise ValueError: these are not the parts of ``rank`` of plans between ``ends``."""
    data = part[_HASH_BYTES:]
    if part[:_HASH_BYTES] != _hash(data, ends, rank):
        raise ValueError(f"a part of a plan, {len(part)} bytes: damaged, or not rank {rank}'s between its own layouts")
    return [_plan(*of_plan, **fields) for of_plan, fields in zip(ends, _tuples(json.loads(data)), strict=True)]


def _scattered(parts: Sequence[bytes], group: dist.ProcessGroup) -> bytes:
    """Send each rank of the group its part, in their order; return what this rank receives."""
    sizes = torch.tensor([len(part) for part in parts])
    coming = torch.empty_like(sizes)
    wait_for(dist.all_to_all_single(coming, sizes, group=group, async_op=True))
    data = torch.from_numpy(np.frombuffer(bytearray().join(parts), np.uint8))
    received = torch.empty(int(coming.sum()), dtype=torch.uint8)
    wait_for(dist.all_to_all_single(received, data, coming.tolist(), sizes.tolist(), group=group, async_op=True))
    return received.numpy().tobytes()


def _hash(data: bytes, ends: Sequence[Ends], rank: int) -> bytes:
    return hashlib.blake2b(data + repr((rank, *ends)).encode(), digest_size=_HASH_BYTES).digest()


def _part(plan: Plan, rank: int) -> dict[str, Any]:
    def own(units: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
        return [unit for unit in units if unit[0] == rank]

    fields = {name: getattr(plan, name) for name in ("bucket_bytes", "keep", "digest", "relays", "parks")}
    fields |= {name: own(getattr(plan, name)) for name in ("hosted", "shared", "unread")}
    rounds = [
        (step.of(rank), step.exchange, *map(own, (step.allocate_before, step.release_after, step.restore_before)))
        for step in plan.rounds
    ]
    return fields | {"topology": astuple(plan.topology), "rounds": rounds, "unites": plan.max_united, "rank": rank}


def _plan(source: Layout, target: Layout, topology: Sequence[Any], rounds: Sequence[Any], **fields: Any) -> Plan:
    own = [Round(Moves.of([_move(*move) for move in moves]), *units) for moves, *units in rounds]
    return Plan(source, target, topology=Topology(*topology), rounds=tuple(own), **fields)


def _move(*fields: Any) -> Move:
    move = Move(*fields)
    return move._replace(source=Place(*move.source), target=Place(*move.target))


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(map(_tuples, value))
    return {key: _tuples(of_key) for key, of_key in value.items()} if isinstance(value, dict) else value

"""Run work that succeeds on all ranks of a group or fails on all; the only implementation of this protocol.

    rank 0  work ─ done ───────┐            rank 0  AbortedOnAllRanks([rank 1 failed in optimizer: OutOfMemoryError …])
    rank 1  work ─ raised ─────┼─ agree ──► rank 1  the same, from its own exception
    rank 2  work ─ done ───────┘            rank 2  the same

A rank that fails reports it before any rank continues, so that no rank waits for it in the next collective or starts
to serve while another cannot. `all_or_none` agrees over a process group; `attempt` over the caller's `agree` (a weight
switch agrees over sockets and survives the end of a process: `fusion.ep_switch.exchange`).

`distqueue.hierarchy` does not use it, since distqueue imports nothing of fusion: there only the leader can fail, and
its exception is broadcast in place of the samples."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from fusion.npu.device import Device
from fusion.npu.failures import AbortedOnAllRanks, CollectiveFailed, FailureKind, RankFailure, failures_in, kind_of

T = TypeVar("T")
Failure = TypeVar("Failure", bound=RankFailure)


def all_or_none(
    work: Callable[[], T], *, group: dist.ProcessGroup | None, rank: int, stage: str, device: Device | None = None
) -> T:
    """Run ``work`` and return its result once it has succeeded on every rank of the group. Collective over the group.
    ``group``: None: this rank alone.
    ``rank``: this rank's global number, for messages.
    ``stage``: name of the work, for messages.
    ``device``: the device whose memory is reported by owner if ``work`` runs out of it.
    Raise AbortedOnAllRanks: on all ranks, if ``work`` failed on any.
    Raise CollectiveFailed: the ranks could not agree, because one has ended."""

    def describe(error: Exception) -> list[RankFailure]:
        return failures_in(error, rank=rank, stage=stage, bytes_by_owner=owners_if_out_of_memory(error, device))

    return attempt(work, describe=describe, agree=lambda own: gather_failures(own, group))


def attempt(
    work: Callable[[], T],
    *,
    describe: Callable[[Exception], Sequence[Failure]],
    agree: Callable[[Sequence[Failure]], Sequence[RankFailure]],
    error_type: type[AbortedOnAllRanks] = AbortedOnAllRanks,
) -> T:
    """Run ``work`` and return its result if the ranks agree that it failed on none. ``describe``: maps an exception to
    the failures that this rank reports. ``agree``: maps the failures of this rank to those of all ranks, the same on
    all.
    Raise AbortedOnAllRanks: of ``error_type``, if it failed on any rank; chained to this rank's exception, if any."""
    own: Sequence[Failure] = ()
    cause: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        cause, own = error, describe(error)
    try:
        failures = agree(own)
    except CollectiveFailed:
        if cause is None or isinstance(cause, CollectiveFailed):
            raise
        failures = own  # the other ranks are unreachable, but the caller still gets the cause
    if failures:
        raise error_type(failures) from cause
    return result


def gather_failures(own: Sequence[RankFailure], group: dist.ProcessGroup | None) -> list[RankFailure]:
    """Return the failures of all ranks, without duplicates. Costs one all_reduce of a number where there are none."""
    if group is None:
        return list(own)
    failed = torch.tensor([len(own)])
    try:
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        if not failed:
            return []
        gathered = gather_json([failure.to_json() for failure in own], group)
    except RuntimeError as error:
        raise CollectiveFailed(f"the ranks could not agree: {error}") from error
    failures: list[RankFailure] = []
    for fields in (fields for rank_failures in gathered for fields in rank_failures):
        failure = RankFailure.from_json(fields)
        if failure not in failures:
            failures.append(failure)
    return failures


def gather_json(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks, decoded from JSON, in the order of the group. Collective; on the host."""
    return [json.loads(data) for data in gather_bytes(json.dumps(value).encode(), group)]


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return the bytes of all ranks in the order of the group. Collective; on the host."""
    if group is None:
        return [data]
    world = dist.get_world_size(group)
    sizes = torch.empty(world, dtype=torch.int64)
    dist.all_gather_into_tensor(sizes, torch.tensor([len(data)]), group=group)
    largest = int(sizes.max())
    rows = torch.empty(world * largest, dtype=torch.uint8)
    row = torch.frombuffer(bytearray(data.ljust(largest, b"\0")), dtype=torch.uint8)
    dist.all_gather_into_tensor(rows, row, group=group)
    return [row[:size].numpy().tobytes() for row, size in zip(rows.view(world, largest), sizes.tolist(), strict=True)]


def owners_if_out_of_memory(error: Exception, device: Device | None) -> Mapping[str, int] | None:
    """Return the device's memory by owner if the error is out-of-memory; call it before any memory is released."""
    out_of_memory = kind_of(error) is FailureKind.OUT_OF_MEMORY
    return device.memory_by_owner() if device is not None and out_of_memory else None

"""Carries a plan out, round by round.

    agree ─► { allocate ─ copy and pack ─ all-to-all ─ unpack (─ verify) ─ release } × rounds ─► agree
       │                                                                                          │
       └ refused: both ends as they were                       failed: SwitchError on every rank, target empty

A rank that fails goes on exchanging (its buffers are there from the start), so that nobody waits for it, and all ranks
leave together. The target is then released on all of them: a half-switched model cannot serve, its storage is gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fusion.ep_switch.buckets import Holder, WireBuffers, buckets_of, resident_bytes
from fusion.ep_switch.checksum import box_checksum
from fusion.ep_switch.moves import Move, Step
from fusion.ep_switch.plan import Plan
from fusion.model.weights import Buckets
from fusion.npu import Device


@dataclass(frozen=True)
class SwitchReport:
    """What a switch did on this rank."""

    bytes_moved: int
    """Received from other ranks; over all ranks, what travelled. Checksums are not counted."""
    bytes_local: int
    """Copied inside the rank, in bytes of the target."""
    seconds: float
    rounds: int
    peak_bytes: int
    """The most bytes of weights, send and receive buffers at once, by the device's allocator."""


@dataclass(frozen=True)
class Failure:
    """Why a rank left a switch. ``round`` is -1 before the first; ``parameter`` is empty where none was at hand."""

    rank: int
    round: int
    parameter: str
    reason: str

    def __str__(self) -> str:
        where = "before the first round" if self.round < 0 else f"in round {self.round}"
        at = f" at {self.parameter}" if self.parameter else ""
        return f"rank {self.rank} {where}{at}: {self.reason}"


class SwitchError(RuntimeError):
    """A switch that broke off; raised on every rank of the group with the failures of all ranks."""

    def __init__(self, failures: list[Failure]):
        super().__init__(failures)
        self.failures = failures

    def __str__(self) -> str:
        return "the switch of weights failed on " + "; ".join(str(failure) for failure in self.failures)


def execute(
    plan: Plan,
    source: Holder,
    target: Holder,
    device: Device,
    group: dist.ProcessGroup | None = None,
    checksum: bool = False,
) -> SwitchReport:
    """Moves the weights from ``source`` to ``target``. Collective over ``group``, which holds every rank of the plan.

    Args:
        source: resident in the layout ``plan.source``; holds no bytes afterwards.
        target: released, in the layout ``plan.target``; resident afterwards. Its dtype may differ.
        group: default: all processes, or none where the plan has one rank.
        checksum: compare a checksum of every moved box between its ends, as it lies in the tensors.

    Raises:
        SwitchError: on every rank, with rank, round and parameter of each failure. What was refused before the first
            round (buckets that are not the plan's, ranks with different plans, no memory for the buffers) left both
            ends as they were; after a later failure the target is released and the source is not to be used.
    """
    switch = _Switch(plan, device, group, checksum)
    device.synchronize()
    start = time.perf_counter()
    with torch.no_grad():
        switch.prepare(source, target)
        for index, step in enumerate(plan.steps(switch.rank)):
            switch.run(index, step)
        switch.finish()
    device.synchronize()
    return SwitchReport(
        switch.bytes_moved, switch.bytes_local, time.perf_counter() - start, len(plan.rounds), switch.peak_bytes
    )


class _Switch:
    def __init__(self, plan: Plan, device: Device, group: dist.ProcessGroup | None, checksum: bool):
        self.plan, self.device, self.group, self.checksum = plan, device, group, checksum
        self.alone = len(plan.ranks) == 1 and group is None
        self.rank = dist.get_rank() if dist.is_initialized() else plan.ranks[0]
        self.peers = [self.rank] if self.alone else dist.get_process_group_ranks(group)
        assert set(plan.ranks) <= set(self.peers), f"the group {self.peers} lacks ranks of the plan's {plan.ranks}"
        self.failure: Failure | None = None
        self.cause: Exception | None = None
        self.round, self.parameter = -1, ""
        self.source: Buckets | None = None
        self.target: Buckets | None = None
        self.wire: WireBuffers | None = None
        self.other_bytes = self.peak_bytes = self.bytes_moved = self.bytes_local = 0

    def prepare(self, source: Holder, target: Holder) -> None:
        self._guard(self._prepare, source, target)
        self._agree()
        for rank, index in self.plan.unread:
            if rank == self.rank:
                assert self.source is not None
                self.source.release(index)

    def _prepare(self, source: Holder, target: Holder) -> None:
        self.source = buckets_of(source, self.plan.source, self.rank, resident=True)
        self.target = buckets_of(target, self.plan.target, self.rank, resident=False)
        held = resident_bytes(self.source) if self.source is not None else 0
        self.other_bytes = self.device.memory().allocated - held
        self.wire = WireBuffers(self.plan, self.rank, self.peers, self.device)
        self._note_peak()

    def run(self, index: int, step: Step) -> None:
        self.round, self.parameter = index, ""
        sums = self._guard(self._pack, step)
        received_sums = self._exchange(step, sums) if step.exchange else None
        self._guard(self._unpack, step, received_sums)

    def finish(self) -> None:
        self._agree()
        assert self.wire is not None
        self.wire.free()

    def _pack(self, step: Step) -> list[torch.Tensor]:
        """Copies what stays and packs what leaves; returns the checksums of what leaves."""
        assert self.wire is not None
        for index in step.allocate:
            self._end(self.target).allocate(index)
        self._note_peak()
        for move in step.copy:
            into = self._view(self.target, move, at_target=True)
            into.copy_(self._view(self.source, move, at_target=False))
            self.bytes_local += into.numel() * into.element_size()
            if self.checksum:
                self._verify(move, self._sum(move, at_target=False))
        sums = []
        for move, slot in self.wire.slots(self.wire.send, step.send):
            slot.copy_(self._view(self.source, move, at_target=False))
            if self.checksum:
                sums.append(self._sum(move, at_target=False))
        return sums

    def _exchange(self, step: Step, sums: list[torch.Tensor] | None) -> torch.Tensor | None:
        assert self.wire is not None
        sent, received = self.wire.splits(step.send), self.wire.splits(step.receive)
        dist.all_to_all_single(
            self.wire.receive.view(torch.uint8)[: sum(received)],
            self.wire.send.view(torch.uint8)[: sum(sent)],
            received,
            sent,
            group=self.group,
        )
        self.bytes_moved += sum(received)
        if not self.checksum:
            return None
        sent, received = ([len(moves.get(peer, ())) for peer in self.peers] for moves in (step.send, step.receive))
        theirs = torch.zeros(sum(received), dtype=torch.int64, device=self.device.torch_device)
        mine = torch.stack(sums) if sums else theirs.new_zeros(sum(sent))
        dist.all_to_all_single(theirs, mine, received, sent, group=self.group)
        return theirs

    def _unpack(self, step: Step, expected: torch.Tensor | None) -> None:
        assert self.wire is not None
        for i, (move, slot) in enumerate(self.wire.slots(self.wire.receive, step.receive)):
            self._view(self.target, move, at_target=True).copy_(slot)
            if expected is not None:
                self._verify(move, expected[i])
        for index in step.release:
            self._end(self.source).release(index)

    def _view(self, buckets: Buckets | None, move: Move, at_target: bool) -> torch.Tensor:
        self.parameter = move.name
        place = move.target if at_target else move.source
        return place.part.view(self._end(buckets).views[place.param])

    def _sum(self, move: Move, at_target: bool) -> torch.Tensor:
        view = self._view(self.target if at_target else self.source, move, at_target)
        return box_checksum(view.to(self.plan.wire_dtype), move.name, move.region)

    def _verify(self, move: Move, expected: torch.Tensor) -> None:
        arrived = self._sum(move, at_target=True)
        if not torch.equal(arrived, expected):
            raise RuntimeError(
                f"{move.name} {list(move.region)} from rank {move.source_rank} arrived on rank {move.target_rank} with "
                f"another checksum ({int(arrived) % (1 << 64):016x}, sent {int(expected) % (1 << 64):016x})"
            )

    def _end(self, buckets: Buckets | None) -> Buckets:
        assert buckets is not None, f"rank {self.rank} has a part in the plan, but brought no buckets"
        return buckets

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.device.memory().allocated - self.other_bytes)

    def _guard(self, work: Callable[..., Any], *args: Any) -> Any:
        """Does the work unless this rank has failed; keeps what it raises for `_agree`, so that no peer waits."""
        if self.failure is not None:
            return None
        try:
            return work(*args)
        except Exception as error:
            self.cause = error
            self.failure = Failure(self.rank, self.round, self.parameter, f"{type(error).__name__}: {error}")
            return None

    def _agree(self) -> None:
        """Raises on all ranks if one has failed, or if they do not carry out the same plan."""
        if self.alone:
            failures = [self.failure] if self.failure else []
        else:
            digest = self.plan.digest
            # On the host: a collective may hold its tensor a moment longer, which must not blur what the card holds.
            status = torch.tensor([int(self.failure is not None), digest, -digest])
            dist.all_reduce(status, op=dist.ReduceOp.MAX, group=self.group)
            failed, most, least = status.tolist()
            if not failed and most == -least:
                return
            gathered: list[Any] = [None] * len(self.peers)
            mine = self.failure or (Failure(self.rank, -1, "", "plans another switch") if most != -least else None)
            dist.all_gather_object(gathered, mine, group=self.group)
            failures = [failure for failure in gathered if failure is not None]
        if failures:
            if self.wire is not None:
                self.wire.free()
            if self.target is not None:
                self.target.release()
            raise SwitchError(failures) from self.cause

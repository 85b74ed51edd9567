"""Executes a plan round by round, with two rounds under way.

    agree ─►  send 0   send 1     send 2     …   send n-1                                                 ─►  agree
       │               receive 0  receive 1  …   receive n-2  receive n-1                                       │
       │                                                                                                        │
       └ refused: both ends as they were                               failed: SwitchError on every rank, target empty

    send k      free what was read for the last time in round k-2, allocate, copy what stays on the rank, send
    receive k   wait, take

All copies and all storage are queued on the caller's current stream, and what is freed is free in the order of the
stream. Where rounds are collectives the wire runs beside it: while round k is on the wire, round k+1 is packed and
round k-1 taken. Where storage is read in place, a rank is ahead of its slowest reader by two rounds. A failed rank
keeps no other waiting, so all ranks abort together. The target is then released on all of them: a half-switched model
cannot serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist

from fusion.ep_switch.buckets import Holder, buckets_of, check_resident, check_sharing
from fusion.ep_switch.exchange import STAGE, Alone, Exchange, Kind, PeerLost, Vote, failures_of, lost_rank
from fusion.ep_switch.fill import HostFill, HostParts
from fusion.ep_switch.opening import open_exchange
from fusion.ep_switch.outcome import PARTS, SwitchError, SwitchFailure, SwitchReport
from fusion.ep_switch.plan import Plan
from fusion.ep_switch.program import Program, Stage, compile_program
from fusion.ep_switch.rounds import IN_FLIGHT
from fusion.ep_switch.segment import TransferError, copy
from fusion.ep_switch.stopwatch import Stopwatch
from fusion.model.weights import Buckets
from fusion.npu import Device
from fusion.npu.all_or_none import attempt
from fusion.npu.failures import RankFailure

__all__ = ["SwitchError", "SwitchReport", "Switcher", "execute"]

T = TypeVar("T")


def execute(
    plan: Plan,
    source: Holder,
    target: Holder,
    device: Device,
    group: dist.ProcessGroup | None = None,
    checksum: bool = False,
    exchange: Kind = "auto",
) -> SwitchReport:
    """Moves the weights from ``source`` to ``target`` once; `Switcher` makes the views of a plan once for many
    switches."""
    return Switcher(plan, source, target, device, group, exchange).run(checksum)


class Switcher:
    """Moves the weights from ``source`` to ``target`` by a plan, as often as it is asked to.

    Args:
        source: in the layout ``plan.source``.
        target: in the layout ``plan.target``. Its dtype may differ. Units that are the same in both (`Plan.shared`) are
            the same storage (``share`` of `Buckets`), and are left alone.
        group: holds every rank of the plan; default: all processes, or none where the plan has one rank. Ranks of the
            group that have no part in the plan bring no models and only agree.
        exchange: how bytes travel (`exchange`); `auto`: `shared` where all ranks are on one machine and their cards can
            read each other's memory (emulated ones can), else `collective`.
    """

    def __init__(
        self,
        plan: Plan,
        source: Holder,
        target: Holder,
        device: Device,
        group: dist.ProcessGroup | None = None,
        exchange: Kind = "auto",
    ):
        self.plan, self.device = plan, device
        self._holders, self._group, self._kind = (source, target), group, exchange
        self._clock = Stopwatch(device)
        self._program: Program | None = None
        self._fill = HostFill(device)
        self._source: Buckets | None = None
        self._target: Buckets | None = None

    def run(self, checksum: bool = False, host: HostParts = MappingProxyType({})) -> SwitchReport:
        """Executes one switch. Collective over the group.

        The source has to be resident and holds nothing but shared units afterwards (all, if the plan keeps it); the
        target has to be released but for shared units and is resident afterwards. Copies, allocation and freeing are on
        the current stream, which has to be the one that the storage was allocated on.

        Args:
            checksum: compare a checksum of everything that travels between its ends: what the sender packed with what
                lies in the receiver's target.
            host: what fills the units of this rank that the plan has hosted. Read until the switch returns.

        Raises:
            SwitchError: on every rank, with rank, round and parameter of each failure. What was refused before the
                first round (storage that is not the plan's, ranks with different plans, no memory for the buffers) left
                both ends as they were; after a later failure the target is released, and the source, unless kept, is
                not to be used.
        """
        with torch.no_grad():
            stream = self.device.current_stream()
            stream.synchronize()
            start = time.perf_counter()
            self._clock.start()
            exchange = self._open()
            program = self._prepare(exchange, checksum, host)
            self._carry_out(exchange, program)
            stream.synchronize()
            return self._report(exchange, program, time.perf_counter() - start)

    def _open(self) -> Exchange:
        if len(self.plan.ranks) == 1 and self._group is None:
            return Alone(self.plan.ranks[0], self.plan.ranks, self.device, self._clock)
        exchange = open_exchange(self.device, self._group, self._kind, self._clock)
        missing = set(self.plan.ranks) - set(exchange.peers)
        assert not missing, f"the group {exchange.peers} lacks the ranks {sorted(missing)} of the plan"
        return exchange

    def _prepare(self, exchange: Exchange, checksum: bool, host: HostParts) -> Program:
        """Does everything that can be refused without harm, and agrees that no rank refused."""
        exchange.begin()
        self._round = -1

        def prepare() -> Program:
            program, rank = self._check(exchange.rank), exchange.rank
            self._fill.open(self._target, self.plan.hosted_units(rank), host, self.plan.staging_bytes(rank))
            exchange.open(program, checksum)
            self._note_memory()
            return program

        return self._attempt(exchange, prepare)

    def _attempt(self, exchange: Exchange, work: Callable[[], T]) -> T:
        """Runs work that all ranks of the group do, or none.

        Raises:
            SwitchError: on all ranks; buffers are given back.
        """
        try:
            return attempt(
                work,
                describe=lambda error: self._describe(exchange.rank, error),
                agree=lambda own: failures_of(exchange.agree(Vote(tuple(own), self.plan.digest))),
                error_type=SwitchError,
            )
        except SwitchError:
            exchange.close()
            self._fill.close()
            raise

    def _describe(self, rank: int, error: Exception) -> list[SwitchFailure]:
        """The failures that this rank reports, with the owners of the memory where it ran out."""
        if isinstance(error, PeerLost):
            if error.left:  # it reports itself
                return []
            return [lost_rank(error.rank, error.reason, round_=self._round, parameter=error.parameter)]
        parameter = error.parameter if isinstance(error, TransferError) else ""
        cause = error.__cause__ if isinstance(error, TransferError) and error.__cause__ else error
        plain = RankFailure.of(cause, rank=rank, stage=STAGE, bytes_by_owner=self.device.memory_by_owner())
        return [SwitchFailure(**plain.to_json(), round=self._round, parameter=parameter)]

    def _check(self, rank: int) -> Program:
        if self._program is None:
            source, target = self._holders
            self._source = buckets_of(source, self.plan.source, rank)
            self._target = buckets_of(target, self.plan.target, rank)
            self._shared = self.plan.shared_units(rank)
            check_sharing(self._source, self._target, self._shared, rank)
            self._program = compile_program(self.plan, rank, self._source, self._target)
            self._unread = tuple(index for owner, index in self.plan.unread if owner == rank)
        held = check_resident(self._source, self._target, self._shared, rank)
        self._others = self.device.memory().allocated - held
        self._peak_bytes = self._peak_reserved = 0
        return self._program

    def _carry_out(self, exchange: Exchange, program: Program) -> None:
        """Runs the rounds, and agrees that all ranks have; releases the target if one has not."""
        try:
            self._attempt(exchange, lambda: self._run_rounds(exchange, program))
        except SwitchError:
            if self._target is not None:
                self._target.release([unit for unit in range(len(self._target.flats)) if unit not in self._shared])
            raise
        self._clock.mark("finish")
        self._note_memory()
        exchange.close()
        self._clock.mark("memory")

    def _run_rounds(self, exchange: Exchange, program: Program) -> None:
        try:
            self._release(self._unread)
            self._clock.mark("prepare")
            stages = program.stages
            for index in range(len(stages) + IN_FLIGHT):
                self._round = min(index, len(stages) - 1)
                if index >= IN_FLIGHT:
                    exchange.settle(index - IN_FLIGHT)
                    self._release(stages[index - IN_FLIGHT].release)
                if index < len(stages):
                    self._send(exchange, index, stages[index])
                if 0 < index <= len(stages):
                    self._round = index - 1
                    exchange.receive(index - 1, stages[index - 1].receive)
            self._fill.close()
        except Exception:
            exchange.abandon()
            raise

    def _send(self, exchange: Exchange, index: int, stage: Stage) -> None:
        if stage.allocate:
            self._allocate(stage.allocate)
        self._clock.mark("memory")
        if stage.fullest:
            self._note_memory()
        if stage.copies[0]:
            copy(*stage.copy_views, stage.copies[0])
        for unit in stage.allocate:
            self._fill.fill(unit)
        exchange.send(index, stage.send)

    def _allocate(self, units: Sequence[int]) -> None:
        assert self._target is not None
        try:
            self._target.allocate(units)
        except Exception as error:
            first = next(unit for unit in units if not self._target.held(unit))
            name = self._target.plans[first].entries[0][0].name
            raise TransferError(name, str(error)) from error

    def _release(self, units: Sequence[int]) -> None:
        assert self._source is not None or not units
        if self._source is not None:
            self._source.release(units)

    def _note_memory(self) -> None:
        memory = self.device.memory()
        self._peak_bytes = max(self._peak_bytes, memory.allocated - self._others)
        self._peak_reserved = max(self._peak_reserved, memory.reserved - self._others)

    def _report(self, exchange: Exchange, program: Program, seconds: float) -> SwitchReport:
        return SwitchReport(
            bytes_moved=sum(program.received_bytes.values()),
            bytes_local=program.bytes_local,
            bytes_hosted=program.bytes_hosted,
            seconds=seconds,
            rounds=len(program.stages),
            peak_bytes=self._peak_bytes,
            peak_reserved=self._peak_reserved,
            exchange=exchange.name,
            received_bytes=program.received_bytes,
            parts_s=self._clock.seconds(PARTS),
        )

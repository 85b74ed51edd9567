"""Execute a plan round by round, with two rounds in flight.

    agree ─►  send 0   send 1     send 2     …   send n-1                                                 ─►  agree
       │               receive 0  receive 1  …   receive n-2  receive n-1                                       │
       │                                                                                                        │
       └ refused: both ends unchanged                                  failed: SwitchError on every rank, target empty

    send k      free units last read in round k-2, allocate, restore, copy what stays on the rank, send
    receive k   wait, copy into the target

Units of the source that the plan parks are copied to host memory and freed before the first round, and restored before
the round that first reads them.

All copies, allocations and releases are queued on the caller's current stream and take effect in its order. Where
rounds are collectives, communication overlaps with copies: while round k is on the wire, round k+1 is packed and round
k-1 unpacked. Where storage is read in place, a rank is at most two rounds ahead of its slowest reader. No rank waits
for a failed one, so all ranks abort together. The target is then released on all of them, since a partly switched model
cannot serve."""

import time
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.distributed as dist

from fusion.ep_switch.buckets import Holder, buckets_of, check_resident, check_sharing
from fusion.ep_switch.exchange import STAGE, Exchange, Kind, PeerLost, Vote, failures_of, lost_rank
from fusion.ep_switch.fill import HostFill, HostParts
from fusion.ep_switch.moves import units_of
from fusion.ep_switch.opening import open_exchange
from fusion.ep_switch.outcome import Stopwatch, SwitchError, SwitchFailure, SwitchReport
from fusion.ep_switch.plan import Plan
from fusion.ep_switch.program import Program, Stage, compile_program
from fusion.ep_switch.rounds import IN_FLIGHT
from fusion.ep_switch.segment import TransferError, copy
from fusion.model.weights import Buckets
from fusion.npu import Device
from fusion.npu.all_or_none import attempt
from fusion.npu.failures import RankFailure

T = TypeVar("T")


class Switcher:
    """Move the weights from ``source`` to ``target`` by a plan, any number of times.
    ``source``: in the layout ``plan.source``.
    ``target``: in the layout ``plan.target``. Its dtype may differ. Units that are equal in both (`Plan.shared`) have
    common storage (``share`` of `Buckets`) and are not touched.
    ``group``: contains every rank of the plan; default: all processes, or none where the plan has one rank. Ranks of
    the group that are not in the plan have no models and only take part in the agreements.
    ``exchange``: how bytes are sent (`exchange`); `auto`: `shared` where all ranks are on one machine and their cards
    can read each other's memory (emulated ones can), else `collective`."""

    def __init__(
        self,
        plan: Plan,
        source: Holder,
        target: Holder,
        *,
        device: Device,
        group: dist.ProcessGroup | None = None,
        exchange: Kind = "auto",
    ):
        self.plan, self.device = plan, device
        self._holders, self._group, self._kind = (source, target), group, exchange
        self._clock = Stopwatch(device)
        self._programs: dict[bool, Program] = {}
        """Programs of the plan's rounds, and of united ones"""
        self._fill = HostFill(device)
        self._source: Buckets | None = None
        self._target: Buckets | None = None
        self._card_values: torch.Tensor | None = None
        """The source's values apart from the units, or memory that receives them; None: this rank has no part in it"""
        self._parked: dict[int, torch.Tensor] = {}
        """Host memory of the units of the source that are restored before they are read"""
        self._round = -1
        self._other_bytes = self._peak_bytes = self._peak_reserved = 0

    def run(self, checksum: bool = False, host: HostParts = MappingProxyType({})) -> SwitchReport:
        """Execute one switch. Collective over the group.

        The source must be resident and afterwards holds only shared units (all, if the plan keeps it); the target must
        be released except for shared units and is resident afterwards. Copies, allocations and releases run on the
        current stream, which must be the one that the storage was allocated on.
        ``checksum``: compare checksums of all data that is sent: what the sender packed with what is in the receiver's
        target.
        ``host``: host memory that fills the hosted units of this rank. Read until the switch returns.
        Raise SwitchError: on every rank, with rank, round and parameter of each failure. A refusal before the first
        round (storage that is not the plan's, ranks with different plans, no memory for the buffers) leaves both ends
        unchanged; after a later failure the target is released, and the source, unless kept, is unusable."""
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
            return Exchange(rank=self.plan.ranks[0], peers=self.plan.ranks, device=self.device, clock=self._clock)
        exchange = open_exchange(self.device, self._group, kind=self._kind, clock=self._clock)
        missing = set(self.plan.ranks) - set(exchange.peers)
        assert not missing, f"the group {exchange.peers} lacks the ranks {sorted(missing)} of the plan"
        return exchange

    def _prepare(self, exchange: Exchange, checksum: bool, host: HostParts) -> Program:
        """Run every check and allocation that can fail without changing either end, and agree that none failed."""
        exchange.begin()
        self._round = -1

        def prepare() -> Program:
            program, rank = self._check(exchange, checksum), exchange.rank
            units, staging_bytes = self.plan.hosted_units(rank), self.plan.staging_bytes(rank)
            self._fill.open(self._target, units, host, staging_bytes=staging_bytes)
            self._parked = self._host_memory(rank)
            self._card_values = self._values_of_source()
            exchange.open(program, checksum)
            self._note_memory()
            return program

        return self._attempt(exchange, prepare)

    def _host_memory(self, rank: int) -> dict[int, torch.Tensor]:
        """Allocate host memory for the units of this rank that the plan parks."""
        parked = units_of(rank, self.plan.parked)
        assert self._source is not None or not parked
        flats = {unit: self._source.flats[unit] for unit in parked} if self._source is not None else {}
        return {unit: self.device.host_empty(flat.shape, flat.dtype) for unit, flat in flats.items()}

    def _attempt(self, exchange: Exchange, work: Callable[[], T]) -> T:
        """Run work that succeeds on all ranks of the group or on none.
        Raise SwitchError: on all ranks; buffers are released."""
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
        """Return the failures that this rank reports, with memory by owner if it ran out."""
        if isinstance(error, PeerLost):
            if error.left:  # that rank reports its own failure
                return []
            return [lost_rank(error.rank, error.reason, round_=self._round, parameter=error.parameter)]
        parameter = error.parameter if isinstance(error, TransferError) else ""
        cause = error.__cause__ if isinstance(error, TransferError) and error.__cause__ else error
        plain = RankFailure.of(cause, rank=rank, stage=STAGE, bytes_by_owner=self.device.memory_by_owner())
        return [SwitchFailure(**plain.to_json(), round=self._round, parameter=parameter)]

    def _check(self, exchange: Exchange, checksum: bool) -> Program:
        rank, unite = exchange.rank, exchange.in_place and not checksum
        shared = self.plan.shared_units(rank)
        if not self._programs:
            source, target = self._holders
            self._source = buckets_of(source, self.plan.source, rank)
            self._target = buckets_of(target, self.plan.target, rank)
            check_sharing(self._source, self._target, shared, rank=rank)
        if unite not in self._programs:  # checksums copy segments, which united rounds enlarge
            plan = self.plan.in_place() if unite else self.plan
            self._programs[unite] = compile_program(plan, rank, self._source, target=self._target)
        held = check_resident(self._source, self._target, shared, rank=rank)
        self._other_bytes = self.device.memory().allocated - held
        self._peak_bytes = self._peak_reserved = 0
        return self._programs[unite]

    def _carry_out(self, exchange: Exchange, program: Program) -> None:
        """Run the rounds and agree that they succeeded on all ranks; otherwise release the target. What lies apart from
        the units follows, as a rank whose rounds failed could not join its broadcast."""
        try:
            self._attempt(exchange, lambda: self._run_rounds(exchange, program))
            if self.plan.sends_card_values:
                self._attempt(exchange, self._copy_card_values)
            else:
                self._copy_card_values()
            self._card_values = None
        except SwitchError:
            self._parked = {}
            if self._target is not None:
                shared = self.plan.shared_units(exchange.rank)
                self._target.release([unit for unit in range(len(self._target.flats)) if unit not in shared])
            raise
        self._parked = {}
        self._clock.mark("finish")
        self._note_memory()
        exchange.close()
        self._clock.mark("memory")

    def _run_rounds(self, exchange: Exchange, program: Program) -> None:
        try:
            self._release(units_of(exchange.rank, self.plan.unread))
            self._park()
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

    def _values_of_source(self) -> torch.Tensor | None:
        """Return the values on the card apart from the units (`Buckets.card`), or memory to receive them."""
        if self._source is not None or not self.plan.sends_card_values:
            return None if self._source is None else self._source.card
        with self.device.owner("buckets"):
            numel = self.plan.source.card_numel
            return torch.empty(numel, dtype=torch.float32, device=self.device.torch_device)

    def _copy_card_values(self) -> None:
        """Copy these values to the target: a few vectors that every rank of a layout holds whole (the correction biases
        of all routers). A card that trains and generates has one copy for both ends, and one that only generates
        receives them in a broadcast. Collective over the group where they are sent."""
        values, target = self._card_values, self._target
        if self.plan.sends_card_values:
            assert values is not None
            dist.broadcast(values, src=self.plan.source.ranks[0], group=self._group)
        if target is not None and values is not None and target.card is not values:
            target.card.copy_(values)

    def _send(self, exchange: Exchange, index: int, stage: Stage) -> None:
        if stage.allocate:
            self._allocate(stage.allocate)
        self._restore(stage.restore)
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

    def _park(self) -> None:
        """Copy the units that are restored later to the host, and release them."""
        for unit, host in self._parked.items():
            assert self._source is not None
            host.copy_(self._source.flats[unit], non_blocking=True)
        if self._parked:
            self.device.current_stream().synchronize()
            self._release([*self._parked])

    def _restore(self, units: Sequence[int]) -> None:
        """Allocate parked units again and copy them back; other ranks may read them at once."""
        for unit in units:
            assert self._source is not None
            self._source.allocate([unit])
            self._source.flats[unit].copy_(self._parked[unit], non_blocking=True)
        if units:
            self.device.current_stream().synchronize()

    def _release(self, units: Sequence[int]) -> None:
        assert self._source is not None or not units
        if self._source is not None:
            self._source.release(units)

    def _note_memory(self) -> None:
        memory = self.device.memory()
        self._peak_bytes = max(self._peak_bytes, memory.allocated - self._other_bytes)
        self._peak_reserved = max(self._peak_reserved, memory.reserved - self._other_bytes)

    def _report(self, exchange: Exchange, program: Program, seconds: float) -> SwitchReport:
        plan, rank = self.plan, exchange.rank
        return SwitchReport(
            bytes_moved=sum(plan.received_bytes(rank).values()),
            bytes_local=program.bytes_local,
            bytes_hosted=sum(plan.target.unit_nbytes(rank)[unit] for unit in plan.hosted_units(rank)),
            seconds=seconds,
            rounds=len(program.stages),
            peak_bytes=self._peak_bytes,
            peak_reserved=self._peak_reserved,
            exchange=exchange.name,
            received_bytes=plan.received_bytes(rank),
            parts_s=self._clock.seconds(),
        )

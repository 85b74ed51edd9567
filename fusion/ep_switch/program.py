"""A plan as one rank carries it out: for every round, what to copy and what goes to and comes from whom, as views.

Moves that follow each other in storage too are one run, a round's runs are copied in one call a peer. Views are made
when their storage is there for the first time, and stay valid over its releases: the second switch makes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import NamedTuple

import torch

from fusion.ep_switch.checksum import NO_SUM, run_sums
from fusion.ep_switch.layout import Place
from fusion.ep_switch.moves import Move, Step
from fusion.ep_switch.plan import Plan
from fusion.model.table import Box
from fusion.model.weights import Buckets

MOST_SUMS = 1024
"""Checksums of one segment that are sent with it."""


class Run(NamedTuple):
    """Elements of one storage unit that lie one after the other on the wire; ``name`` is the first global tensor."""

    flats: list[torch.Tensor]
    place: Place
    shape: tuple[int, ...]
    name: str

    @property
    def view(self) -> torch.Tensor:
        return self.place.view(self.flats, self.shape)


class Segment:
    """What one peer gets from this rank in a round, or brings it: one stretch of the wire."""

    def __init__(self, peer: int, moves: Sequence[Move], runs: list[Run]):
        self.peer, self.moves, self.runs = peer, moves, runs
        self.sizes = [prod(run.shape) for run in runs]
        self.numel = sum(self.sizes)

    @property
    def name(self) -> str:
        """Its first global tensor, for messages."""
        return self.moves[0].name

    @cached_property
    def pieces(self) -> list[tuple[str, Box, int]]:
        """(global tensor, box, where it ends on the wire) of all that lies in it."""
        starts = accumulate((move.numel for move in self.moves), initial=0)
        return [
            (name, box, start + stop)
            for start, move in zip(starts, self.moves, strict=False)
            for name, box, _, stop in move.pieces()
        ]

    @cached_property
    def ends(self) -> list[int]:
        """Where its pieces end, of very many only some: what a checksum tells apart."""
        ends = [end for _, _, end in self.pieces]
        return ends[:: -(len(ends) // MOST_SUMS + 1)][::-1]

    @cached_property
    def views(self) -> list[torch.Tensor]:
        return [run.view for run in self.runs]

    def pack(self, wire: torch.Tensor, along: list[torch.Tensor] | None = None) -> None:
        """Storage → ``wire`` [numel], contiguous, converted to its dtype. ``along``: `along` of this wire, if kept."""
        copy(along or self.along(wire), self.views, self.runs)

    def unpack(self, wire: torch.Tensor, along: list[torch.Tensor] | None = None) -> None:
        """``wire`` [numel], contiguous → storage. ``along``: `along` of this wire, if kept."""
        copy(self.views, along or self.along(wire), self.runs)

    def verify(self, scratch: torch.Tensor, expected: torch.Tensor) -> None:
        """Holds what was unpacked, read back out of the storage into ``scratch`` [numel], against the sender's sums.

        Raises:
            Fault: they differ; names the first parameter that does.
        """
        self.pack(scratch)
        expected = expected.cpu()
        wrong = ((run_sums(scratch, self.ends).cpu() != expected) & (expected != NO_SUM)).nonzero()
        if wrong.numel():
            name, box, _ = next(piece for piece in self.pieces if piece[2] == self.ends[int(wrong[0])])
            raise Fault(name, f"{name} {list(box)} from rank {self.peer} arrived with another checksum")

    def along(self, wire: torch.Tensor) -> list[torch.Tensor]:
        """Where its runs lie in ``wire`` [numel], as views in their shapes."""
        if len(self.runs) == 1:
            return [wire.view(self.runs[0].shape)]
        pieces = zip(wire.split_with_sizes(self.sizes), self.runs, strict=True)
        return [piece if len(run.shape) == 1 else piece.view(run.shape) for piece, run in pieces]


class Fault(RuntimeError):
    """What failed in a round; ``parameter`` is the tensor it was about."""

    def __init__(self, parameter: str, reason: str):
        super().__init__(reason)
        self.parameter = parameter


def copy(into: list[torch.Tensor], out_of: list[torch.Tensor], runs: Sequence[Run]) -> None:
    """Copies views pairwise, in one call.

    Raises:
        Fault: with the name of the run that failed.
    """
    try:
        if len(into) == 1:
            into[0].copy_(out_of[0])
        else:
            torch._foreach_copy_(into, out_of)
    except Exception:
        for target, source, run in zip(into, out_of, runs, strict=True):
            try:
                target.copy_(source)
            except Exception as error:
                raise Fault(run.name, f"{type(error).__name__}: {error}") from error
        raise


@dataclass
class Stage:
    """A round as a rank carries it out, in this order."""

    allocate: tuple[int, ...]
    copies: tuple[list[Run], list[Run]]
    """(of the target, of the source), pairwise."""
    send: list[Segment]
    release: tuple[int, ...]
    receive: list[Segment]
    exchange: bool
    """Whether any two ranks exchange anything in this round."""
    fullest: bool = False
    """Whether the rank never holds more weights than after this round's allocation."""

    @cached_property
    def copy_views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        into, out_of = self.copies
        return [run.view for run in into], [run.view for run in out_of]


class Mapped:
    """Memory of a rank that this one has mapped, and where segments lie in it. Nobody is charged for it, so it may be
    kept from switch to switch: memory that comes again comes at the same place, with the same views."""

    def __init__(self, handle: bytes, memory: torch.Tensor):
        self.handle, self._memory = handle, memory
        self._wires: dict[Segment, tuple[torch.Tensor, list[torch.Tensor]]] = {}

    def wire(self, segment: Segment, offset: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """(wire [numel] from element ``offset`` on, `Segment.along` of it). A segment lies at the same offset in every
        switch of a program."""
        found = self._wires.get(segment)
        if found is None:
            wire = self._memory[offset : offset + segment.numel]
            found = self._wires[segment] = wire, segment.along(wire)
        return found


@dataclass
class Program:
    """All rounds of a rank, and the sizes of its wire buffers in elements of ``wire_dtype``, one slot of each."""

    stages: list[Stage]
    wire_dtype: torch.dtype
    send_numel: int
    receive_numel: int
    bytes_local: int
    bytes_hosted: int = 0
    received_bytes: dict[str, int] = field(default_factory=dict)
    mapped: dict[int, Mapped] = field(default_factory=dict)
    """rank → its wire buffer, if ranks share memory."""

    @property
    def largest_segment(self) -> int:
        """Elements of the largest thing that comes from one peer in one round."""
        return max((segment.numel for stage in self.stages for segment in stage.receive), default=0)


def compile_program(plan: Plan, rank: int, source: Buckets | None, target: Buckets | None) -> Program:
    """The rounds of ``rank``, over the storage of its two ends (None: it has no share in that end)."""
    if rank not in plan.ranks:
        idle = [any(not move.local for move in round_.moves) for round_ in plan.rounds]
        return Program([Stage((), ([], []), [], (), [], exchange) for exchange in idle], plan.wire_dtype, 0, 0, 0)
    ends = _Ends(source.flats if source else [], target.flats if target else [], rank)
    steps, size = plan.steps(rank), plan.wire_dtype.itemsize
    send, receive = plan.wire_bytes(rank)
    copied = sum(move.numel for step in steps for move in step.copy)
    stages = [ends.stage(step) for step in steps]
    _mark_fullest(stages, plan.source.unit_nbytes(rank), plan.target.unit_nbytes(rank))
    return Program(
        stages=stages,
        wire_dtype=plan.wire_dtype,
        send_numel=send // 2 // size,
        receive_numel=receive // 2 // size,
        bytes_local=copied * plan.target.dtype.itemsize,
        bytes_hosted=sum(plan.target.unit_nbytes(rank)[unit] for unit in plan.hosted_units(rank)),
        received_bytes=plan.received_bytes(rank),
    )


def _mark_fullest(stages: list[Stage], source_nbytes: Sequence[int], target_nbytes: Sequence[int]) -> None:
    held, most, fullest = 0, None, None
    for stage in stages:
        held += sum(target_nbytes[unit] for unit in stage.allocate)
        if most is None or held > most:
            most, fullest = held, stage
        held -= sum(source_nbytes[unit] for unit in stage.release)
    if fullest is not None:
        fullest.fullest = True


class _Ends:
    def __init__(self, source: list[torch.Tensor], target: list[torch.Tensor], rank: int):
        self.source, self.target, self.rank = source, target, rank

    def stage(self, step: Step) -> Stage:
        # Ranks begin with their next neighbour, so that not all of them serve the same one first.
        sends = sorted(step.send.items(), key=lambda item: (item[0] < self.rank, item[0]))
        return Stage(
            step.allocate,
            self.copies(step.copy),
            [Segment(peer, moves, self.runs(moves, at_target=False)) for peer, moves in sends],
            step.release,
            [Segment(peer, moves, self.runs(moves, at_target=True)) for peer, moves in step.receive.items()],
            step.exchange,
        )

    def runs(self, moves: Sequence[Move], at_target: bool) -> list[Run]:
        """The moves of a segment at one end, those that lie one after the other there as one."""
        runs: list[Run] = []
        for move in moves:
            run = self.run(move, at_target)
            last = runs[-1] if runs else None
            if last and _follows(run, last):
                runs[-1] = last._replace(shape=(last.shape[0] + run.shape[0],))
            else:
                runs.append(run)
        return runs

    def copies(self, moves: Sequence[Move]) -> tuple[list[Run], list[Run]]:
        """Local moves at both ends; those that lie one after the other on both as one."""
        into: list[Run] = []
        out_of: list[Run] = []
        for move in moves:
            target, source = self.run(move, at_target=True), self.run(move, at_target=False)
            if len(target.shape) != len(source.shape):  # a box that is contiguous at one end only
                target, source = (run._replace(shape=move.shape, place=place) for run, place in
                                  ((target, move.target), (source, move.source)))  # fmt: skip
            if into and _follows(target, into[-1]) and _follows(source, out_of[-1]):
                shape = (into[-1].shape[0] + target.shape[0],)
                into[-1], out_of[-1] = into[-1]._replace(shape=shape), out_of[-1]._replace(shape=shape)
            else:
                into.append(target)
                out_of.append(source)
        return into, out_of

    def run(self, move: Move, at_target: bool) -> Run:
        place = move.target if at_target else move.source
        flats = self.target if at_target or move.relayed else self.source
        if len(move.shape) > 1 and _dense(move.shape, place.strides):
            return Run(flats, place._replace(strides=(1,)), (move.numel,), move.name)
        return Run(flats, place, move.shape, move.name)


def _dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


def _follows(run: Run, last: Run) -> bool:
    return (
        run.flats is last.flats
        and run.place.unit == last.place.unit
        and run.place.strides == last.place.strides == (1,)
        and last.place.offset + last.shape[0] == run.place.offset
    )

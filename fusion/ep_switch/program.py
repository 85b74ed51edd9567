"""Compile a plan into one rank's program: for every round, its copies, and its sends and receives by peer."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import prod

import torch

from fusion.ep_switch.moves import Round, units_of
from fusion.ep_switch.plan import Plan
from fusion.ep_switch.segment import Flats, Lent, PeerSegment, PeerUnits, Run, paired
from fusion.model.weights import Buckets


@dataclass
class Stage:
    """Hold one round of a rank, in the order of execution."""

    allocate: tuple[int, ...]
    copies: tuple[list[Run], list[Run]]
    """Runs of (the target, the source), pairwise."""
    send: list[PeerSegment]
    release: tuple[int, ...]
    receive: list[PeerSegment]
    exchange: bool
    """Whether any two ranks exchange anything in this round."""
    restore: tuple[int, ...] = ()
    fullest: bool = False
    """Whether the rank's weights are at their maximum after this round's allocation."""

    @cached_property
    def copy_views(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        into, out_of = self.copies
        return [run.view for run in into], [run.view for run in out_of]


@dataclass
class Program:
    """Hold all rounds of a rank, and the size of one slot of each wire buffer in elements of ``wire_dtype``."""

    stages: list[Stage]
    dtypes: tuple[torch.dtype, torch.dtype]
    """Dtypes of the source and of the target."""
    wire_dtype: torch.dtype
    send_numel: int
    receive_numel: int
    bytes_local: int
    storage: tuple[Flats, Flats] = ([], [])
    """This rank's storage of the source and of the target."""
    mapped: dict[int, PeerUnits] = field(default_factory=dict)
    """Units of other ranks that are read in place, by rank."""
    parks: bool = False
    """Whether units of any rank's source wait in host memory."""

    @cached_property
    def lent_first(self) -> tuple[dict[int, list[Lent]], dict[int, list[Lent]]]:
        """Units by peer that (this rank, the peer) lends before the first round."""
        rounds = [] if self.parks else self.stages
        return _lent_first(stage.send for stage in rounds), _lent_first(stage.receive for stage in rounds)

    @property
    def max_sums(self) -> tuple[int, int]:
        """Maximum number of checksums (sent, received) in a round."""
        ends = [
            [sum(len(segment.ends) for segment in way) for way in (stage.send, stage.receive)] for stage in self.stages
        ]
        return max((sent for sent, _ in ends), default=0), max((received for _, received in ends), default=0)

    @property
    def largest_segment(self) -> int:
        """Elements of the largest segment that is sent to or received from one peer in one round."""
        segments = (segment for stage in self.stages for segment in (*stage.send, *stage.receive))
        return max((segment.numel for segment in segments), default=0)


NO_PROGRAM = Program([], (torch.float32, torch.float32), torch.float32, send_numel=0, receive_numel=0, bytes_local=0)
"""The program of an exchange before its first switch."""


def _lent_first(rounds: Iterable[Iterable[PeerSegment]]) -> dict[int, list[Lent]]:
    units: dict[int, dict[Lent, None]] = defaultdict(dict)
    for segment in chain.from_iterable(rounds):
        if segment.is_resident:
            units[segment.peer] |= dict.fromkeys(segment.lent)
    return {peer: [*lent] for peer, lent in units.items()}


def compile_program(plan: Plan, rank: int, source: Buckets | None, target: Buckets | None) -> Program:
    """Compile the rounds of ``rank``, over the storage of its two ends (None: it holds nothing of that end, as both of
    a rank that is not in the plan)."""
    own: tuple[Flats, Flats] = (source.flats if source else [], target.flats if target else [])
    mapped: dict[int, PeerUnits] = defaultdict(PeerUnits)
    stages = [_stage(round_, rank, own=own, mapped=mapped) for round_ in plan.rounds]
    copied = sum(prod(run.shape) for stage in stages for run in stage.copies[0])
    if held := plan.held_bytes(rank):
        stages[held.index(max(held))].fullest = True
    size, (send, receive) = plan.wire_dtype.itemsize, plan.wire_bytes(rank)
    return Program(
        stages=stages,
        dtypes=(plan.source.dtype, plan.target.dtype),
        wire_dtype=plan.wire_dtype,
        send_numel=send // 2 // size,
        receive_numel=receive // 2 // size,
        bytes_local=copied * plan.target.dtype.itemsize,
        storage=own,
        mapped=mapped,
        parks=plan.parks,
    )


def _stage(round_: Round, rank: int, *, own: tuple[Flats, Flats], mapped: dict[int, PeerUnits]) -> Stage:
    copied, send, receive = round_.by_peer(rank)
    # Each rank begins with its next neighbour, so that not all of them send to the same one first.
    sends = sorted(send.items(), key=lambda item: (item[0] < rank, item[0]))
    return Stage(
        allocate=units_of(rank, round_.allocate_before),
        copies=paired(copied, own[1], own),
        send=[PeerSegment(peer, moves, into=None, out_of=own) for peer, moves in sends],
        release=units_of(rank, round_.release_after),
        receive=[
            PeerSegment(peer, moves, into=own[1], out_of=mapped[peer].flats) for peer, moves in sorted(receive.items())
        ],
        exchange=round_.exchange,
        restore=units_of(rank, round_.restore_before),
    )

"""Define the data of a plan: a move, a round of moves, and one rank's step of a round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import NamedTuple, Protocol

from fusion.ep_switch.layout import Place
from fusion.model.boxes import Box

UnitId = tuple[int, int]
"""(global rank, index of the storage unit on it)."""

Regions = tuple[tuple[str, Box], ...]
"""Boxes of global tensors by name."""


class Move(NamedTuple):
    """Moves elements from a place on one rank to a place on another, or on the same one.

    ``regions`` are the boxes that they belong to. One box: ``shape`` is the box's, in the global orientation. Several
    boxes that are contiguous on both ends: ``shape`` is ``(numel,)``, and each box is stored in it row by row
    (`pieces`).

    ``source`` is a place in the source layout's storage of ``source_rank`` or, if ``relayed``, in the *target*
    layout's: the rank received the elements over a slower link in an earlier round and forwards them. ``target`` is a
    place in the target layout's storage of ``target_rank``.
    """

    source_rank: int
    target_rank: int
    regions: Regions
    shape: tuple[int, ...]
    source: Place
    target: Place
    relayed: bool = False

    @property
    def local(self) -> bool:
        """Whether the move is a copy within a rank."""
        return self.source_rank == self.target_rank

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def name(self) -> str:
        """Name of the move's first global tensor, for messages."""
        return self.regions[0][0]

    def move(self) -> Move:
        return self

    def pieces(self) -> Iterator[tuple[str, Box, int, int]]:
        """Yield (name, box, start, stop) of every box: elements [start, stop) of the move in row-major order."""
        start = 0
        for name, box in self.regions:
            stop = start + prod(last - first for first, last in box)
            yield name, box, start, stop
            start = stop


class Transfer(Protocol):
    """Holds the part of a move that planning needs; `move` completes it. A `Hop`, or a move itself."""

    @property
    def source_rank(self) -> int: ...
    @property
    def target_rank(self) -> int: ...
    @property
    def numel(self) -> int: ...
    @property
    def local(self) -> bool: ...
    @property
    def relayed(self) -> bool: ...
    def move(self) -> Move: ...


@dataclass(frozen=True, eq=False)
class Round:
    """Groups transfers that are made together: allocate, copy, exchange, and release when all ranks have read.

    ``allocate_before``: units of the target; ``release_after``: units of the source; ``restore_before``: units of the
    source that come back from the host (`Plan.parked`).
    """

    transfers: tuple[Transfer, ...]
    allocate_before: tuple[UnitId, ...]
    release_after: tuple[UnitId, ...]
    restore_before: tuple[UnitId, ...] = ()

    @property
    def moves(self) -> Iterator[Move]:
        """The transfers as moves, completed one by one: a plan of many ranks has too many to store."""
        return (transfer.move() for transfer in self.transfers)

    @property
    def sent(self) -> Iterator[Transfer]:
        """The transfers between different ranks."""
        return (transfer for transfer in self.transfers if not transfer.local)

    @property
    def exchange(self) -> bool:
        """Whether any two ranks exchange anything."""
        return any(True for _ in self.sent)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Round):
            return NotImplemented
        own, theirs = (
            (part.allocate_before, part.release_after, part.restore_before, [*part.moves]) for part in (self, other)
        )
        return own == theirs

    def of(self, rank: int) -> list[Move]:
        """Return the moves that a rank sends, receives or copies."""
        return [transfer.move() for transfer in self.transfers if rank in (transfer.source_rank, transfer.target_rank)]


def united(rounds: Sequence[Round]) -> Round:
    """Return successive rounds, to which nothing is restored, as one."""
    assert not any(one.restore_before for one in rounds)
    return Round(
        tuple(chain.from_iterable(one.transfers for one in rounds)),
        tuple(chain.from_iterable(one.allocate_before for one in rounds)),
        tuple(chain.from_iterable(one.release_after for one in rounds)),
    )


@dataclass(frozen=True)
class RankRound:
    """Holds one rank's part of a round. ``send`` and ``receive``: moves by peer, in the same order on both ends."""

    allocate: tuple[int, ...]
    copy: tuple[Move, ...]
    send: dict[int, tuple[Move, ...]]
    receive: dict[int, tuple[Move, ...]]
    release: tuple[int, ...]
    exchange: bool
    """Whether any two ranks exchange anything in this round; the same on all ranks."""
    restore: tuple[int, ...] = ()


def steps_of(rounds: Iterable[Round], rank: int) -> tuple[RankRound, ...]:
    """Return a rank's part of every round."""
    return tuple(_step(round_, rank) for round_ in rounds)


def _step(round_: Round, rank: int) -> RankRound:
    copy: list[Move] = []
    send: dict[int, list[Move]] = defaultdict(list)
    receive: dict[int, list[Move]] = defaultdict(list)
    for move in round_.of(rank):
        if move.local:
            copy.append(move)
        elif move.source_rank == rank:
            send[move.target_rank].append(move)
        else:
            receive[move.source_rank].append(move)
    return RankRound(
        allocate=tuple(index for owner, index in round_.allocate_before if owner == rank),
        copy=tuple(copy),
        send={peer: tuple(moves) for peer, moves in sorted(send.items())},
        receive={peer: tuple(moves) for peer, moves in sorted(receive.items())},
        release=tuple(index for owner, index in round_.release_after if owner == rank),
        exchange=round_.exchange,
        restore=tuple(index for owner, index in round_.restore_before if owner == rank),
    )

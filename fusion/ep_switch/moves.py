"""Define the data of a plan: a move, a round of moves, and one rank's step of a round."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import eq
from typing import Any, NamedTuple, Protocol

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


class MoveSketch(Protocol):
    """Holds the part of a move that planning needs; `move` completes it."""

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


class Moves(Sequence[Move]):
    """Holds the moves of a round, each completed when it is read: a plan of many ranks has too many to store."""

    __slots__ = ("sketches",)

    def __init__(self, sketches: Iterable[MoveSketch]):
        self.sketches: tuple[MoveSketch, ...] = tuple(sketches)

    def __len__(self) -> int:
        return len(self.sketches)

    def __iter__(self) -> Iterator[Move]:
        return (sketch.move() for sketch in self.sketches)

    def __getitem__(self, index: Any) -> Any:
        selected = self.sketches[index]
        return tuple(sketch.move() for sketch in selected) if isinstance(index, slice) else selected.move()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moves) and len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))


@dataclass(frozen=True)
class Round:
    """Groups moves that are exchanged together: allocate, copy, exchange, and release when all ranks have read.

    ``allocate_before``: units of the target; ``release_after``: units of the source.
    """

    moves: Sequence[Move]
    allocate_before: tuple[UnitId, ...]
    release_after: tuple[UnitId, ...]

    @property
    def sketches(self) -> Sequence[MoveSketch]:
        """The moves as sketches, without completing them."""
        return self.moves.sketches if isinstance(self.moves, Moves) else self.moves

    @property
    def exchange(self) -> bool:
        """Whether any two ranks exchange anything."""
        return any(not sketch.local for sketch in self.sketches)

    def of(self, rank: int) -> list[Move]:
        """Return the moves that a rank sends, receives or copies."""
        return [sketch.move() for sketch in self.sketches if rank in (sketch.source_rank, sketch.target_rank)]


@dataclass(frozen=True)
class Step:
    """Holds one rank's part of a round. ``send`` and ``receive``: moves by peer, in the same order on both ends."""

    allocate: tuple[int, ...]
    copy: tuple[Move, ...]
    send: dict[int, tuple[Move, ...]]
    receive: dict[int, tuple[Move, ...]]
    release: tuple[int, ...]
    exchange: bool
    """Whether any two ranks exchange anything in this round; the same on all ranks."""


def steps_of(rounds: Iterable[Round], rank: int) -> tuple[Step, ...]:
    """Return a rank's part of every round."""
    return tuple(_step(round_, rank) for round_ in rounds)


def _step(round_: Round, rank: int) -> Step:
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
    return Step(
        allocate=tuple(index for owner, index in round_.allocate_before if owner == rank),
        copy=tuple(copy),
        send={peer: tuple(moves) for peer, moves in sorted(send.items())},
        receive={peer: tuple(moves) for peer, moves in sorted(receive.items())},
        release=tuple(index for owner, index in round_.release_after if owner == rank),
        exchange=round_.exchange,
    )

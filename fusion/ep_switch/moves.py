"""Define the data of a plan: a move, and a round of moves."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import numpy as np

from fusion.ep_switch.layout import Place
from fusion.model.boxes import Box

UnitId = tuple[int, int]
"""(global rank, index of the storage unit on it)."""

Regions = tuple[tuple[str, Box], ...]
"""Boxes of global tensors by name."""


class Move(NamedTuple):
    """Move elements from a place on one rank to a place on another, or on the same one.

    ``regions`` are the boxes that they belong to. One box: ``shape`` is the box's, in the global orientation. Several
    boxes that are contiguous on both ends: ``shape`` is ``(numel,)``, and each box is stored in it row by row
    (`pieces`).

    ``source`` is a place in the source layout's storage of ``source_rank`` or, if ``relayed``, in the *target*
    layout's: the rank received the elements over a slower link in an earlier round and forwards them. ``target`` is a
    place in the target layout's storage of ``target_rank``."""

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

    def pieces(self) -> Iterator[tuple[str, Box, int, int]]:
        """Yield (name, box, start, stop) of every box: elements [start, stop) of the move in row-major order."""
        start = 0
        for name, box in self.regions:
            stop = start + prod(last - first for first, last in box)
            yield name, box, start, stop
            start = stop


class Moves(Sequence[Move]):
    """Complete moves one by one: a plan of many ranks has too many to store.
    ``ends``: [n, 4]: sender, receiver, elements, whether relayed.
    ``pieces``: [n, …]: arguments of ``complete``."""

    def __init__(self, ends: np.ndarray, pieces: np.ndarray, complete: Callable[..., Move]):
        self.ends, self.pieces, self.complete = ends, pieces, complete

    @classmethod
    def of(cls, moves: Sequence[Move]) -> "Moves":
        """Return moves that are complete."""
        ends = np.array([(move.source_rank, move.target_rank, move.numel, move.relayed) for move in moves], np.int64)
        return cls(ends.reshape(-1, 4), np.fromiter(moves, object, len(moves))[:, None], lambda move: move)

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: Any) -> Any:
        return self.complete(*self.pieces[index].tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Moves) and [*self] == [*other]


@dataclass(frozen=True)
class Round:
    """Groups transfers that are made together: allocate, copy, exchange, and release when all ranks have read.

    ``exchange``: whether any two ranks exchange anything; ``allocate_before``: units of the target; ``release_after``:
    units of the source; ``restore_before``: units of the source that come back from the host (`Plan.parked`)."""

    moves: Moves
    exchange: bool
    allocate_before: tuple[UnitId, ...]
    release_after: tuple[UnitId, ...]
    restore_before: tuple[UnitId, ...] = ()

    def of(self, rank: int) -> list[Move]:
        """Return the moves that a rank sends, receives or copies."""
        return [self.moves[index] for index in (self.moves.ends[:, :2] == rank).any(1).nonzero()[0].tolist()]

    def by_peer(self, rank: int) -> tuple[list[Move], dict[int, list[Move]], dict[int, list[Move]]]:
        """Return what a rank copies, and by peer what it sends and receives, in the same order on both ends."""
        copied: list[Move] = []
        send: dict[int, list[Move]] = defaultdict(list)
        receive: dict[int, list[Move]] = defaultdict(list)
        for move in self.of(rank):
            if move.local:
                copied.append(move)
            elif move.source_rank == rank:
                send[move.target_rank].append(move)
            else:
                receive[move.source_rank].append(move)
        return copied, send, receive


def united(rounds: Sequence[Round]) -> Round:
    """Return successive rounds, to which nothing is restored, as one."""
    assert not any(step.restore_before for step in rounds)
    moves = [step.moves for step in rounds]
    ends, pieces = (np.concatenate(parts) for parts in ([move.ends for move in moves], [move.pieces for move in moves]))
    return Round(
        Moves(ends, pieces, moves[0].complete),
        any(step.exchange for step in rounds),
        tuple(chain.from_iterable(step.allocate_before for step in rounds)),
        tuple(chain.from_iterable(step.release_after for step in rounds)),
    )


def units_of(rank: int, units: Iterable[UnitId]) -> tuple[int, ...]:
    return tuple([unit for owner, unit in units if owner == rank])

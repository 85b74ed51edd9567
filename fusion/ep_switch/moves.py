"""The vocabulary of a plan: a move, a round of moves, and a round as one rank sees it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from fusion.ep_switch.layout import Place, numel
from fusion.model.table import Box

BucketId = tuple[int, int]
"""(global rank, index of the bucket on it)."""


@dataclass(frozen=True)
class Move:
    """One box of the global tensor ``name`` from a place on one rank to a place on another, or on the same one."""

    source_rank: int
    target_rank: int
    name: str
    region: Box
    source: Place
    target: Place

    @property
    def local(self) -> bool:
        return self.source_rank == self.target_rank

    @property
    def numel(self) -> int:
        return numel(self.region)

    def split(self, room: int) -> list[Move]:
        """Pieces of at most ``room`` elements, cut along the leading dimensions."""
        if self.numel <= room:
            return [self]
        lengths = [stop - start for start, stop in self.region]
        d = next(i for i, length in enumerate(lengths) if length > 1)
        rows, (start, stop) = max(1, room * lengths[d] // self.numel), self.region[d]
        pieces: list[Move] = []
        for first in range(start, stop, rows):
            region = (*self.region[:d], (first, min(first + rows, stop)), *self.region[d + 1 :])
            piece = replace(self, region=region, source=self.source.narrow(region), target=self.target.narrow(region))
            pieces += piece.split(room)
        return pieces


@dataclass(frozen=True)
class Round:
    """Moves that are exchanged together. Allocate, pack and copy, exchange, unpack, release."""

    moves: tuple[Move, ...]
    allocate_before: tuple[BucketId, ...]
    release_after: tuple[BucketId, ...]


@dataclass(frozen=True)
class Step:
    """A round as one rank sees it. ``send`` and ``receive``: moves by peer, in an order both ends share."""

    allocate: tuple[int, ...]
    copy: tuple[Move, ...]
    send: dict[int, tuple[Move, ...]]
    receive: dict[int, tuple[Move, ...]]
    release: tuple[int, ...]
    exchange: bool
    """Whether any two ranks exchange anything in this round; the same on all ranks."""


def step_of(rank: int, round_: Round) -> Step:
    """The round as ``rank`` sees it."""
    send: dict[int, list[Move]] = defaultdict(list)
    receive: dict[int, list[Move]] = defaultdict(list)
    for move in round_.moves:
        if not move.local and move.source_rank == rank:
            send[move.target_rank].append(move)
        if not move.local and move.target_rank == rank:
            receive[move.source_rank].append(move)
    return Step(
        allocate=tuple(index for owner, index in round_.allocate_before if owner == rank),
        copy=tuple(move for move in round_.moves if move.local and move.target_rank == rank),
        send={peer: tuple(moves) for peer, moves in sorted(send.items())},
        receive={peer: tuple(moves) for peer, moves in sorted(receive.items())},
        release=tuple(index for owner, index in round_.release_after if owner == rank),
        exchange=any(not move.local for move in round_.moves),
    )

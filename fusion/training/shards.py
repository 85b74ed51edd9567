"""Compute which part of a flat bucket a rank's optimizer owns, and which of its elements other ranks hold too. Pure.

    bucket   | input_norm | qkv                     | q_norm | out        | …
    rank 0   [ input_norm | qkv, first  ]
    rank 1                              [ qkv, rest | q_norm | out        ]

Several ranks of a TP group hold the same elements: all of them hold norms and the router, those that share a key/value
head hold its rows, and adapters are whole where their matrix is cut along its other side; an expert's on the ranks that
it is split over (expert-TP). Each of them has processed other rows of the batch or other heads, so its gradients are
partial sums. They are summed in a flat tensor, the wire, that has a place for every such element of any rank:

    wire     | input_norm | k, v of head 0 | k, v of head 1 | q_norm | …       (of one bucket)

Invariants. `shard_pieces`: the pieces of a shard are disjoint and in order; over all ranks that hold replicas of a
bucket they cover every element of every parameter once, and no padding. `SharedElements.wire`: two ranks put elements
in the same place if and only if they are the same element of the model; an element that a single rank holds has no
place. `SharedElements.counted`: over the ranks of a TP group every element of the model that they hold is counted once.
`SharedElements.boxes`: the boxes of a piece are disjoint, cover it, and are owned where it is counted. `boxes_of_run`:
in order, the elements of the boxes are those of the run."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch

from fusion.model import BucketPlan, LocalParam, ModelConfig, Parallel, plan_buckets
from fusion.model.boxes import Box
from fusion.model.local_param import Part
from fusion.model.table import EMBEDDING

_Slice = tuple[str, Box]
"""Name of a global tensor and a box of it."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the flattened ``param``; in a flat tensor (shard, wire) they begin at ``at``."""

    param: LocalParam
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def decay(self) -> bool:
        """Whether weight decay applies: to matrices, not to vectors (norms)."""
        return len(self.param.shape) > 1


@dataclass(frozen=True)
class ShardBox:
    """Elements of ``piece`` as the box ``region`` of the global tensor ``name``.

    ``start``: where they begin in the flattened local tensor; ``owned``: no other rank of the TP group owns them."""

    piece: Piece
    name: str
    region: Box
    start: int
    owned: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(stop - start for start, stop in self.region)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def at(self) -> int:
        """Start of the elements in the flat tensor of the piece."""
        return self.piece.at + self.start - self.piece.start


@dataclass(frozen=True)
class Wire:
    """The elements of a bucket that this rank shares with others of its TP group, placed in a flat tensor of
    ``numel`` elements."""

    numel: int
    pieces: tuple[Piece, ...]


def gradient_buckets(
    config: ModelConfig, parallel: Parallel, params: Iterable[LocalParam], bucket_bytes: int
) -> tuple[tuple[BucketPlan, ...], int]:
    """Return a rank's buckets of gradients and optimizer states (float32) in order, and the number of buckets at the
    end that hold tied embeddings, of which the first and the last stage have a copy each. What is not trained
    (`LocalParam.trained`) is left out."""
    separate = parallel.pp > 1 and config.tie_embeddings and not config.num_labels
    params = [param for param in params if param.trained]
    tied = [param for param in params if separate and param.parts[0].name == EMBEDDING]
    untied = [param for param in params if param not in tied]
    itemsize = torch.float32.itemsize
    untied_plans, tied_plans = (
        plan_buckets(group, parallel, itemsize=itemsize, bucket_bytes=bucket_bytes) for group in (untied, tied)
    )
    return (*untied_plans, *tied_plans), len(tied_plans)


def own_range(plan: BucketPlan, parallel: Parallel, rank: int) -> tuple[int, int]:
    """Return the elements [start, stop) of a bucket whose optimizer state ``rank`` owns."""
    axis: Literal["edp", "dp"] = "edp" if plan.expert else "dp"
    return shard_range(plan, getattr(parallel, axis), parallel.coordinate(axis, rank))


def shard_range(plan: BucketPlan, replicas: int, replica: int) -> tuple[int, int]:
    """Return the elements [start, stop) of a bucket whose optimizer state replica ``replica`` owns (ZeRO-1)."""
    assert plan.numel % replicas == 0
    size = plan.numel // replicas
    return replica * size, (replica + 1) * size


def shard_pieces(plan: BucketPlan, start: int, stop: int) -> list[Piece]:
    """Return the pieces of parameters in the shard [start, stop) of a bucket."""
    pieces = []
    for param, offset in plan.entries:
        first, last = max(offset, start), min(offset + param.numel, stop)
        if first < last:
            pieces.append(Piece(param, start=first - offset, stop=last - offset, at=first - start))
    return pieces


class SharedElements:
    """Find the elements that several ranks of one TP group hold, or with ``expert`` of one group that experts are
    split over. The other kind is left out, and counts as held once: replicas of an expert sum its gradients over edp.
    ``tables``: the parameters of each rank of the group, in order; parameters of the same name have the same shape."""

    def __init__(self, tables: Sequence[Iterable[LocalParam]], rank: int, *, expert: bool = False):
        self.rank, self.expert = rank, expert
        self.tables = [{param.name: param for param in table if param.expert == expert} for table in tables]
        self.holders: dict[_Slice, list[int]] = {}
        for rank, table in enumerate(self.tables):
            for param in table.values():
                for part in param.parts:
                    self.holders.setdefault((part.name, part.region), []).append(rank)

    def wire(self, plan: BucketPlan) -> Wire:
        """Return the wire of one bucket: on all ranks of the group the same tensor, with this rank's pieces of it."""
        places: dict[_Slice, int] = {}
        numel = 0
        pieces: list[Piece] = []
        for param, _ in plan.entries:
            if param.expert != self.expert:
                continue
            for table in self.tables:
                for key, start, stop in _slices(table[param.name]):
                    if len(self.holders[key]) > 1 and key not in places:
                        places[key], numel = numel, numel + stop - start
            for key, start, stop in _slices(param):
                if key in places:
                    pieces.append(Piece(param, start=start, stop=stop, at=places[key]))
        return Wire(numel, tuple(pieces))

    def counted(self, piece: Piece) -> list[tuple[int, int]]:
        """Return the runs [start, stop) in the flat tensor of ``piece`` that this rank counts: the elements that no
        rank before it holds."""
        shift = piece.at - piece.start
        return [(first + shift, last + shift) for key, _, first, last in _slices_of(piece) if self.owns(key)]

    def boxes(self, piece: Piece) -> Iterator[ShardBox]:
        """Yield the boxes of global tensors that the elements of ``piece`` are."""
        for key, start, first, last in _slices_of(piece):
            (name, region), at, owned = key, first, self.owns(key)
            for box in boxes_of_run(region, first - start, last - start):
                yield ShardBox(piece, name, region=box, start=at, owned=owned)
                at += prod(end - begin for begin, end in box)

    def owns(self, key: _Slice) -> bool:
        """Return whether no rank before this one holds a slice."""
        return self.holders.get(key, [self.rank])[0] == self.rank


def untrained_parts(
    params: Iterable[LocalParam], shared: SharedElements, rank: int
) -> Iterator[tuple[LocalParam, Part, bool]]:
    """Yield the parts of a rank's parameters that are in no unit, and whether it owns them: over all ranks of the
    layout every element is owned once."""
    for param in params:
        for part in param.parts if param.storage != "unit" else ():
            if param.storage == "card":  # whole on every rank
                yield param, part, rank == 0
            else:
                yield param, part, shared.owns((part.name, part.region))


def boxes_of_run(region: Box, first: int, last: int) -> Iterator[Box]:
    """Yield the boxes that make up elements [first, last) of the flattened ``region``: of a matrix at most the end of a
    row, whole rows, and the beginning of a row."""
    (row, _), *inner = region
    width = prod(stop - start for start, stop in inner)
    while first < last:
        skipped, column = divmod(first, width)
        num_rows = 0 if column else (last - first) // width
        if num_rows:
            yield ((row + skipped, row + skipped + num_rows), *inner)
            first += num_rows * width
            continue
        end = min(last, (skipped + 1) * width)
        for box in boxes_of_run(tuple(inner), column, column + end - first):
            yield ((row + skipped, row + skipped + 1), *box)
        first = end


def _slices_of(piece: Piece) -> Iterator[tuple[_Slice, int, int, int]]:
    """Yield the slices that a piece has elements of, where each begins in the flattened parameter, and these
    elements."""
    for key, start, stop in _slices(piece.param):
        first, last = max(start, piece.start), min(stop, piece.stop)
        if first < last:
            yield key, start, first, last


def _slices(param: LocalParam) -> list[tuple[_Slice, int, int]]:
    """Return the parts of a local tensor, which are runs of its rows, as elements [start, stop) of it flattened."""
    assert not any(part.transposed for part in param.parts), f"{param.name}: a trainer stores no transposed parts"
    width = param.numel // param.shape[0]
    return [((part.name, part.region), part.local[0][0] * width, part.local[0][1] * width) for part in param.parts]

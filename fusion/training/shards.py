"""Which part of a flat bucket a rank's optimizer owns, and what of it other ranks hold too: pure arithmetic.

    bucket   | input_norm | qkv                     | q_norm | out        | …
    rank 0   [ input_norm | qkv, first  ]
    rank 1                              [ qkv, rest | q_norm | out        ]

Ranks of a TP group hold some elements alike: norms and the router all of them, the rows of a key/value head those that
share it. Each saw other rows of the batch or other query heads, so their gradients are partial sums; they meet on a
wire that has a place for every such element of any of them:

    wire     | input_norm | k, v of head 0 | k, v of head 1 | q_norm | …       (of one bucket)

Invariants. `shard_pieces`: the pieces of a shard are disjoint and in order; over all ranks that hold replicas of a
bucket they cover every element of every parameter once, and no padding. `SharedElements.wire`: two ranks put
an element in the same place if and only if it is the same element of the model, and what one rank alone holds is not on
it. `SharedElements.counted`: over the ranks of a TP group every element of the model that they hold is counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from fusion.model import BucketPlan, LocalParam, ModelConfig, Parallel, plan_buckets
from fusion.model.table import Box

_Slice = tuple[str, Box]
"""Name of a global tensor and a box of it."""


@dataclass(frozen=True)
class Piece:
    """Elements [start, stop) of the flattened ``param``, which lie in a flat tensor (shard, wire) from ``at`` on."""

    param: LocalParam
    start: int
    stop: int
    at: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def decay(self) -> bool:
        """Matrices decay, vectors (norms) do not."""
        return len(self.param.shape) > 1


@dataclass(frozen=True)
class Wire:
    """What of a bucket this rank shares with others of its TP group: its places in a flat tensor of ``numel``."""

    numel: int
    pieces: tuple[Piece, ...]


def gradient_buckets(
    config: ModelConfig, parallel: Parallel, params: Iterable[LocalParam], bucket_bytes: int
) -> tuple[tuple[BucketPlan, ...], int]:
    """A rank's buckets of gradients and optimizer states (float32), in which order; and how many of them, the last
    ones, hold tied embeddings, of which the first and the last stage have a copy each."""
    apart = parallel.pp > 1 and config.tie_embeddings and not config.num_labels
    params = list(params)
    tied = [param for param in params if apart and param.name.split(".")[0] == "embed"]
    rest = [param for param in params if param not in tied]
    plans = [plan_buckets(kind, parallel, torch.float32.itemsize, bucket_bytes) for kind in (rest, tied)]
    return (*plans[0], *plans[1]), len(plans[1])


def own_range(plan: BucketPlan, parallel: Parallel, rank: int) -> tuple[int, int]:
    """The elements [start, stop) of a bucket whose optimizer state ``rank`` owns."""
    axis: Literal["edp", "dp"] = "edp" if plan.expert else "dp"
    return shard_range(plan, getattr(parallel, axis), parallel.coordinate(axis, rank))


def shard_range(plan: BucketPlan, replicas: int, replica: int) -> tuple[int, int]:
    """The elements [start, stop) of a bucket whose optimizer state replica ``replica`` owns (ZeRO-1)."""
    assert plan.numel % replicas == 0
    size = plan.numel // replicas
    return replica * size, (replica + 1) * size


def shard_pieces(plan: BucketPlan, start: int, stop: int) -> list[Piece]:
    """What lies in the shard [start, stop) of a bucket."""
    pieces = []
    for param, offset in plan.entries:
        first, last = max(offset, start), min(offset + param.numel, stop)
        if first < last:
            pieces.append(Piece(param, first - offset, last - offset, first - start))
    return pieces


class SharedElements:
    """What the ranks of one TP group hold alike. Experts are left out: their replicas meet over edp.

    Args:
        tables: of the ranks of the group, in order; parameters of one name have one shape.
    """

    def __init__(self, tables: Sequence[Iterable[LocalParam]], tp_rank: int):
        self.tp_rank = tp_rank
        self.tables = [{param.name: param for param in table if not param.expert} for table in tables]
        self.holders: dict[_Slice, list[int]] = {}
        for rank, table in enumerate(self.tables):
            for param in table.values():
                for part in param.parts:
                    self.holders.setdefault((part.name, part.region), []).append(rank)

    def wire(self, plan: BucketPlan) -> Wire:
        """Of one bucket; the same on all ranks of the group but for their places."""
        places: dict[_Slice, int] = {}
        numel, pieces = 0, []
        for param, _ in plan.entries:
            if param.expert:
                continue
            for table in self.tables:
                for key, start, stop in _slices(table[param.name]):
                    if len(self.holders[key]) > 1 and key not in places:
                        places[key], numel = numel, numel + stop - start
            mine = [(key, start, stop) for key, start, stop in _slices(param) if key in places]
            pieces += [Piece(param, start, stop, places[key]) for key, start, stop in mine]
        return Wire(numel, tuple(pieces))

    def counted(self, piece: Piece) -> list[tuple[int, int]]:
        """Where in the flat tensor of ``piece`` lies what this rank counts: what no rank before it holds."""
        expert = piece.param.expert
        spans = []
        for key, start, stop in _slices(piece.param):
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last and (expert or self.holders[key][0] == self.tp_rank):
                spans.append((piece.at + first - piece.start, piece.at + last - piece.start))
        return spans


def _slices(param: LocalParam) -> list[tuple[_Slice, int, int]]:
    """The parts of a local tensor, which lie in it as runs of rows, as elements [start, stop) of it flattened."""
    width = param.numel // param.shape[0]
    return [((part.name, part.region), part.local[0][0] * width, part.local[0][1] * width) for part in param.parts]

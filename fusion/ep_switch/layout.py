"""A layout: which rank holds which box of which global tensor, and in which bucket of its storage that box lies.

Pure and hashable: shapes and arithmetic only, the same on every rank. What it says about a rank is what `Transformer`
builds there with the same arguments. Any two engines can meet in a plan once each can be described as a layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from fusion.model.config import ModelConfig
from fusion.model.parallel import Parallel
from fusion.model.table import Box, LocalParam, Part, local_params
from fusion.model.weights import BucketPlan, plan_buckets


@dataclass(frozen=True)
class Place:
    """Where a box lies on a rank: the local tensor ``param``, the index of its bucket, the box inside it."""

    param: str
    bucket: int
    part: Part

    def narrow(self, region: Box) -> Place:
        """The place of a box inside this one, ``region`` in global indices."""
        return replace(self, part=narrow(self.part, region))


@dataclass(frozen=True)
class Layout:
    """The weights of one model over ``ranks`` (global ranks, in layout order).

    Args:
        parallel: one TP x EP grid; each ``parallel.world`` ranks in order form one, so a layout of several engines is a
            layout with more ranks than its grid.
        dtype, bucket_bytes: of the storage, as given to `Transformer`.
    """

    config: ModelConfig
    parallel: Parallel
    ranks: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 64 << 20

    def __post_init__(self) -> None:
        assert self.ranks and len(set(self.ranks)) == len(self.ranks), f"ranks {self.ranks} are not distinct"
        assert len(self.ranks) % self.parallel.world == 0, (
            f"{len(self.ranks)} ranks are no multiple of the grid's {self.parallel.world}"
        )

    def params(self, rank: int) -> tuple[LocalParam, ...]:
        """The local tensors of a global rank; none where the layout does not reach it."""
        return _params(self.config, self.parallel, self._coordinate(rank)) if rank in self.ranks else ()

    def buckets(self, rank: int) -> tuple[BucketPlan, ...]:
        """The flat buckets of a global rank."""
        if rank not in self.ranks:
            return ()
        return _buckets(self.config, self.parallel, self._coordinate(rank), self.dtype.itemsize, self.bucket_bytes)

    def places(self, rank: int) -> Iterator[Place]:
        """Every part of a global rank with its bucket, in the order of the forward pass."""
        bucket_of = {param.name: i for i, plan in enumerate(self.buckets(rank)) for param, _ in plan.entries}
        for param in self.params(rank):
            for part in param.parts:
                yield Place(param.name, bucket_of[param.name], part)

    def bucket_nbytes(self, rank: int) -> tuple[int, ...]:
        """Bytes of each bucket of a rank, padding included."""
        return tuple(plan.numel * self.dtype.itemsize for plan in self.buckets(rank))

    def nbytes(self, rank: int) -> int:
        """Bytes of a rank's weights, padding included."""
        return sum(self.bucket_nbytes(rank))

    def _coordinate(self, rank: int) -> int:
        return self.ranks.index(rank) % self.parallel.world

    def __str__(self) -> str:
        return f"{self.parallel}x{len(self.ranks) // self.parallel.world}"


@lru_cache(maxsize=1024)
def _params(config: ModelConfig, parallel: Parallel, coordinate: int) -> tuple[LocalParam, ...]:
    return local_params(config, parallel, coordinate)


@lru_cache(maxsize=1024)
def _buckets(
    config: ModelConfig, parallel: Parallel, coordinate: int, itemsize: int, bucket_bytes: int
) -> tuple[BucketPlan, ...]:
    return plan_buckets(_params(config, parallel, coordinate), parallel, itemsize, bucket_bytes)


def intersect(a: Box, b: Box) -> Box | None:
    """The box common to both, None where they do not meet."""
    box = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return box if all(start < stop for start, stop in box) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """Disjoint boxes that cover ``box`` without ``hole``, which lies inside it."""
    pieces, rest = [], list(box)
    for d, ((start, stop), (first, last)) in enumerate(zip(box, hole, strict=True)):
        for piece in ((start, first), (last, stop)):
            if piece[0] < piece[1]:
                pieces.append((*rest[:d], piece, *rest[d + 1 :]))
        rest[d] = (first, last)
    return pieces


def numel(box: Box) -> int:
    count = 1
    for start, stop in box:
        count *= stop - start
    return count


def narrow(part: Part, region: Box) -> Part:
    """The part of ``part`` that is ``region`` (global indices, inside `Part.region`)."""
    inside = [(start - base, stop - base) for (start, stop), (base, _) in zip(region, part.region, strict=True)]
    if part.transposed:
        inside[-2:] = inside[:-3:-1]
    leading = len(part.local) - len(inside)
    local = tuple((base + a, base + b) for (base, _), (a, b) in zip(part.local[leading:], inside, strict=True))
    return replace(part, region=region, local=part.local[:leading] + local)

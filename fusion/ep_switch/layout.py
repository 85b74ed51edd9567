"""A layout: which rank holds which box of which global tensor, and where in its storage that box lies.

Pure and hashable: shapes and arithmetic only, the same on every rank. What it says about a rank is what `Transformer`
builds there with the same arguments. Any two engines can meet in a plan once each can be described as a layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from fusion.model.config import ModelConfig
from fusion.model.parallel import Parallel
from fusion.model.table import Box, LocalParam, Part, local_params
from fusion.model.weights import BucketPlan, plan_units, unit_bytes


class Place(NamedTuple):
    """Where a box lies in a rank's storage: index (i, j) is element ``offset`` + (i, j) · ``strides`` of a unit.

    ``unit``: index in `Layout.units`, which is also the index in the `Buckets` built from them.
    """

    unit: int
    offset: int
    strides: tuple[int, ...]

    def view(self, flats: list[torch.Tensor] | dict[int, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """The elements of the box as a view, ``shape`` in the global orientation, of the units' flat tensors."""
        flat = flats[self.unit]  # which may lie anywhere in its storage
        return flat.as_strided(shape, self.strides, flat.storage_offset() + self.offset)


class Held(NamedTuple):
    """``region`` of the global tensor ``name``, and its place on the rank that holds it."""

    name: str
    region: Box
    place: Place


@dataclass(frozen=True)
class Layout:
    """The weights of one model over ``ranks`` (global ranks, in layout order).

    Args:
        parallel: one grid; each ``parallel.world`` ranks in order form one, so a layout of several engines is a layout
            with more ranks than its grid.
        dtype, bucket_bytes: as given to `Transformer`.
    """

    config: ModelConfig
    parallel: Parallel
    ranks: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 256 << 20

    def __post_init__(self) -> None:
        assert self.ranks and len(set(self.ranks)) == len(self.ranks), f"ranks {self.ranks} are not distinct"
        assert len(self.ranks) % self.parallel.world == 0, (
            f"{len(self.ranks)} ranks are no multiple of the grid's {self.parallel.world}"
        )

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """The ranks in groups of those that hold the same slices in the same storage."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, rank in enumerate(self.ranks):
            place = index % self.parallel.world
            slices = tuple(self.parallel.coordinate(axis, place) for axis in ("pp", "tp", "ep", "etp"))  # type: ignore[arg-type]
            groups.setdefault(slices, []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def table(self, place: int) -> tuple[LocalParam, ...]:
        """The local tensors at a place of the grid, in the order of the forward pass, cut to fit units."""
        most = unit_bytes(self.bucket_bytes) // self.dtype.itemsize
        return local_params(self.config, self.parallel, place, most)

    def params(self, rank: int) -> tuple[LocalParam, ...]:
        """The local tensors of a global rank; none where the layout does not reach it."""
        return tuple(param for unit in self.units(rank) for param, _ in unit.entries)

    def units(self, rank: int) -> tuple[BucketPlan, ...]:
        """The storage units of a global rank; none where the layout does not reach it."""
        return self._units[self._first[rank]] if rank in self._first else ()

    def unit_nbytes(self, rank: int) -> tuple[int, ...]:
        """Bytes of each storage unit of a rank."""
        return tuple(unit.numel * self.dtype.itemsize for unit in self.units(rank))

    def nbytes(self, rank: int) -> int:
        """Bytes of a rank's weights."""
        return sum(self.unit_nbytes(rank))

    def places(self, rank: int) -> tuple[Held, ...]:
        """Every box of a global tensor that a rank holds, by units in the order in which it lies in them."""
        return tuple(held for index, unit in enumerate(self.units(rank)) for held in places_in(index, unit))

    @cached_property
    def _first(self) -> dict[int, int]:
        """rank → the first of those that are like it."""
        return {rank: group[0] for group in self.alike for rank in group}

    @cached_property
    def _units(self) -> dict[int, tuple[BucketPlan, ...]]:
        found = {}
        for first, *_ in self.alike:
            place = self.ranks.index(first) % self.parallel.world
            found[first] = plan_units(self.table(place), self.dtype.itemsize, unit_bytes(self.bucket_bytes))
        return found

    def __str__(self) -> str:
        return f"{self.parallel}x{len(self.ranks) // self.parallel.world}"


def places_in(index: int, unit: BucketPlan) -> list[Held]:
    """The boxes that lie in a storage unit, ``index`` among its rank's, in the order of their parameters."""
    return [
        Held(part.name, part.region, Place(index, *_offset_and_strides(param, start, part)))
        for param, start in unit.entries
        for part in param.parts
    ]


def _offset_and_strides(param: LocalParam, start: int, part: Part) -> tuple[int, tuple[int, ...]]:
    offset, strides, step = start, [0] * len(param.shape), 1
    for d in range(len(param.shape) - 1, -1, -1):
        strides[d] = step
        offset += part.local[d][0] * step
        step *= param.shape[d]
    own = strides[len(strides) - len(part.region) :]
    if part.transposed:
        own[-2:] = own[:-3:-1]
    return offset, tuple(own)


def shared_units(source: Layout, target: Layout, rank: int) -> dict[int, int]:
    """Units of the target → the unit of the source that is the same storage: same parameters, slices and dtype.

    They are not copied, not moved, and neither allocated nor released by a switch.
    """
    if source.dtype != target.dtype:
        return {}
    first = {unit.entries[0][0].name: index for index, unit in enumerate(source.units(rank))}
    shared = {}
    for index, unit in enumerate(target.units(rank)):
        other = first.get(unit.entries[0][0].name)
        if other is not None and source.units(rank)[other].entries == unit.entries:
            shared[index] = other
    return shared

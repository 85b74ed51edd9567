"""Describe a layout: which rank holds which box of which global tensor, and where in its storage.

Pure and hashable: shapes and arithmetic only, the same on every rank. It describes exactly what the `WeightHolder` of
its format builds on a rank with the same arguments. A plan can connect any two of them.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from fusion.model.boxes import Box
from fusion.model.bucket_plan import BucketPlan, plan_units, unit_bytes
from fusion.model.config import ModelConfig
from fusion.model.formats import EMBEDDED, Format, local_table
from fusion.model.local_param import LocalParam, Part
from fusion.model.parallel import Parallel


class Place(NamedTuple):
    """Locates a box in a rank's storage: index (i, j) is element ``offset`` + (i, j) · ``strides`` of a unit.

    ``unit``: index in `Layout.units`, which is also the index in the `Buckets` built from them.
    """

    unit: int
    offset: int
    strides: tuple[int, ...]

    def view(self, flats: list[torch.Tensor] | dict[int, torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Return the elements of the box as a view of the units' flat tensors, ``shape`` in the global orientation."""
        flat = flats[self.unit]  # which may begin anywhere in its storage
        return flat.as_strided(shape, self.strides, flat.storage_offset() + self.offset)


class Held(NamedTuple):
    """Pairs the box ``region`` of the global tensor ``name`` with its place on the rank that holds it."""

    name: str
    region: Box
    place: Place


@dataclass(frozen=True)
class Layout:
    """Describes the weights of one model over ``ranks`` (global ranks, in layout order).

    Args:
        parallel: one grid of ``parallel.world`` consecutive ranks; a layout of several engines has a multiple of them.
        dtype, bucket_bytes: as passed to the model.
        format: of the model that holds the weights: its local tensors and how they are stored.
    """

    config: ModelConfig
    parallel: Parallel
    ranks: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 256 << 20
    format: Format = EMBEDDED

    def __post_init__(self) -> None:
        assert self.ranks and len(set(self.ranks)) == len(self.ranks), f"ranks {self.ranks} are not distinct"
        assert len(self.ranks) % self.parallel.world == 0, (
            f"{len(self.ranks)} ranks are not a multiple of the grid's {self.parallel.world}"
        )

    @cached_property
    def alike(self) -> tuple[tuple[int, ...], ...]:
        """Groups of ranks that hold the same slices in the same storage."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, rank in enumerate(self.ranks):
            place = index % self.parallel.world
            slices = tuple(self.parallel.coordinate(axis, place) for axis in ("pp", "tp", "ep", "etp"))  # type: ignore[arg-type]
            groups.setdefault(slices, []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def table(self, place: int) -> tuple[LocalParam, ...]:
        """Return the local tensors at a place of the grid, in the order of the forward pass. Those that are stored
        elsewhere are in no unit."""
        max_bytes, itemsize = unit_bytes(self.bucket_bytes), self.dtype.itemsize
        return local_table(self.format, self.config, self.parallel, place, max_bytes=max_bytes, itemsize=itemsize)

    @cached_property
    def card_numel(self) -> int:
        """Elements that every rank holds on its card apart from the units (`Buckets.card`)."""
        return sum(param.numel for param in self.table(0) if param.storage == "card")

    def units(self, rank: int) -> tuple[BucketPlan, ...]:
        """Return the storage units of a global rank; none if it is not in the layout."""
        return self._units[self._first[rank]] if rank in self._first else ()

    def unit_nbytes(self, rank: int) -> tuple[int, ...]:
        """Return the bytes of each storage unit of a rank."""
        return tuple(unit.numel * self.dtype.itemsize for unit in self.units(rank))

    def nbytes(self, rank: int) -> int:
        """Return the bytes of a rank's weights."""
        return sum(self.unit_nbytes(rank))

    def external_nbytes(self, rank: int) -> int:
        """Return the bytes of a rank's largest unit that its format did not cut to fit; 0 if there is none. The stacks
        of a layer's experts count as one: no expert is complete, in the other layout, without a share of each."""
        if self.format == EMBEDDED:
            return 0
        max_bytes, sizes = unit_bytes(self.bucket_bytes), defaultdict[object, int](int)
        for index, (unit, size) in enumerate(zip(self.units(rank), self.unit_nbytes(rank), strict=True)):
            if size > max_bytes:
                first = unit.entries[0][0]
                stacked = first.stack is not None or (first.expert and first.expert_index is None)
                sizes[("stacks", first.layer) if stacked else index] += size
        return max(sizes.values(), default=0)

    def places(self, rank: int) -> tuple[Held, ...]:
        """Return every box of a global tensor that a rank holds, in the order of its storage."""
        return tuple(held for index, unit in enumerate(self.units(rank)) for held in places_in(index, unit))

    @cached_property
    def _first(self) -> dict[int, int]:
        """rank → the first rank of its group of `alike`."""
        return {rank: group[0] for group in self.alike for rank in group}

    @cached_property
    def _units(self) -> dict[int, tuple[BucketPlan, ...]]:
        units = {}
        for first, *_ in self.alike:
            place = self.ranks.index(first) % self.parallel.world
            units[first] = plan_units(self.table(place), self.dtype.itemsize, unit_bytes(self.bucket_bytes))
        return units

    def __str__(self) -> str:
        name = "" if self.format == EMBEDDED else f"{self.format} "
        return f"{name}{self.parallel}x{len(self.ranks) // self.parallel.world}"


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether a box of this shape (sizes > 0) takes up one range of its storage, row by row."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def places_in(index: int, unit: BucketPlan) -> list[Held]:
    """Return the boxes in a storage unit (the ``index``-th of its rank), in the order of their parameters."""
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
    """Map units of the target to the unit of the source with common storage: equal content and dtype.

    A switch does not copy, move, allocate or release them.
    """
    if source.dtype != target.dtype:
        return {}
    held = {unit.content: index for index, unit in enumerate(source.units(rank))}
    return {index: held[unit.content] for index, unit in enumerate(target.units(rank)) if unit.content in held}

"""Describe a layout: which rank holds which box of which global tensor, and where in its storage.

Pure and hashable: shapes and arithmetic only, the same on every rank. It describes exactly what the `WeightHolder` of
its format builds on a rank with the same arguments. A plan can connect any two of them.

Layers of one kind (equal `LayerSpec`s) have the same units on ranks with the same shares, but for the number in their
names. What is asked of all ranks is therefore read from a model that has each kind once (`sections`)."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from fusion.model.boxes import Box
from fusion.model.bucket_plan import BucketPlan, plan_units, trained_units, unit_bytes
from fusion.model.config import ModelConfig
from fusion.model.formats import EMBEDDED, Format, local_table
from fusion.model.local_param import LocalParam, Part
from fusion.model.parallel import Parallel
from fusion.model.spec import LayerSpec


class Place(NamedTuple):
    """Locate a box in a rank's storage: index (i, j) is element ``offset`` + (i, j) · ``strides`` of a unit.

    ``unit``: index in `Layout.units`, which is also the index in the `Buckets` built from them."""

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


def _cache() -> Any:
    return field(default_factory=dict, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class Layout:
    """Describe the weights of one model over ``ranks`` (global ranks, in layout order).
    ``parallel``: one grid of ``parallel.world`` consecutive ranks; a layout of several engines has a multiple of them.
    ``dtype``, ``bucket_bytes``: as passed to the model.
    ``format``: of the model that holds the weights: its local tensors and how they are stored.
    ``trained_only``: leave out a frozen base, which a rank holds besides."""

    config: ModelConfig
    parallel: Parallel
    ranks: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    bucket_bytes: int = 256 << 20
    format: Format = EMBEDDED
    trained_only: bool = False
    _units: dict[int, tuple[BucketPlan, ...]] = _cache()
    _nbytes: dict[int, tuple[int, ...]] = _cache()
    _patterns: dict[tuple[int, ...], Mapping[int | str, list[BucketPlan]]] = _cache()

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
            groups.setdefault(self._shares(index % self.parallel.world), []).append(rank)
        return tuple(tuple(group) for group in groups.values())

    def table(self, place: int) -> tuple[LocalParam, ...]:
        """Return the local tensors at a place of the grid, in the order of the forward pass. Those that are stored
        elsewhere are in no unit."""
        return self._table(self.config, self.parallel, place)

    def _table(self, config: ModelConfig, grid: Parallel, place: int) -> tuple[LocalParam, ...]:
        max_bytes, itemsize = unit_bytes(self.bucket_bytes), self.dtype.itemsize
        return local_table(self.format, config, grid, place, max_bytes=max_bytes, itemsize=itemsize)

    @cached_property
    def card_numel(self) -> int:
        """Elements that every rank holds on its card apart from the units (`Buckets.card`)."""
        return 0 if self.trained_only else sum(param.numel for param in self.table(0) if param.storage == "card")

    def units(self, rank: int) -> tuple[BucketPlan, ...]:
        """Return the storage units of a global rank; none if it is not in the layout."""
        if rank not in self._place:
            return ()
        place = self._place[rank]
        if place not in self._units:
            self._units[place] = self._plan_units(self.config, self.parallel, place)
        return self._units[place]

    def sections(self, rank: int) -> Iterator[tuple[int | None, BucketPlan]]:
        """Yield every storage unit of a rank with its layer; None: it belongs to no layer. A unit of a layer is that of
        its kind: the names in it have the number of the kind (`config.layers` without repetition)."""
        if rank not in self._place:
            return
        stage, place = divmod(self._place[rank], self.parallel.stage_world)
        pattern = self._pattern(place)
        yield from ((None, unit) for unit in pattern["first"] if stage == 0)
        for layer in self.parallel.layers(self.config.num_layers, stage):
            yield from ((layer, unit) for unit in pattern[self._kinds[self.config.layers[layer]]])
        yield from ((None, unit) for unit in pattern["last"] if stage == self.parallel.pp - 1)

    def unit_nbytes(self, rank: int) -> tuple[int, ...]:
        place = self._place.get(rank, -1)
        if place not in self._nbytes:
            self._nbytes[place] = tuple([unit.numel * self.dtype.itemsize for _, unit in self.sections(rank)])
        return self._nbytes[place]

    def nbytes(self, rank: int) -> int:
        return sum(self.unit_nbytes(rank))

    def external_nbytes(self, rank: int) -> int:
        """Return the bytes of a rank's largest unit that its format did not cut to fit; 0 if there is none. The stacks
        of a layer's experts count as one: no expert is complete, in the other layout, without a share of each."""
        if self.format == EMBEDDED:
            return 0
        max_bytes, sizes = unit_bytes(self.bucket_bytes), defaultdict[object, int](int)
        for index, ((layer, unit), size) in enumerate(zip(self.sections(rank), self.unit_nbytes(rank), strict=True)):
            if size > max_bytes:
                first = unit.entries[0][0]
                stacked = first.stack is not None or (first.expert and first.expert_index is None)
                sizes[("stacks", layer) if stacked else index] += size
        return max(sizes.values(), default=0)

    def places(self, rank: int) -> tuple[Held, ...]:
        """Return every box of a global tensor that a rank holds, in the order of its storage."""
        return tuple(held for index, unit in enumerate(self.units(rank)) for held in places_in(index, unit))

    def _shares(self, place: int) -> tuple[int, ...]:
        """Return the coordinates of a place of the grid that determine its slices."""
        return tuple([self.parallel.coordinate(axis, place) for axis in ("pp", "tp", "ep", "etp")])

    @cached_property
    def _place(self) -> dict[int, int]:
        """rank → the first place of the grid with its slices."""
        return {rank: self.ranks.index(group[0]) % self.parallel.world for group in self.alike for rank in group}

    @cached_property
    def _kinds(self) -> dict[LayerSpec, int]:
        """The kinds of layers, numbered."""
        return {spec: kind for kind, spec in enumerate(dict.fromkeys(self.config.layers))}

    def _pattern(self, place: int) -> Mapping[int | str, list[BucketPlan]]:
        """Return the units of a place in a stage: those of a layer by its kind, and those before the `first` layer of
        the model and after its `last` one."""
        shares = self._shares(place)
        if shares not in self._patterns:
            units, ends = defaultdict[int | str, list[BucketPlan]](list), min(self.parallel.pp, 2)
            config = replace(self.config.without_predictors, layers=(*self._kinds,) * ends)
            grid = replace(self.parallel, world=ends * self.parallel.stage_world, pp=ends)
            for stage in range(ends):
                end = "last" if stage else "first"
                for unit in self._plan_units(config, grid, stage * grid.stage_world + place):
                    layer = unit.entries[0][0].layer
                    end = end if layer is None else "last"
                    units[end if layer is None else layer].append(unit)
            self._patterns[shares] = units
        return self._patterns[shares]

    def _plan_units(self, config: ModelConfig, grid: Parallel, place: int) -> tuple[BucketPlan, ...]:
        units = plan_units(self._table(config, grid, place), self.dtype.itemsize, unit_bytes(self.bucket_bytes))
        return trained_units(units) if self.trained_only else units

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

    A switch does not copy, move, allocate or release them."""
    if source.dtype != target.dtype:
        return {}
    held = {unit.content: index for index, unit in enumerate(source.units(rank))}
    return {index: held[unit.content] for index, unit in enumerate(target.units(rank)) if unit.content in held}

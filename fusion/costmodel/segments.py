"""Divide a model into segments: ranges of elements that a die holds wholly or not at all, in either of two layouts.

Layers in the same pair of pipeline stages are held alike, and so are all tensors that the ranks divide alike: their
elements are summed first (`groups`). This leaves a few ranges of a cut dimension that neither layout divides, each with
two rows over the dies: who holds it before, who needs it after (`segments`)."""

from collections import Counter
from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np

from fusion.costmodel.shape import WHOLE, Scope, Shape, Share
from fusion.model import Parallel
from fusion.model.parallel import Axis

Array = np.ndarray


@dataclass(frozen=True)
class Side:
    """One end of a switch: a layout on the dies ``first``, ``first`` + 1, …"""

    parallel: Parallel
    first: int = 0

    @property
    def end(self) -> int:
        return self.first + self.parallel.world


class AxisCut(NamedTuple):
    """What the ranks of both layouts hold of a dimension, in the order of their coordinates on ``axis``."""

    axis: Axis
    source: tuple[Share, ...]
    target: tuple[Share, ...]


class Tensors(NamedTuple):
    """Tensors that the ranks divide alike, along each of ``cuts``. ``same_storage``: a segment that a die keeps stays
    in its storage unit, so that nothing is copied."""

    cuts: tuple[AxisCut, ...]
    same_storage: bool


class TensorGroup(NamedTuple):
    """Tensors that are divided alike, in the same stages of both layouts."""

    tensors: Tensors
    source_stages: tuple[int, ...]
    target_stages: tuple[int, ...]


def groups(shape: Shape, source: Parallel, target: Parallel) -> dict[TensorGroup, int]:
    """Return group → elements of its tensors."""
    numel: Counter[TensorGroup] = Counter()
    for (kind, here, there), layers in _layers(shape, source, target).items():
        of_layer = _dense(shape, kind, source, target) + _experts(shape, kind, source, target)
        for tensors, size in of_layer.items():
            numel[TensorGroup(tensors, (here,), (there,))] += layers * size
    last = source.pp - 1, target.pp - 1
    for tensors, size in _dense(shape, "embed", source, target).items():
        ends = (tuple(sorted({0, stage})) if shape.tied else (0,) for stage in last)
        numel[TensorGroup(tensors, *ends)] += size
    for tensors, size in _dense(shape, "head", source, target).items():
        numel[TensorGroup(tensors, (last[0],), (last[1],))] += size
    return numel


def _layers(shape: Shape, source: Parallel, target: Parallel) -> Counter[tuple[int, int, int]]:
    """Return (kind, stage of the source, stage of the target) → number of layers."""
    count = shape.config.num_layers
    stages = [[stage for stage in range(side.pp) for _ in side.layers(count, stage)] for side in (source, target)]
    return Counter(zip(shape.kind_of, *stages, strict=True))


def _dense(shape: Shape, scope: Scope, source: Parallel, target: Parallel) -> Counter[Tensors]:
    """Return the elements of what a scope has outside the experts and in units, by how it is divided."""
    numel: Counter[Tensors] = Counter()
    tensors = shape.tensors(scope, source.tp), shape.tensors(scope, target.tp)
    for before, after in zip(*tensors, strict=True):
        if not before.in_units:
            continue
        whole = {*before.shares, *after.shares} == {WHOLE}
        cuts = () if whole else (AxisCut("tp", before.shares, after.shares),)
        numel[Tensors(cuts, source.tp == target.tp or not before.tp_sharded)] += before.numel
    return numel


def _experts(shape: Shape, kind: int, source: Parallel, target: Parallel) -> Counter[Tensors]:
    """Return the elements of the experts of a layer, which EP and ETP divide evenly."""
    axes: tuple[Axis, ...] = ("ep", "etp")
    cuts = tuple(AxisCut(axis, *(_even(getattr(side, axis)) for side in (source, target))) for axis in axes)
    size = shape.routed_of(kind)
    return Counter({Tensors(cuts, source.etp == target.etp): size} if size else {})


def _even(ranks: int) -> tuple[Share, ...]:
    return tuple((rank, rank + 1, ranks) for rank in range(ranks))


def segments(group: TensorGroup, source: Side, target: Side, dies: int) -> tuple[Array, Array, Array]:
    """Return (share of the group's bytes [G], who holds it [G, dies], who needs it [G, dies]) of every segment."""
    pieces = [_slicing(cut) for cut in group.tensors.cuts]
    width = np.ones(1)
    for share, _ in pieces:
        width = np.outer(width, share).ravel()
    rows = []
    for i, (side, stages) in enumerate(((source, group.source_stages), (target, group.target_stages))):
        row = np.zeros((len(width), dies), dtype=bool)
        place = np.arange(side.parallel.world)
        here = np.isin(_coordinates(side.parallel, "pp", place), stages)
        held = np.ones((1, len(place)), dtype=bool)
        for (_, holders), cut in zip(pieces, group.tensors.cuts, strict=True):
            along_axis = holders[i][:, _coordinates(side.parallel, cut.axis, place)]
            held = (held[:, None, :] & along_axis[None, :, :]).reshape(-1, len(place))
        row[:, side.first : side.end] = held & here
        rows.append(row)
    return width, rows[0], rows[1]


def _coordinates(parallel: Parallel, axis: Axis, place: Array) -> Array:
    """Return `Parallel.coordinate` of many ranks at once, as it is arithmetic only."""
    return parallel.coordinate(axis, place)  # type: ignore[arg-type, return-value]


def _slicing(cut: AxisCut) -> tuple[Array, list[Array]]:
    """Return the segments of a cut dimension: share of the dimension [G]; per side, who holds which [G, ranks]."""
    shares = cut.source, cut.target
    of = lcm(*(size for side in shares for _, _, size in side))
    spans = [np.array([(start * of // size, stop * of // size) for start, stop, size in side]) for side in shares]
    edges = np.unique(np.concatenate([span.ravel() for span in spans]))
    start, stop = edges[:-1], edges[1:]
    held = [(span[:, 0] <= start[:, None]) & (stop[:, None] <= span[:, 1]) for span in spans]
    return (stop - start) / of, held

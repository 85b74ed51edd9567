"""Cut the target's content along the source's into fragments, each with all ranks that can give it and need it.

    units of the source ─► slabs, each distinct content once, with its owners ─┐
    units of the target ─► slabs, without shared units ─────────────────────────┴─► fragments, in families of slabs

Pure. Invariants: the fragments of a family are disjoint and cover its slabs; each is contained in every slab that gives
or takes it. Content that ranks replicate is processed once, and layers with equal slabs are cut once.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import NamedTuple

from fusion.ep_switch.connected import connected
from fusion.ep_switch.layout import Layout, is_contiguous, places_in
from fusion.ep_switch.moves import Regions
from fusion.model.boxes import Box, intersect, subtract
from fusion.model.bucket_plan import BucketPlan


class Slab:
    """Represents one distinct content of storage units. ``owners``: rank → index of its unit with this content."""

    __slots__ = ("numel", "owners", "unit")

    def __init__(self, unit: BucketPlan):
        self.unit, self.numel = unit, unit.numel
        self.owners: dict[int, int] = {}


Key = tuple[int | None, str]
"""(layer, content of a unit of it with the names of its kind): `Layout.sections`."""


class Spot(NamedTuple):
    """Locates a fragment in a slab."""

    slab: Slab
    offset: int
    strides: tuple[int, ...]


class Fragment(NamedTuple):
    """Represents elements that the same slabs of the source hold and the same slabs of the target need: one box, or
    boxes that are contiguous in all of these slabs (then ``shape`` is flat), as in `Move`. The names of ``regions`` are
    those of the kind of ``layer`` (`named`)."""

    regions: Regions
    shape: tuple[int, ...]
    givers: tuple[Spot, ...]
    takers: tuple[Spot, ...]
    layer: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


class SlabGroup(NamedTuple):
    """Groups slabs of the target that have elements in common (often a single slab) and the fragments that fill
    them."""

    slabs: tuple[Slab, ...]
    fragments: tuple[Fragment, ...]


def slabs_of(layout: Layout) -> dict[Key, Slab]:
    """Return the distinct contents of a layout's units, in order. Equal keys in two layouts mean equal content with
    equal storage."""
    slabs: dict[Key, Slab] = {}
    contents: dict[int, str] = {}
    for alike in layout.alike:
        for index, (layer, unit) in enumerate(layout.sections(alike[0])):
            content = contents.get(id(unit)) or contents.setdefault(id(unit), _content(unit))
            slab = slabs.get((layer, content))
            if slab is None:
                slab = slabs[layer, content] = Slab(unit)
            for rank in alike:
                slab.owners[rank] = index
    return slabs


def _content(unit: BucketPlan) -> str:
    """Return `BucketPlan.content` as a string: its hash is computed once."""
    return sys.intern(repr(unit.content))


def families(source: Mapping[Key, Slab], target: Mapping[Key, Slab]) -> list[SlabGroup]:
    """Return the families of fragments that fill the slabs of the target, in the order of the slabs."""
    by_layer: dict[int | None, tuple[list[Key], list[Key]]] = {layer: ([], []) for layer, _ in target}
    for side, held in enumerate((source, target)):
        for key in held:
            if key[0] in by_layer:
                by_layer[key[0]][side].append(key)
    patterns: dict[object, tuple[list[Slab], list[SlabGroup]]] = {}
    whole: list[SlabGroup] = []
    for layer, (have, need) in by_layer.items():
        slabs = [*(source[key] for key in have), *(target[key] for key in need)]
        pattern = tuple([content for _, content in have]), tuple([content for _, content in need])
        if pattern not in patterns:
            patterns[pattern] = slabs, _families(slabs[: len(have)], slabs[len(have) :])
        first, cut = patterns[pattern]
        whole += _of_layer(layer, cut, {id(one): other for one, other in zip(first, slabs, strict=True)})
    place = {id(slab): index for index, slab in enumerate(target.values())}
    return sorted(whole, key=lambda family: place[id(family.slabs[0])])


def named(regions: Regions, layer: int | None) -> Regions:
    """Return regions with the number of their layer in place of that of its kind: model.layers.NUMBER.…"""
    if layer is None:
        return regions
    parts = [(name.split(".", 3), box) for name, box in regions]
    return tuple([(f"{model}.{layers}.{layer}.{rest}", box) for (model, layers, _, rest), box in parts])


def _of_layer(layer: int | None, cut: list[SlabGroup], slabs: dict[int, Slab]) -> Iterator[SlabGroup]:
    """Yield families that were cut for a layer of the same kind, with the slabs and the number of this one."""
    for family in cut:
        fragments = []
        for regions, shape, *ends, _ in family.fragments:
            givers, takers = (
                tuple([Spot(slabs[id(slab)], offset, strides) for slab, offset, strides in spots]) for spots in ends
            )
            fragments.append(Fragment(regions, shape, givers, takers, layer))
        yield SlabGroup(tuple([slabs[id(slab)] for slab in family.slabs]), tuple(fragments))


def _families(source: list[Slab], target: list[Slab]) -> list[SlabGroup]:
    cuts = _Cuts(source, target)
    fragments = [cuts.fragments(slab) for slab in target]
    number = {id(slab): index for index, slab in enumerate(target)}
    taken = ([number[id(taker.slab)] for taker in piece.takers] for pieces in fragments for piece in pieces)
    return [
        SlabGroup(tuple([target[i] for i in group]), tuple([piece for i in group for piece in fragments[i]]))
        for group in connected(len(target), taken)
    ]


class _Cuts:
    """Cuts the boxes of both sides, by global tensor."""

    def __init__(self, source: Iterable[Slab], target: Iterable[Slab]):
        by_name: tuple[dict[str, dict[Box, list[Spot]]], ...] = defaultdict(dict), defaultdict(dict)
        for side, slabs in zip(by_name, (source, target), strict=True):
            for slab in slabs:
                for name, region, place in places_in(0, slab.unit):
                    side[name].setdefault(region, []).append(Spot(slab, place.offset, place.strides))
        self._of = {
            name: ((*by_name[0][name], *takers), [*by_name[0][name].values(), *takers.values()], len(by_name[0][name]))
            for name, takers in by_name[1].items()
        }
        self._pieces: dict[tuple[tuple[Box, ...], Box], list[tuple[Box, list[int]]]] = {}

    def fragments(self, slab: Slab) -> list[Fragment]:
        """Return the fragments of a target slab, in its order, except those whose first taker is an earlier slab."""
        fragments: list[Fragment] = []
        for name, region, _ in places_in(0, slab.unit):
            boxes, spots, givers = self._of[name]
            for box, around in self._cut(boxes, region):
                give = [_inside(spot, boxes[i], box) for i in around if i < givers for spot in spots[i]]
                take = [_inside(spot, boxes[i], box) for i in around if i >= givers for spot in spots[i]]
                assert give, f"no rank holds {box} of {name}"
                if take[0].slab is not slab:
                    continue
                shape = tuple([stop - start for start, stop in box])
                fragment = Fragment(((name, box),), shape, givers=tuple(give), takers=tuple(take))
                if fragments and _adjoin(fragments[-1], fragment):
                    fragments[-1] = _join(fragments[-1], fragment)
                else:
                    fragments.append(fragment)
        return fragments

    def _cut(self, boxes: tuple[Box, ...], region: Box) -> list[tuple[Box, list[int]]]:
        """Cut ``region`` along ``boxes`` into disjoint boxes, each with the indices of the boxes that contain it."""
        if (boxes, region) not in self._pieces:
            pieces: list[tuple[Box, list[int]]] = [(region, [])]
            for index, box in enumerate(boxes):
                cut: list[tuple[Box, list[int]]] = []
                for piece, around in pieces:
                    if hit := intersect(piece, box):
                        cut.append((hit, [*around, index]))
                        cut += [(rest, around) for rest in subtract(piece, hit)]
                    else:
                        cut.append((piece, around))
                pieces = cut
            self._pieces[boxes, region] = sorted(pieces)
        return self._pieces[boxes, region]


def _adjoin(first: Fragment, second: Fragment) -> bool:
    """Return whether the second directly follows the first in every slab."""
    if len(first.givers) != len(second.givers) or len(first.takers) != len(second.takers):
        return False
    numel = first.numel
    return all(
        a.slab is b.slab
        and a.offset + numel == b.offset
        and is_contiguous(first.shape, a.strides)
        and is_contiguous(second.shape, b.strides)
        for a, b in zip(first.givers + first.takers, second.givers + second.takers, strict=True)
    )


def _join(first: Fragment, second: Fragment) -> Fragment:
    give, take = (tuple([spot._replace(strides=(1,)) for spot in spots]) for spots in (first.givers, first.takers))
    return Fragment(first.regions + second.regions, shape=(first.numel + second.numel,), givers=give, takers=take)


def _inside(spot: Spot, whole: Box, box: Box) -> Spot:
    """Return the spot of ``box``, which is contained in ``whole``, from the spot of ``whole``."""
    if box == whole:
        return spot
    offset = spot.offset
    for stride, (base, _), (start, _) in zip(spot.strides, whole, box, strict=True):
        offset += stride * (start - base)
    return Spot(spot.slab, offset, spot.strides)

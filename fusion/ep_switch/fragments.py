"""Cut the target's content along the source's into fragments, each with all ranks that can give it and need it.

    units of the source ─► slabs, each distinct content once, with its owners ─┐
    units of the target ─► slabs, without shared units ─────────────────────────┴─► fragments, in families of slabs

Pure. Invariants: the fragments of a family are disjoint and cover its slabs; each is contained in every slab that gives
or takes it. Content that ranks replicate is processed once, and layers with equal slabs are cut once."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from fusion.ep_switch.balance import Ranks
from fusion.ep_switch.connected import connected
from fusion.ep_switch.layout import Layout, Place, is_contiguous, places_in
from fusion.ep_switch.moves import Regions, UnitId
from fusion.model.boxes import Box, intersect, subtract
from fusion.model.bucket_plan import BucketPlan


class Slab:
    """Represent one distinct content of storage units. ``groups``: the ranks that own one, by group; ``indices``: the
    index of the unit with this content on the ranks of each group."""

    __slots__ = ("groups", "indices", "unit")

    def __init__(self, unit: BucketPlan, owners: Sequence[tuple[Ranks, int]]):
        self.unit = unit
        self.set_owners(owners)

    def set_owners(self, owners: Sequence[tuple[Ranks, int]]) -> None:
        """Set the owners: groups of ranks, each with the index of their unit."""
        self.groups, self.indices = tuple([ranks for ranks, _ in owners]), tuple([index for _, index in owners])

    def owners(self) -> Iterator[UnitId]:
        """Yield the units with this content."""
        for ranks, index in zip(self.groups, self.indices, strict=True):
            yield from ((rank, index) for rank in ranks)


Key = tuple[int | None, str]
"""(layer, content of a unit of it with the names of its kind): `Layout.sections`."""


class Fragment(NamedTuple):
    """Represent elements that the same slabs of the source hold and the same slabs of the target need: one box, or
    boxes that are contiguous in all of these slabs (then ``shape`` is flat), as in `Move`. The names of ``regions`` are
    those of the kind of a layer (`named`); a place names a slab by its number in the layer (`CutFamily.slabs`)."""

    regions: Regions
    shape: tuple[int, ...]
    givers: tuple[Place, ...]
    takers: tuple[Place, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Cut(NamedTuple):
    """Groups slabs of the target that have elements in common (often a single slab) and the fragments that fill them,
    in every layer of a kind. ``slabs``: their numbers in a layer (`CutFamily.slabs`)."""

    slabs: tuple[int, ...]
    fragments: tuple[Fragment, ...]


class CutFamily(NamedTuple):
    """Represent a cut in one layer, and all transfers that fill its slabs. ``slabs``: all of the layer, of the source,
    then of the target. ``hosted``: its units that are filled from the host."""

    cut: Cut
    layer: int | None
    slabs: list[Slab]
    hosted: frozenset[UnitId] = frozenset()

    def owners(self) -> Iterator[UnitId]:
        """Yield the units that it fills."""
        for number in self.cut.slabs:
            yield from self.slabs[number].owners()


def slabs_of(layout: Layout) -> dict[Key, Slab]:
    """Return the distinct contents of a layout's units, in order. Equal keys in two layouts mean equal content with
    equal storage."""
    owned: dict[Key, tuple[BucketPlan, list[tuple[Ranks, int]]]] = {}
    contents: dict[int, str] = {}
    for alike in layout.alike:
        for index, (layer, unit) in enumerate(layout.sections(alike[0])):
            if (content := contents.get(id(unit))) is None:  # as a string, whose hash is computed once
                content = contents[id(unit)] = sys.intern(repr(unit.content))
            owned.setdefault((layer, content), (unit, []))[1].append((alike, index))
    return {key: Slab(*of_key) for key, of_key in owned.items()}


def families(source: Mapping[Key, Slab], target: Mapping[Key, Slab]) -> list[CutFamily]:
    """Return the families of fragments that fill the slabs of the target, in the order of the slabs."""
    by_layer: dict[int | None, tuple[list[Key], list[Key]]] = {layer: ([], []) for layer, _ in target}
    for side, held in enumerate((source, target)):
        for key in held:
            if key[0] in by_layer:
                by_layer[key[0]][side].append(key)
    patterns: dict[object, list[Cut]] = {}
    whole: list[CutFamily] = []
    for layer, (have, need) in by_layer.items():
        slabs = [*(source[key] for key in have), *(target[key] for key in need)]
        pattern = tuple([content for _, content in have]), tuple([content for _, content in need])
        if pattern not in patterns:
            patterns[pattern] = _cuts(slabs, len(have))
        whole += [CutFamily(cut, layer, slabs) for cut in patterns[pattern]]
    place = {id(slab): index for index, slab in enumerate(target.values())}
    return sorted(whole, key=lambda family: place[id(family.slabs[family.cut.slabs[0]])])


def named(regions: Regions, layer: int | None) -> Regions:
    """Return regions with the number of their layer in place of that of its kind: model.layers.NUMBER.…"""
    if layer is None:
        return regions
    parts = [(name.split(".", 3), box) for name, box in regions]
    return tuple([(f"{model}.{layers}.{layer}.{rest}", box) for (model, layers, _, rest), box in parts])


def _cuts(slabs: list[Slab], first: int) -> list[Cut]:
    """Return the cuts of a layer's slabs, of which those of the target begin at ``first``."""
    cuts, targets = _Cuts(slabs, first), range(first, len(slabs))
    fragments = {number: cuts.fragments(number) for number in targets}
    taken = ([taker.unit - first for taker in piece.takers] for pieces in fragments.values() for piece in pieces)
    return [
        Cut(tuple([first + i for i in group]), tuple([piece for i in group for piece in fragments[first + i]]))
        for group in connected(len(targets), taken)
    ]


class _Cuts:
    """Cut the boxes of both sides, by global tensor."""

    def __init__(self, slabs: list[Slab], first: int):
        self.slabs = slabs
        by_name: tuple[dict[str, dict[Box, list[Place]]], ...] = defaultdict(dict), defaultdict(dict)
        for number, slab in enumerate(slabs):
            for name, region, place in places_in(number, slab.unit):
                by_name[number >= first][name].setdefault(region, []).append(place)
        self._of = {
            name: ((*by_name[0][name], *takers), [*by_name[0][name].values(), *takers.values()], len(by_name[0][name]))
            for name, takers in by_name[1].items()
        }
        self._pieces: dict[tuple[tuple[Box, ...], Box], list[tuple[Box, list[int]]]] = {}

    def fragments(self, number: int) -> list[Fragment]:
        """Return the fragments of a target slab, in its order, except those whose first taker is an earlier slab."""
        fragments: list[Fragment] = []
        for name, region, _ in places_in(0, self.slabs[number].unit):
            boxes, places, givers = self._of[name]
            for box, around in self._cut(boxes, region):
                give = [_inside(place, boxes[i], box) for i in around if i < givers for place in places[i]]
                take = [_inside(place, boxes[i], box) for i in around if i >= givers for place in places[i]]
                assert give, f"no rank holds {box} of {name}"
                if take[0].unit != number:
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
        a.unit == b.unit
        and a.offset + numel == b.offset
        and is_contiguous(first.shape, a.strides)
        and is_contiguous(second.shape, b.strides)
        for a, b in zip(first.givers + first.takers, second.givers + second.takers, strict=True)
    )


def _join(first: Fragment, second: Fragment) -> Fragment:
    give, take = (tuple([place._replace(strides=(1,)) for place in places]) for places in (first.givers, first.takers))
    return Fragment(first.regions + second.regions, shape=(first.numel + second.numel,), givers=give, takers=take)


def _inside(place: Place, whole: Box, box: Box) -> Place:
    """Return the place of ``box``, which is contained in ``whole``, from the place of ``whole``."""
    if box == whole:
        return place
    offset = place.offset
    for stride, (base, _), (start, _) in zip(place.strides, whole, box, strict=True):
        offset += stride * (start - base)
    return place._replace(offset=offset)

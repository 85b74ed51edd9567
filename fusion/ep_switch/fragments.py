"""Cut the target's content along the source's into fragments, each with all ranks that can give it and need it.

    units of the source ─► slabs, each distinct content once, with its owners ─┐
    units of the target ─► slabs, without shared units ─────────────────────────┴─► fragments, in families of slabs

Pure. Invariants: the fragments of a family are disjoint and cover its slabs; each is contained in every slab that gives
or takes it. Content that ranks replicate is processed once, and layers and experts of equal shape are cut once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from fusion.ep_switch.connected import connected
from fusion.ep_switch.layout import Layout, is_contiguous, places_in
from fusion.ep_switch.moves import Regions
from fusion.model.boxes import Box, intersect, subtract
from fusion.model.bucket_plan import BucketPlan
from fusion.model.local_param import LocalParam


class Slab:
    """Represents one distinct content of storage units. ``owners``: rank → index of its unit with this content."""

    __slots__ = ("numel", "owners", "unit")

    def __init__(self, unit: BucketPlan):
        self.unit, self.numel = unit, unit.numel
        self.owners: dict[int, int] = {}


class Spot(NamedTuple):
    """Locates a fragment in a slab."""

    slab: Slab
    offset: int
    strides: tuple[int, ...]


class Fragment(NamedTuple):
    """Represents elements that the same slabs of the source hold and the same slabs of the target need: one box, or
    boxes that are contiguous in all of these slabs (then ``shape`` is flat), as in `Move`."""

    regions: Regions
    shape: tuple[int, ...]
    givers: tuple[Spot, ...]
    takers: tuple[Spot, ...]

    @property
    def numel(self) -> int:
        return prod(self.shape)


class Family(NamedTuple):
    """Groups slabs of the target that have elements in common (often a single slab) and the fragments that fill
    them."""

    slabs: tuple[Slab, ...]
    fragments: tuple[Fragment, ...]


def slabs_of(layout: Layout) -> dict[object, Slab]:
    """Return the distinct contents of a layout's units, in order. Equal keys in two layouts mean equal content with
    equal storage."""
    slabs: dict[object, Slab] = {}
    for alike in layout.alike:
        for index, unit in enumerate(layout.units(alike[0])):
            key = tuple([(start, param.shape, param.block, *_key(param)) for param, start in unit.entries])
            slab = slabs.get(key)
            if slab is None:
                slab = slabs[key] = Slab(unit)
            for rank in alike:
                slab.owners[rank] = index
    return slabs


def _key(param: LocalParam) -> list[object]:
    """Return what `BucketPlan.content` has of a parameter's parts, as plain tuples, which hash faster."""
    return [(p.name, p.region, p.local, p.transposed) for p in param.parts] or [param.name]


def families(source: Iterable[Slab], target: Iterable[Slab]) -> list[Family]:
    """Return the families of fragments that fill the slabs of the target, in the order of the slabs."""
    target = list(target)
    cuts = _Cuts(source, target)
    fragments = [cuts.fragments(slab) for slab in target]
    number = {id(slab): index for index, slab in enumerate(target)}
    taken = ([number[id(taker.slab)] for taker in piece.takers] for pieces in fragments for piece in pieces)
    return [
        Family(tuple([target[i] for i in group]), tuple([piece for i in group for piece in fragments[i]]))
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

"""Store the transfers of fragments from one rank to another as numbers, and compute their storage addresses.

A *hop* transfers elements [start, stop) of a fragment, in its row-major order, from one rank to another: from one of
its givers or, if ``relayed``, from the taker of the sender. Units are numbered (`Units`), so that a plan of many ranks
is a few arrays."""

from collections.abc import Iterator
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np

from fusion.ep_switch.fragments import CutFamily, Fragment, named
from fusion.ep_switch.layout import Layout, Place
from fusion.ep_switch.moves import Move, Moves, UnitId
from fusion.model.boxes import Box


class Units:
    """Numbers the storage units of a layout, by rank and by their order on it."""

    def __init__(self, layout: Layout):
        sizes = {rank: layout.unit_nbytes(rank) for rank in sorted(layout.ranks)}
        self.first: dict[int, int] = {}
        """Number of a rank's first unit"""
        self.names: list[UnitId] = []
        for rank, of_rank in sizes.items():
            self.first[rank] = len(self.names)
            self.names += [(rank, index) for index in range(len(of_rank))]
        self.rank = [rank for rank, _ in self.names]
        self.nbytes = np.array([size for of_rank in sizes.values() for size in of_rank], np.int64)


class Hop(NamedTuple):
    """Numbers that describe a hop.

    ``family``, ``fragment``: of `Hops.families`. ``giver``: index in the fragment's ``givers``, or, if ``relayed``, in
    its ``takers``, as is ``taker``. ``reads``: number of a unit of the source or, if ``relayed``, of the target, as is
    ``writes``."""

    family: int
    fragment: int
    giver: int
    taker: int
    relayed: int
    source_rank: int
    target_rank: int
    start: int
    stop: int
    reads: int
    writes: int


class Hops:
    """Hold all hops of a plan, in the order of their families; those of a family are in a feasible order.
    ``rows``: [n, 11], as `Hop`.
    ``units``: of the source and of the target."""

    def __init__(self, rows: np.ndarray, families: list[CutFamily], units: tuple[Units, Units]):
        self.rows, self.families, self.units = rows, families, units
        self.first = np.searchsorted(rows[:, 0], np.arange(len(families) + 1)).tolist()
        """Number of the first hop of every family"""

    def of(self, family: int) -> Iterator[tuple[int, Hop]]:
        first, end = self.first[family : family + 2]
        return enumerate(map(Hop._make, self.rows[first:end].tolist()), first)

    def takes(self, family: int) -> dict[int, int]:
        """Map the units of the target that a family allocates to their elements."""
        _, first = (units.first for units in self.units)
        cut, _, slabs, _ = self.families[family]
        return {
            first[rank] + index: slab.unit.numel
            for slab in (slabs[number] for number in cut.slabs)
            for ranks, index in zip(slab.groups, slab.indices, strict=True)
            for rank in ranks
        }

    def fragment(self, hop: Hop) -> Fragment:
        return self.families[hop.family].cut.fragments[hop.fragment]

    @cached_property
    def reads(self) -> np.ndarray:
        """[n, 3]: family, unit of the source, elements that the family reads from it; by the first hop that does."""
        direct = self.rows[self.rows[:, 4] == 0]
        family, unit, numel = direct[:, 0], direct[:, 9], direct[:, 8] - direct[:, 7]
        _, first, pair = np.unique(family * len(self.units[0].names) + unit, return_index=True, return_inverse=True)
        order = first.argsort()
        total = np.bincount(pair, numel, len(first)).astype(np.int64)  # exact below 2^53
        return np.stack([family[first], unit[first], total], 1)[order]

    def moves(self, pieces: np.ndarray) -> Moves:
        """Return pieces of hops, [n, 3]: number of the hop, start, stop."""
        hop, start, stop = pieces.T
        relayed, sender, receiver = self.rows[hop[:, None], [4, 5, 6]].T
        return Moves(np.stack([sender, receiver, stop - start, relayed], 1), pieces, self.move)

    def move(self, number: int, start: int, stop: int) -> Move:
        """Complete the move of elements [start, stop) of a hop. ``stop`` must be as `legal_stop` returns it."""
        hop = Hop._make(self.rows[number].tolist())
        fragment, layer = self.fragment(hop), self.families[hop.family].layer
        regions, shape, givers, takers = fragment
        giver, taker = (takers if hop.relayed else givers)[hop.giver], takers[hop.taker]
        source = Place(self.units[hop.relayed].names[hop.reads][1], giver.offset, giver.strides)
        target = Place(self.units[1].names[hop.writes][1], taker.offset, taker.strides)
        if stop - start < fragment.numel:
            first: tuple[int, ...]
            boxes = tuple(_boxes(fragment, start, stop))
            if len(shape) == 1:
                shape, first = (stop - start,), (start,)
            else:
                ((_, whole),), ((_, box),) = regions, boxes
                shape = tuple([stop - start for start, stop in box])
                first = tuple([start - base for (start, _), (base, _) in zip(box, whole, strict=True)])
            regions, source, target = boxes, _shifted(source, first), _shifted(target, first)
        return Move(
            source_rank=hop.source_rank,
            target_rank=hop.target_rank,
            regions=named(regions, layer),
            shape=shape,
            source=source,
            target=target,
            relayed=bool(hop.relayed),
        )


def legal_stop(fragment: Fragment, start: int, max_stop: int) -> int:
    """Return the largest stop up to ``max_stop`` such that [start, stop) is whole rows or lies within one row."""
    base, max_stop = 0, min(max_stop, fragment.numel)
    for _, box in fragment.regions:
        row = prod([last - first for first, last in box[1:]])
        end = base + row * (box[0][1] - box[0][0])
        if base < start < end and (start - base) % row:
            return min(max_stop, start + row - (start - base) % row)
        if max_stop <= end:
            stop = base + (max_stop - base) // row * row
            return stop if stop > start else max_stop
        base = end
    raise AssertionError(f"{start} is not in the fragment")


def _shifted(place: Place, first: tuple[int, ...]) -> Place:
    more = sum([i * step for i, step in zip(first, place.strides, strict=True)])
    return Place(place.unit, place.offset + more, place.strides)


def _boxes(fragment: Fragment, start: int, stop: int) -> list[tuple[str, Box]]:
    boxes: list[tuple[str, Box]] = []
    base = 0
    for name, box in fragment.regions:
        (first, last), columns = box[0], box[1:]
        row = prod([b - a for a, b in columns])
        a, b = max(start - base, 0), min(stop - base, row * (last - first))
        base += row * (last - first)
        if a >= b:
            continue
        if a % row or b % row:
            assert a // row == (b - 1) // row and len(columns) == 1, "neither whole rows nor a piece of one"
            line, begin = first + a // row, columns[0][0] - a // row * row
            boxes.append((name, ((line, line + 1), (begin + a, begin + b))))
        else:
            boxes.append((name, ((first + a // row, first + b // row), *columns)))
    return boxes

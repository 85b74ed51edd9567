"""Represent the transfer of a fragment from one rank to another, before its storage addresses are computed."""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from fusion.ep_switch.fragments import Fragment, Spot, named
from fusion.ep_switch.layout import Place
from fusion.ep_switch.moves import Move, UnitId
from fusion.model.boxes import Box


class Hop(NamedTuple):
    """Transfers elements [start, stop) of a fragment, in its row-major order, from one rank to another. ``source`` is
    one of its givers or, if ``relayed``, the source rank's taker."""

    source_rank: int
    target_rank: int
    source: Spot
    target: Spot
    relayed: bool
    fragment: Fragment
    start: int
    stop: int

    @property
    def local(self) -> bool:
        return self.source_rank == self.target_rank

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def reads(self) -> UnitId:
        return self.source_rank, self.source.slab.owners[self.source_rank]

    @property
    def writes(self) -> UnitId:
        return self.target_rank, self.target.slab.owners[self.target_rank]

    def move(self) -> Move:
        """Complete the move. ``stop`` must be as `legal_stop` returns it."""
        regions, shape = self.fragment.regions, self.fragment.shape
        source = Place(self.reads[1], self.source.offset, self.source.strides)
        target = Place(self.writes[1], self.target.offset, self.target.strides)
        if self.stop - self.start < self.fragment.numel:
            first: tuple[int, ...]
            boxes = tuple(_boxes(self.fragment, self.start, self.stop))
            if len(shape) == 1:
                shape, first = (self.stop - self.start,), (self.start,)
            else:
                ((_, whole),), ((_, box),) = regions, boxes
                shape = tuple([stop - start for start, stop in box])
                first = tuple([start - base for (start, _), (base, _) in zip(box, whole, strict=True)])
            regions, source, target = boxes, _shifted(source, first), _shifted(target, first)
        return Move(
            source_rank=self.source_rank,
            target_rank=self.target_rank,
            regions=named(regions, self.fragment.layer),
            shape=shape,
            source=source,
            target=target,
            relayed=self.relayed,
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
    return place._replace(offset=place.offset + sum([i * step for i, step in zip(first, place.strides, strict=True)]))


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

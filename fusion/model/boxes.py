"""Intersect and subtract boxes: ranges of indices of a tensor, one per dimension. Pure."""

from math import prod

Box = tuple[tuple[int, int], ...]
"""One (start, stop) per dimension."""


def numel(box: Box) -> int:
    return prod(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, None if it is empty."""
    box = tuple([(max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True)])
    return box if all(start < stop for start, stop in box) else None


def subtract(box: Box, hole: Box) -> list[Box]:
    """Return disjoint boxes that cover ``box`` without ``hole``, which is contained in it."""
    pieces, rest = [], list(box)
    for d, ((start, stop), (first, last)) in enumerate(zip(box, hole, strict=True)):
        for piece in ((start, first), (last, stop)):
            if piece[0] < piece[1]:
                pieces.append((*rest[:d], piece, *rest[d + 1 :]))
        rest[d] = (first, last)
    return pieces


def outside(box: Box, other: Box) -> list[Box]:
    """Return disjoint boxes that cover what of ``box`` is not in ``other``."""
    hit = intersect(box, other)
    return [box] if hit is None else subtract(box, hit)

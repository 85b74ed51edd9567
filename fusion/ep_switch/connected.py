"""Find groups of connected numbers. Pure."""

from collections import defaultdict
from collections.abc import Iterable


def connected(size: int, links: Iterable[Iterable[int]]) -> list[tuple[int, ...]]:
    """Return the groups into which ``links``, each of which connects its members, join the numbers below ``size``:
    members ascending, groups by their first."""
    head = list(range(size))

    def first(index: int) -> int:
        while head[index] != index:
            head[index] = index = head[head[index]]
        return index

    for link in links:
        root, *others = sorted(map(first, link))
        for other in others:
            head[other] = root
    groups: dict[int, list[int]] = defaultdict(list)
    for index in range(size):
        groups[first(index)].append(index)
    return [tuple(group) for group in groups.values()]

"""Describe the location of ranks and the bandwidth of the links between them.

    rank  0   1 | 2   3 | … | 14  15 || 16 …      |  card (two dies of one package)
         └─card─┘                                 || node, then supernode
    link of two ranks: the innermost of card, node, supernode that holds both, else the network between supernodes

Ranks are numbered as workers are placed: card by card, node by node, supernode by supernode. Levels whose bandwidths
are within a tenth of each other are one class (`classes`)."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

LEVELS = ("card", "node", "supernode", "network")
"""Levels of links, innermost first."""

SAME_CLASS = 0.9
"""A link with at least this fraction of another's bandwidth counts as equally fast in a plan."""


@dataclass(frozen=True)
class Topology:
    """Hold the properties of the machine that a plan depends on.
    ``ranks_per_card``, ``ranks_per_node``, ``ranks_per_supernode``: each divides the next.
    ``bytes_per_s``: bandwidth of one rank's sends, by level as in `LEVELS`.
    ``host_bytes_per_s``: from pinned host memory into one rank, all ranks of a node at once.
    ``source``: where the bandwidths come from."""

    ranks_per_card: int = 1
    ranks_per_node: int = 1 << 30
    ranks_per_supernode: int = 1 << 30
    bytes_per_s: tuple[float, ...] = (1e9, 1e9, 1e9, 1e9)
    source: str = "no bandwidths: all links count the same"
    host_bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        sizes = (1, self.ranks_per_card, self.ranks_per_node, self.ranks_per_supernode)
        assert all(inner > 0 and outer % inner == 0 for inner, outer in zip(sizes, sizes[1:], strict=False)), sizes
        assert len(self.bytes_per_s) == len(LEVELS) and all(speed > 0 for speed in self.bytes_per_s)
        assert self.host_bytes_per_s > 0

    @classmethod
    def single_node(cls) -> "Topology":
        """Return the topology of one node with equal links."""
        return cls()

    def level(self, one: Any, other: Any) -> Any:
        """Return the index in `LEVELS` of the link between two ranks, or between those of two arrays."""
        sizes = self.ranks_per_card, self.ranks_per_node, self.ranks_per_supernode
        return sum([one // size != other // size for size in sizes])  # each divides the next

    @cached_property
    def classes(self) -> tuple[tuple[int, ...], ...]:
        """Levels by speed, fastest first. A level is in the class of the next inner one unless it is slower than the
        innermost level of that class by more than a tenth."""
        classes: list[list[int]] = [[0]]
        for level in range(1, len(LEVELS)):
            if self.bytes_per_s[level] >= SAME_CLASS * self.bytes_per_s[classes[-1][0]]:
                classes[-1].append(level)
            else:
                classes.append([level])
        return tuple(map(tuple, classes))

    def group(self, rank: int, speed_class: int) -> int:
        """Return the number of the group in which ``rank`` reaches every member by links of ``speed_class`` or
        faster."""
        sizes = (self.ranks_per_card, self.ranks_per_node, self.ranks_per_supernode)
        outermost = self.classes[speed_class][-1]
        return rank // sizes[outermost] if outermost < len(sizes) else 0

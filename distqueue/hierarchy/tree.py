"""Plan the broadcast tree of a group that reads once: which rank forwards which columns to which others. Pure.

    queue ─► leader ═════► relay ─┬─► rank ─► rank        ═ crosses machines: one edge into each
                │ └─► rank        └─► rank
                ╚═══► relay ─► rank                       a rank's children in the order they are served

The trees over the relays and within a machine are binomial (recursively halved, each half with its own head), over
members sorted by their needs, so that ranks with fewer columns are below ranks with more.

Invariants of `plan_tree`, for m machines:
* every rank but the leader, rank 0, has one parent; edges are ordered so that parents come first;
* one edge leads into every machine but the leader's: a byte crosses the slow link once per machine;
* a path from the leader to a rank has at most ceil(log2 m) edges between machines and then, on a machine of c ranks, at
  most ceil(log2 c); no rank has more children than that;
* an edge carries exactly the columns needed in the subtree of its child;
* nested needs carry nothing idle: if of any two ranks of the leader's machine, or of one other machine, one needs all
  columns the other needs, only the leader and relays carry columns they do not need themselves; if the needs of any
  two machines are nested so, relays carry only what their own machine needs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_

Columns = frozenset[str]
Link = tuple[int, int]
"""(parent, child)"""


@dataclass(frozen=True)
class Member:
    """A rank of the group, the machine it runs on, and the columns it needs."""

    rank: int
    place: str
    columns: Columns


@dataclass(frozen=True)
class Edge:
    """``columns``: sent from parent to child."""

    parent: int
    child: int
    columns: Columns


@dataclass(frozen=True)
class Tree:
    """The edges of a group, the leader's first."""

    edges: tuple[Edge, ...]

    def incoming(self, rank: int) -> Edge | None:
        """The edge from the parent of ``rank``; None for the leader."""
        return next((edge for edge in self.edges if edge.child == rank), None)

    def outgoing(self, rank: int) -> tuple[Edge, ...]:
        """The edges from ``rank``, in the order they are served: other machines first, then the largest subtree."""
        return tuple(edge for edge in self.edges if edge.parent == rank)


def plan_tree(members: Sequence[Member]) -> Tree:
    """Plan the tree of a group; it does not depend on the order of the members."""
    needs = {member.rank: member.columns for member in members}
    assert sorted(needs) == list(range(len(members))), "expected the ranks 0, 1, 2 … of the group, each once"
    place_of = {member.rank: member.place for member in members}
    machines: dict[str, list[int]] = {}
    for rank in sorted(needs):
        machines.setdefault(place_of[rank], []).append(rank)
    relays = [min(ranks, key=lambda rank: (rank != 0, _neediest(needs, rank))) for ranks in machines.values()]
    union: Columns = frozenset()
    links = _span(relays, {relay: union.union(*(needs[r] for r in machines[place_of[relay]])) for relay in relays})
    for relay in relays:
        links += _span([relay, *(rank for rank in machines[place_of[relay]] if rank != relay)], needs)
    carried = _carried(links, needs)
    return Tree(tuple(Edge(parent, child, carried[child]) for parent, child in links))


def _span(nodes: Sequence[int], needs: Mapping[int, Columns]) -> list[Link]:
    """A binomial tree over ``nodes`` rooted at the first, over that of two orders which carries fewer idle columns."""
    root, *others = nodes
    others.sort(key=lambda node: _neediest(needs, node))
    like_root_first = sorted(others, key=lambda node: needs[node] != needs[root])
    trees = [_halve([root, *order], needs) for order in (others, like_root_first)]
    return min(trees, key=lambda links: _idle(links, needs))


def _halve(order: Sequence[int], needs: Mapping[int, Columns]) -> list[Link]:
    """Make the head of the far half a child of the first node, and recurse. Halves may be as uneven as the depth
    allows; the cut is where the far head carries the fewest idle columns, and of equal cuts next to the middle."""
    size = len(order)
    if size == 1:
        return []
    max_half = 1 << (size - 1).bit_length() - 1
    below = list(accumulate((needs[node] for node in reversed(order)), or_))[::-1]
    cuts = range(size - max_half, max_half + 1)
    cut = min(cuts, key=lambda cut: (len(below[cut] - needs[order[cut]]), abs(2 * cut - size)))
    near, far = order[:cut], order[cut:]
    return [(near[0], far[0]), *_halve(near, needs), *_halve(far, needs)]


def _carried(links: Iterable[Link], needs: Mapping[int, Columns]) -> dict[int, Columns]:
    """Columns needed in the subtree of each node."""
    carried = dict(needs)
    for parent, child in reversed(list(links)):
        carried[parent] = carried[parent] | carried[child]
    return carried


def _idle(links: Sequence[Link], needs: Mapping[int, Columns]) -> int:
    """Count columns that a child carries and does not need, over all links."""
    carried = _carried(links, needs)
    return sum(len(carried[child] - needs[child]) for _, child in links)


def _neediest(needs: Mapping[int, Columns], rank: int) -> tuple[int, list[str], int]:
    return -len(needs[rank]), sorted(needs[rank]), rank

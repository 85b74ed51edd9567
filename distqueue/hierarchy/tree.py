"""Who passes a batch on to whom in a group that reads once, and what that saves: pure.

    queue ─► leader ═════► relay ─┬─► rank ─► rank        ═ leads to another machine: one edge into each
                │ └─► rank        └─► rank
                ╚═══► relay ─► rank                       a rank's children in the order they are served

Both among the relays and on a machine the tree is binomial (every half has its head, and halves again), over members in
the order of their needs, so that who needs less sits below who needs more.

Invariants of `plan_tree`, for m machines:
* every rank but the leader, rank 0, is the child of one rank; edges are in an order in which parents come first;
* into every machine but the leader's leads one edge from another one: a byte crosses the slow link once a machine;
* from the leader to a rank there are at most ceil(log2 m) edges between machines and then, on a machine of c ranks, at
  most ceil(log2 c); nobody has more children than that;
* an edge carries exactly the columns that are needed in the subtree of its child;
* needs that contain one another carry nothing idle: where of any two of the leader's machine, or of one other machine,
  one needs all that the other does, only the leader and relays carry what they do not need themselves; where the needs
  of any two machines compare so, relays carry only what their own machine needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import or_
from typing import NamedTuple

Columns = frozenset[str]
Link = tuple[int, int]
"""(parent, child)"""


@dataclass(frozen=True)
class Member:
    """A rank of the group, the machine it is on, and the columns it needs."""

    rank: int
    place: str
    columns: Columns


@dataclass(frozen=True)
class Edge:
    """``columns``: what the parent passes on to the child. ``crosses``: they are on different machines."""

    parent: int
    child: int
    columns: Columns
    crosses: bool


@dataclass(frozen=True)
class Tree:
    """The edges of a group, the leader's first; invariants above."""

    edges: tuple[Edge, ...]

    def incoming(self, rank: int) -> Edge | None:
        """The edge that brings ``rank`` its columns; None for the leader."""
        return next((edge for edge in self.edges if edge.child == rank), None)

    def outgoing(self, rank: int) -> tuple[Edge, ...]:
        """In the order in which ``rank`` serves them: other machines first, then the largest subtree."""
        return tuple(edge for edge in self.edges if edge.parent == rank)


def plan_tree(members: Sequence[Member]) -> Tree:
    """The tree of a group (invariants above), the same whatever order the members are given in."""
    needs = {member.rank: member.columns for member in members}
    assert sorted(needs) == list(range(len(members))), "members of a group are the ranks 0, 1, 2 …, each once"
    place_of = {member.rank: member.place for member in members}
    machines: dict[str, list[int]] = {}
    for rank in sorted(needs):
        machines.setdefault(place_of[rank], []).append(rank)
    relays = [min(ranks, key=lambda rank: (rank != 0, _neediest(needs, rank))) for ranks in machines.values()]
    links = _span(relays, {relay: _union(needs[r] for r in machines[place_of[relay]]) for relay in relays})
    for relay in relays:
        links += _span([relay, *(rank for rank in machines[place_of[relay]] if rank != relay)], needs)
    carried = _carried(links, needs)
    return Tree(tuple(Edge(up, down, carried[down], place_of[up] != place_of[down]) for up, down in links))


class Reads(NamedTuple):
    """What a group asks of the queue for one batch."""

    requests: int
    nbytes: int


def flat_reads(members: Sequence[Member], nbytes: Mapping[str, int]) -> Reads:
    """Every rank asks for itself, for the columns it needs; one that needs lengths alone costs a request and no bytes.

    ``nbytes``: of each column of the batch.
    """
    return Reads(len(members), sum(nbytes[name] for member in members for name in member.columns))


def leader_reads(members: Sequence[Member], nbytes: Mapping[str, int]) -> Reads:
    """The leader asks once, for what any rank needs."""
    return Reads(1, sum(nbytes[name] for name in _union(member.columns for member in members)))


def requests(ranks: int, group: int) -> tuple[int, int]:
    """Requests for one batch of every replica, (each rank for itself, one leader a replica of ``group`` ranks)."""
    if group < 1 or ranks % group:
        raise ValueError(f"{ranks} ranks in groups of {group}: expected groups that divide them")
    return ranks, ranks // group


def _span(nodes: Sequence[int], needs: Mapping[int, Columns]) -> list[Link]:
    """A binomial tree over ``nodes`` rooted at the first: of two orders the one in which less is carried in vain."""
    root, *others = nodes
    others.sort(key=lambda node: _neediest(needs, node))
    like_root_first = sorted(others, key=lambda node: needs[node] != needs[root])
    trees = [_halve([root, *order], needs) for order in (others, like_root_first)]
    return min(trees, key=lambda links: _idle(links, needs))


def _halve(order: Sequence[int], needs: Mapping[int, Columns]) -> list[Link]:
    """The head of the far half is a child of the first. Halves may be as uneven as the depth allows, and are cut where
    the far head carries least that it does not need itself, next to the middle where that is all the same."""
    size = len(order)
    if size == 1:
        return []
    most = 1 << (size - 1).bit_length() - 1
    below = list(accumulate((needs[node] for node in reversed(order)), or_))[::-1]
    cuts = range(size - most, most + 1)
    cut = min(cuts, key=lambda cut: (len(below[cut] - needs[order[cut]]), abs(2 * cut - size)))
    near, far = order[:cut], order[cut:]
    return [(near[0], far[0]), *_halve(near, needs), *_halve(far, needs)]


def _carried(links: Iterable[Link], needs: Mapping[int, Columns]) -> dict[int, Columns]:
    """The columns needed in the subtree of each node."""
    carried = dict(needs)
    for parent, child in reversed(list(links)):
        carried[parent] = carried[parent] | carried[child]
    return carried


def _idle(links: Sequence[Link], needs: Mapping[int, Columns]) -> int:
    """Columns that a child carries and does not need, over all links."""
    carried = _carried(links, needs)
    return sum(len(carried[child] - needs[child]) for _, child in links)


def _neediest(needs: Mapping[int, Columns], rank: int) -> tuple[int, list[str], int]:
    return -len(needs[rank]), sorted(needs[rank]), rank


def _union(columns: Iterable[Columns]) -> Columns:
    return frozenset[str]().union(*columns)

"""Choose the senders: every rank receives each missing fragment once, over as few slow links as possible.

    holder ──slow──► one of a group that needs it ──fast──► the others of the group

Links have the speed of their class (`Topology.classes`); class c connects groups of ranks that faster links connect. A
rank receives a fragment from a holder that it reaches by the fastest possible class. A group without a holder receives
each element once; the receiving member forwards it. Forwarding is balanced over the members.

Pure. Invariants, in this order:
1. An element that a rank holds in the source layout is copied there; every other element of its target is received
   exactly once.
2. Over the links of a class, each element enters a group connected by faster links at most once, and never if a member
   of the group holds it in the source layout.
3. In each class the busiest sender sends at most 1.1 times the fractional optimum: the minimum, over all divisions of
   the elements to be sent over this class among their possible senders, of the maximum load. (With three or more
   classes, the slower ones determine the receiving members; a faster one balances what remains.)
"""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np

from fusion.ep_switch.balance import Deal, Ranks, shares
from fusion.ep_switch.fragments import CutFamily, Fragment, Slab
from fusion.ep_switch.hops import Hop, Hops, Units, legal_stop
from fusion.ep_switch.moves import UnitId
from fusion.ep_switch.topology import Topology

BUSIEST = 1.08
"""Ratio of the busiest sender's load to the optimum above which fragments are cut finer."""

GRAINS = (float("inf"), 1 / 4, 1 / 16, 1 / 64, 1 / 512)
"""Fractions of the busiest sender's load above which a fragment is split among senders, in the order tried; at first
none is split."""

COPY = -1
"""The class of a rank's link to itself."""


class Action(NamedTuple):
    """Describe a transfer over links of class ``speed``: one of ``have`` sends to one of ``need``, which forwards to
    the others of ``need``."""

    speed: int
    have: Ranks
    need: Ranks


def choose_senders(families: list[CutFamily], units: tuple[Units, Units], topology: Topology, ranks: Ranks) -> Hops:
    """Return the hops that fill all families.
    ``units``: of the source and of the target.
    ``ranks``: all participating ranks."""
    ways = _Ways(topology, ranks)
    work = [[(fragment, ways.of(fragment, family)) for fragment in family.cut.fragments] for family in families]
    demands = ways.demands((fragment.numel, way.actions) for of_family in work for fragment, way in of_family)
    parts, optimum = zip(*map(shares, demands), strict=True)
    for grain in GRAINS:
        deals = [Deal(part, grain * best if best else 1.0) for part, best in zip(parts, optimum, strict=True)]
        delivery = _Delivery(ways, deals, units)
        for number, of_family in enumerate(work):
            for index, (fragment, way) in enumerate(of_family):
                delivery.run((number, index), families[number].slabs, fragment, way)
        if all(max(deal.load.values(), default=0.0) <= BUSIEST * b for deal, b in zip(deals, optimum, strict=True)):
            break
    return Hops(np.frombuffer(delivery.rows, np.int64).reshape(-1, len(Hop._fields)), families, units)


class Way(NamedTuple):
    """Describe how a fragment is distributed. ``givers``, ``takers``: rank → index in the fragment's list of places,
    and that of the rank's group in the slab."""

    givers: dict[int, tuple[int, int]]
    takers: dict[int, tuple[int, int]]
    actions: tuple[Action, ...]


class _Ways:
    """Compute how fragments are distributed, by the ranks that hold and need them."""

    def __init__(self, topology: Topology, ranks: Ranks):
        self.levels: list[dict[int, int]] = []
        """Class of links → rank → number of its group, connected by links of this class or faster."""
        for speed in range(len(topology.classes)):
            numbers: dict[int, int] = {}
            level = {rank: numbers.setdefault(topology.group(rank, speed), len(numbers)) for rank in ranks}
            if not self.levels or level != self.levels[-1]:
                self.levels.append(level)
        self._ways: dict[tuple[object, ...], Way] = {}
        self._partings: dict[Ranks, tuple[int, list[Ranks]]] = {}

    def of(self, fragment: Fragment, family: CutFamily) -> Way:
        """Return the distribution of a fragment to all ranks that need it; ranks that hold it copy it first."""
        have, need = ([family.slabs[place.unit] for place in places] for places in (fragment.givers, fragment.takers))
        apart = tuple([id(slab) for slab in need]) if family.hosted else ()
        key = tuple([slab.groups for slab in have]), tuple([slab.groups for slab in need]), apart
        if key not in self._ways:
            givers, takers = _first_places(have, frozenset()), _first_places(need, family.hosted)
            copies = [Action(COPY, (rank,), (rank,)) for rank in takers if rank in givers]
            lacking = tuple(rank for rank in takers if rank not in givers)
            actions = (*copies, *self._reach(tuple(givers), lacking, len(self.levels) - 1))
            self._ways[key] = Way(givers, takers, actions)
        return self._ways[key]

    def _reach(self, have: Ranks, need: Ranks, speed: int) -> Iterator[Action]:
        if speed == 0:
            yield from (Action(0, have, (rank,)) for rank in need)
            return
        level = self.levels[speed - 1]
        for inside in self._split(need, speed):
            near = tuple(rank for rank in have if level[rank] == level[inside[0]])
            if near:
                yield from self._reach(near, inside, speed - 1)
            else:
                yield Action(speed, have, inside)

    def _split(self, ranks: Ranks, speed: int) -> list[Ranks]:
        """Split ranks into the groups that links of a class connect."""
        if speed == 0:
            return [(rank,) for rank in ranks]
        groups: dict[int, list[int]] = defaultdict(list)
        for rank in ranks:
            groups[self.levels[speed - 1][rank]].append(rank)
        return [tuple(group) for group in groups.values()]

    def parting(self, ranks: Ranks) -> tuple[int, list[Ranks]]:
        """Return the slowest class that ranks need among themselves, and the groups of them that it connects."""
        if ranks not in self._partings:
            speeds = range(len(self.levels) - 1, -1, -1)
            self._partings[ranks] = next((c, groups) for c in speeds if len(groups := self._split(ranks, c)) > 1)
        return self._partings[ranks]

    def demands(self, work: Iterable[tuple[int, tuple[Action, ...]]]) -> list[dict[Ranks, float]]:
        """Return, by class, the total number of elements by set of possible senders."""
        totals: dict[tuple[Action, ...], int] = defaultdict(int)
        for numel, actions in work:
            totals[actions] += numel
        demands: list[dict[Ranks, float]] = [defaultdict(float) for _ in self.levels]
        for actions, numel in totals.items():
            for speed, have, need in actions:
                if speed != COPY:
                    demands[speed][have] += numel
                    self._add_forwarded(demands, need, numel)
        return demands

    def _add_forwarded(self, demands: list[dict[Ranks, float]], ranks: Ranks, numel: int) -> None:
        """Add the elements that ``ranks`` forward among themselves."""
        if len(ranks) > 1:
            speed, groups = self.parting(ranks)
            demands[speed][ranks] += numel * (len(groups) - 1)
            for group in groups:
                self._add_forwarded(demands, group, numel)


def _first_places(slabs: list[Slab], without: frozenset[UnitId]) -> dict[int, tuple[int, int]]:
    """Map every rank that owns one of the slabs, ascending, to the index of its first slab, and of its group there."""
    first: dict[int, tuple[int, int]] = {}
    for at, slab in enumerate(slabs):
        for group, (ranks, index) in enumerate(zip(slab.groups, slab.indices, strict=True)):
            for rank in ranks:
                if rank not in first and (rank, index) not in without:
                    first[rank] = at, group
    return dict(sorted(first.items()))


class _Delivery:
    """Distribute fragments, one after the other, to all ranks that need them; ``rows``: the hops."""

    def __init__(self, ways: _Ways, deals: list[Deal], units: tuple[Units, Units]):
        self.ways, self.deals, self.first = ways, deals, [of_side.first for of_side in units]
        self.rows = array("q")

    def run(self, number: tuple[int, int], slabs: list[Slab], fragment: Fragment, way: Way) -> None:
        self.number, self.slabs, self.fragment, self.way = number, slabs, fragment, way
        numel = fragment.numel
        for speed, have, need in way.actions:
            if speed == COPY:
                self._send(have[0], have[0], start=0, stop=numel)
                continue
            for entry, start, stop in self._take_in(need, 0, numel):
                for sender, first, last in self._deal(speed, have, start=start, stop=stop, times=1):
                    self._send(sender, entry, start=first, stop=last)
                if len(need) > 1:
                    self._forward(need, entry, start=start, stop=stop)

    def _send(self, sender: int, receiver: int, *, start: int, stop: int, relayed: bool = False) -> None:
        _, _, givers, takers = self.fragment
        giver, of_giver = (self.way.takers if relayed else self.way.givers)[sender]
        taker, of_taker = self.way.takers[receiver]
        source, target = self.slabs[(takers if relayed else givers)[giver].unit], self.slabs[takers[taker].unit]
        reads = self.first[relayed][sender] + source.indices[of_giver]
        writes = self.first[1][receiver] + target.indices[of_taker]
        self.rows.extend((*self.number, giver, taker, relayed, sender, receiver, start, stop, reads, writes))

    def _take_in(self, need: Ranks, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Assign the elements that a group receives from outside to its members, which forward them to the others."""
        if len(need) == 1:
            return iter([(need[0], start, stop)])
        speed, groups = self.ways.parting(need)
        return self._deal(speed, need, start=start, stop=stop, times=len(groups) - 1)

    def _forward(self, need: Ranks, holder: int, *, start: int, stop: int) -> None:
        """Forward elements from ``holder``, a member of ``need``, to all others of ``need``."""
        _, groups = self.ways.parting(need)
        for group in groups:
            if holder not in group:
                for entry, first, last in self._take_in(group, start, stop):
                    self._send(holder, entry, start=first, stop=last, relayed=True)
                    if len(group) > 1:
                        self._forward(group, entry, start=first, stop=last)
            elif len(group) > 1:
                speed, parts = self.ways.parting(group)
                self.deals[speed].charge(group, holder, (stop - start) * (len(parts) - 1))
                self._forward(group, holder, start=start, stop=stop)

    def _deal(self, speed: int, ranks: Ranks, *, start: int, stop: int, times: int) -> Iterator[tuple[int, int, int]]:
        """Divide elements among ranks, each of which sends its share ``times`` times."""
        deal = self.deals[speed]
        portions = deal.take(ranks, (stop - start) * times)
        for index, (rank, amount) in enumerate(portions, start=1):
            due = stop if index == len(portions) else min(stop, start + round(amount / times))
            while start < due:
                end = stop if due == stop else legal_stop(self.fragment, start, due)
                deal.charge(ranks, rank, (end - start) * times)
                yield rank, start, end
                start = end
                if due - end < deal.grain:  # not worth a piece of a row
                    break

"""Compute the bytes that every die sends and receives in a switch: exact, vectorised over hundreds of dies.

The model is divided into segments (`fusion.costmodel.segments`). Bytes are linear in them, so their sums approximate
nothing.

The rules are those of the switch plan (`fusion.ep_switch.plan`):
1. bytes that a die holds already are not sent; every other byte arrives once on every die that needs it;
2. over a slower class of links (`Topology.classes`) a segment enters a group of faster links once, and is forwarded
   inside it;
3. senders are balanced: all holders of a segment share sending it, as do the dies that receive it for their group.

    share of a segment that a die receives from outside its group: 1 / (dies of the group that need it) where no die of
    the group holds it, else 0; the bytes over a class of links are the difference between two neighbouring groups.
"""

from dataclasses import dataclass

import numpy as np

from fusion.costmodel.segments import Array, Side, groups, segments
from fusion.costmodel.shape import Shape
from fusion.ep_switch.topology import LEVELS, Topology

BALANCE_ROUNDS = 12


@dataclass(frozen=True)
class Traffic:
    """Bytes by level of the link (rows, in the order of LEVELS) and die. ``kept``: bytes a die holds in both layouts;
    ``copied``: those of them that move to other storage, copied inside the die."""

    sent: Array
    received: Array
    kept: Array
    copied: Array

    def times(self, share: float) -> "Traffic":
        """Return the bytes where a ``share`` of all tensors alike is moved."""
        return Traffic(*(share * nbytes for nbytes in (self.sent, self.received, self.kept, self.copied)))

    @property
    def total(self) -> float:
        return float(self.received.sum())


def switch_traffic(shape: Shape, source: Side, target: Side, topology: Topology, itemsize: int = 2) -> Traffic:
    """Compute the bytes of a switch from one layout to another; ``itemsize``: bytes of an element on the wire."""
    dies = max(source.end, target.end)
    ledger = _Ledger(dies, topology)
    for group, numel in groups(shape, source.parallel, target.parallel).items():
        width, hold, need = segments(group, source, target=target, dies=dies)
        ledger.add(numel * itemsize * width, hold, need, same_storage=group.tensors.same_storage)
    return ledger.close()


@dataclass(frozen=True)
class _Choice:
    """Segments that several dies can send over the links of one class.

    ``dies``, ``group``: the holders and the group of fast links of each [holders]. ``hold``: who holds which segment
    [G, holders]. ``due``: level → bytes to send to the dies that share this level with the holder, and no inner one
    [G, holders]. ``arriving``: bytes of each segment that the dies ``needers`` receive from holders [G, needers]."""

    dies: Array
    group: Array
    hold: Array
    due: dict[int, Array]
    arriving: Array
    needers: Array

    def offered(self, weight: Array) -> Array:
        """Return the weights of the holders, by segment [G, holders]."""
        return self.hold * weight[self.dies]


class _Ledger:
    """Sum the bytes of segments. The holders of a segment share its sending by a weight per die; `close` balances the
    weights."""

    def __init__(self, dies: int, topology: Topology):
        sizes = topology.ranks_per_card, topology.ranks_per_node, topology.ranks_per_supernode, dies
        self.domain = [np.arange(dies) // size for size in sizes]
        """Level → index of the card, node, … of every die."""
        self.classes = topology.classes
        self.received, self.forwarded = np.zeros((len(LEVELS), dies)), np.zeros((len(LEVELS), dies))
        self.kept, self.copied = np.zeros(dies), np.zeros(dies)
        self.choices: list[_Choice] = []

    def add(self, nbytes: Array, hold: Array, need: Array, same_storage: bool) -> None:
        """Add segments: their ``nbytes`` [G], and who holds and needs them [G, dies]."""
        both = nbytes @ (hold & need)
        self.kept += both
        self.copied += 0 if same_storage else both
        lacking = need & ~hold
        rows = lacking.any(1)
        hold, lacking = hold[rows], lacking[rows]
        assert bool(hold.any(1).all()), "no die holds a segment that is needed"
        if len(hold):
            h, n = np.flatnonzero(hold.any(0)), np.flatnonzero(lacking.any(0))
            self._spread(nbytes[rows, None], hold[:, h].astype(float), h, lacking=lacking[:, n].astype(float), n=n)

    def _spread(self, nbytes: Array, hold: Array, h: Array, lacking: Array, n: Array) -> None:
        """Distribute segments from the fastest links outwards; ``h`` and ``n``: the dies of the columns of ``hold``
        and ``lacking``.

        ``outside``: share of a segment that comes from outside the groups handled so far; ``inner``: the dies of these
        groups that need it."""
        outside, inner = lacking, lacking
        for levels in self.classes:
            group = self.domain[levels[-1]]
            holders = _sum_at(hold, group[h], group[n])
            alone = (holders == 0) & (lacking > 0)
            needers = _sum_at(lacking, group[n], group[n]) if alone.any() else inner
            entry = np.where(alone, 1 / np.maximum(needers, 1), 0.0)
            arriving = (outside - entry) * nbytes
            if alone.any():
                got: Array | float = 0.0
                for level in levels:
                    near = self.domain[level]
                    mates = (_sum_at(lacking, near[n], near[n]) - inner) / np.maximum(needers - inner, 1)
                    self.received[level, n] += np.where(holders > 0, 0.0, arriving * (mates - got)).sum(0)
                    got = mates
                self._forward(levels, taken_in=entry * nbytes, outside=outside, n=n)
            self._offer(levels, np.where(holders > 0, arriving, 0.0), n, hold=hold, h=h)
            if not alone.any():
                return
            outside, inner = entry, needers

    def _forward(self, levels: tuple[int, ...], taken_in: Array, outside: Array, n: Array) -> None:
        """Count what dies that receive a share for their group forward to the other inner groups that lack it."""
        before: Array | float = 1.0
        for level in levels:
            near = self.domain[level]
            groups = _sum_at(outside, near[n], near[n])
            self.forwarded[level, n] += (taken_in * (groups - before)).sum(0)
            before = groups

    def _offer(self, levels: tuple[int, ...], due: Array, n: Array, hold: Array, h: Array) -> None:
        if not due.any():
            return
        due_by_level: dict[int, Array] = {}
        before: Array | float = 0.0
        for level in levels:
            near = self.domain[level]
            total = _sum_at(due, near[n], near[h])
            due_by_level[level], before = total - before, total
        group = self.domain[levels[-1]][h]
        self.choices.append(_Choice(h, group, hold, due=due_by_level, arriving=due, needers=n))

    def close(self) -> Traffic:
        weight = balanced = np.ones(self.received.shape[1])
        sent = self._sent(weight)
        for _ in range(BALANCE_ROUNDS):
            load = sent.sum(0)
            mean = load[load > 0].mean() if load.any() else 0.0
            if load.max() <= 1.01 * mean:
                break
            weight = weight * np.clip(mean / np.maximum(load, mean / 16), 0.25, 4.0) ** 0.5
            other = self._sent(weight)
            if other.sum(0).max() > 0.995 * load.max():
                break
            sent, balanced = other, weight
        return Traffic(sent=sent, received=self._received(balanced), kept=self.kept, copied=self.copied)

    def _sent(self, weight: Array) -> Array:
        sent = self.forwarded.copy()
        for choice in self.choices:
            offered = choice.offered(weight)
            each = offered / np.maximum(_sum_at(offered, choice.group, choice.group), 1e-30)
            for level, due in choice.due.items():
                sent[level, choice.dies] += (each * due).sum(0)
        return sent

    def _received(self, weight: Array) -> Array:
        received = self.received.copy()
        for choice in self.choices:
            offered, (*inner, outer) = choice.offered(weight), choice.due
            group = self.domain[outer]
            total = np.maximum(_sum_at(offered, choice.group, group[choice.needers]), 1e-30)
            got: Array | float = 0.0
            for level in inner:
                near = self.domain[level]
                within = _sum_at(offered, near[choice.dies], near[choice.needers]) / total
                received[level, choice.needers] += (choice.arriving * (within - got)).sum(0)
                got = within
            received[outer, choice.needers] += (choice.arriving * (1.0 - got)).sum(0)
        return received


def _sum_at(values: Array, groups: Array, at: Array) -> Array:
    """Sum ``values`` [G, n] over the columns of each group (``groups`` [n], ascending) and look up the groups ``at``
    [k]: [G, k], 0 for a group without columns."""
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    sums, ids = np.add.reduceat(values, starts, axis=1), groups[starts]
    place = np.minimum(np.searchsorted(ids, at), len(ids) - 1)
    looked_up, known = sums.take(place, axis=1), ids[place] == at
    if not known.all():
        looked_up *= known
    return looked_up

"""Computes the bytes that every die sends and receives in a switch: exact, vectorised over hundreds of dies.

Layers in the same pair of pipeline stages move alike, and so do all tensors with the same cut: their bytes are summed
first. This leaves a few segments (ranges of a cut dimension that neither layout divides), each with two rows over the
dies: who holds it before, who needs it after. Bytes are linear in the segments, so the sums approximate nothing.

The rules are those of the switch plan (`fusion.ep_switch.plan`):
1. bytes that a die holds already are not sent; every other byte arrives once on every die that needs it;
2. over a slower class of links (`Topology.classes`) a segment enters a group of faster links once, and is forwarded
   inside it;
3. senders are balanced: all holders of a segment share sending it, as do the dies that receive it for their group.

    share of a segment that a die receives from outside its group: 1 / (dies of the group that need it) where no die of
    the group holds it, else 0; the bytes over a class of links are the difference between two neighbouring groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import lcm

import numpy as np

from fusion.costmodel.shape import Cut, Shape, share
from fusion.ep_switch.topology import LEVELS, Topology
from fusion.model import Parallel

Array = np.ndarray
BALANCE_ROUNDS = 12


@dataclass(frozen=True)
class Side:
    """One end of a switch: a layout on the dies ``first``, ``first`` + 1, …"""

    parallel: Parallel
    first: int = 0

    @property
    def end(self) -> int:
        return self.first + self.parallel.world


@dataclass(frozen=True)
class Traffic:
    """Bytes by level of the link (rows, in the order of LEVELS) and die. ``kept``: bytes a die holds in both layouts;
    ``copied``: those of them that move to other storage, copied inside the die."""

    sent: Array
    received: Array
    kept: Array
    copied: Array

    @property
    def total(self) -> float:
        return float(self.received.sum())


@dataclass(frozen=True)
class _Group:
    """Tensors with the same cut, in the same stages of both layouts."""

    cut: Cut
    nbytes: int
    source_stages: tuple[int, ...]
    target_stages: tuple[int, ...]


def switch_traffic(shape: Shape, source: Side, target: Side, topology: Topology, itemsize: int = 2) -> Traffic:
    """Computes the bytes of a switch from one layout to another; ``itemsize``: bytes of an element on the wire."""
    dies = max(source.end, target.end)
    ledger = _Ledger(dies, topology)
    for group in _groups(shape, source.parallel, target.parallel, itemsize=itemsize):
        width, hold, need = _segments(shape, group, source, target=target, dies=dies)
        same_storage = _same_storage(group.cut, source.parallel, target.parallel)
        ledger.add(group.nbytes * width, hold, need, same_storage=same_storage)
    return ledger.close()


def _groups(shape: Shape, source: Parallel, target: Parallel, itemsize: int) -> Iterator[_Group]:
    count = len(shape.layers)
    stage_of = [
        {layer: stage for stage in range(side.pp) for layer in side.layers(count, stage)} for side in (source, target)
    ]
    nbytes: Counter[tuple[int, int, Cut]] = Counter()
    for index, layer in enumerate(shape.layers):
        for cut, numel in layer.numel.items():
            nbytes[stage_of[0][index], stage_of[1][index], cut] += numel * itemsize
    for (s, t, cut), size in nbytes.items():
        if size:
            yield _Group(cut, size, (s,), target_stages=(t,))
    last = source.pp - 1, target.pp - 1
    ends = [(0, last[i]) if shape.tied else (0,) for i in range(2)]
    yield _Group(shape.embed.cut, shape.embed.numel * itemsize, *(tuple(sorted(set(end))) for end in ends))
    for tensor in shape.head:
        yield _Group(tensor.cut, tensor.numel * itemsize, (last[0],), target_stages=(last[1],))


def _segments(shape: Shape, group: _Group, source: Side, target: Side, dies: int) -> tuple[Array, Array, Array]:
    """(share of the group's bytes [G], who holds it [G, dies], who needs it [G, dies]) of every segment."""
    grids = (source.parallel, target.parallel)
    pieces = [_Axis(*_slicing(shape, group.cut, axis, grids=grids)) for axis in _axes(group.cut)]
    width = np.ones(1)
    for piece in pieces:
        width = np.outer(width, piece.width).ravel()
    rows = []
    for i, (side, stages) in enumerate(((source, group.source_stages), (target, group.target_stages))):
        row = np.zeros((len(width), dies), dtype=bool)
        place = np.arange(side.parallel.world)
        here = np.isin(_coordinates(side.parallel, "pp", place), stages)
        held = np.ones((1, len(place)), dtype=bool)
        for piece, axis in zip(pieces, _axes(group.cut), strict=True):
            along_axis = piece.held[i][:, _coordinates(side.parallel, axis, place)]
            held = (held[:, None, :] & along_axis[None, :, :]).reshape(-1, len(place))
        row[:, side.first : side.end] = held & here
        rows.append(row)
    return width, rows[0], rows[1]


def _coordinates(parallel: Parallel, axis: str, place: Array) -> Array:
    """`Parallel.coordinate` of many ranks at once, as it is arithmetic only."""
    return parallel.coordinate(axis, place)  # type: ignore[arg-type, return-value]


def _axes(cut: Cut) -> tuple[str, ...]:
    return {"whole": (), "tp": ("tp",), "kv": ("tp",), "expert": ("ep", "etp")}[cut]


@dataclass(frozen=True)
class _Axis:
    """The segments of a cut dimension: share of the dimension [G]; per side, who holds which [G, ranks]."""

    width: Array
    held: tuple[Array, Array]


def _slicing(shape: Shape, cut: Cut, axis: str, grids: tuple[Parallel, Parallel]) -> tuple[Array, tuple[Array, Array]]:
    units = shape.kv_heads if cut == "kv" else 0
    shares = [[share(i, getattr(g, axis), units) for i in range(getattr(g, axis))] for g in grids]
    of = lcm(*(part[2] for side in shares for part in side))
    spans = [np.array([(a * of // n, b * of // n) for a, b, n in side]) for side in shares]
    edges = np.unique(np.concatenate([span.ravel() for span in spans]))
    start, stop = edges[:-1], edges[1:]
    held = [(span[:, 0] <= start[:, None]) & (stop[:, None] <= span[:, 1]) for span in spans]
    return (stop - start) / of, (held[0], held[1])


def _same_storage(cut: Cut, source: Parallel, target: Parallel) -> bool:
    """Whether a segment that a die keeps stays in its storage unit, so that nothing is copied."""
    if cut == "whole":
        return True
    return source.etp == target.etp if cut == "expert" else source.tp == target.tp


@dataclass(frozen=True)
class _Choice:
    """Segments that several dies can send over the links of one class.

    ``dies``, ``group``: the holders and the group of fast links of each [holders]. ``hold``: who holds which segment
    [G, holders]. ``due``: level → bytes to send to the dies that share this level with the holder, and no inner one
    [G, holders]. ``arriving``: bytes of each segment that the dies ``needers`` receive from holders [G, needers].
    """

    dies: Array
    group: Array
    hold: Array
    due: dict[int, Array]
    arriving: Array
    needers: Array

    def offered(self, weight: Array) -> Array:
        """Returns the weights of the holders, by segment [G, holders]."""
        return self.hold * weight[self.dies]


class _Ledger:
    """Sums the bytes of segments. The holders of a segment share its sending by a weight per die; `close` balances the
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
        """``nbytes`` [G] of each segment; ``hold`` and ``need`` [G, dies]."""
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
        """Distributes segments from the fastest links outwards; ``h`` and ``n``: the dies of the columns of ``hold``
        and ``lacking``.

        ``outside``: share of a segment that comes from outside the groups handled so far; ``inner``: the dies of these
        groups that need it.
        """
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
        """Counts what dies that receive a share for their group forward to the other inner groups that lack it."""
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
    """Sums ``values`` [G, n] over the columns of each group (``groups`` [n], ascending) and looks up the groups ``at``
    [k]: [G, k], 0 for a group without columns."""
    starts = np.flatnonzero(np.r_[True, groups[1:] != groups[:-1]])
    sums, ids = np.add.reduceat(values, starts, axis=1), groups[starts]
    place = np.minimum(np.searchsorted(ids, at), len(ids) - 1)
    looked_up, known = sums.take(place, axis=1), ids[place] == at
    if not known.all():
        looked_up *= known
    return looked_up

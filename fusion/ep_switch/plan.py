"""Plan the moves between two layouts, their order, and the allocation and release of storage.

    units of both layouts ─► fragments ─► senders ─► order ─► rounds ─► Plan
                             possible    chosen      of       moves of bounded size,
                             senders     senders     slabs    with allocation and release

Pure: no device, no process. The memory figures assume this execution, with two rounds in flight: for each round k in
order a rank releases the units last read in round k-2, allocates its units, copies what stays on the rank and sends;
only then it unpacks what it received in round k-1. Send and receive buffers, where the exchange has any, therefore have
two slots each, a slot has the size of the rank's largest round, and a relayed move is at least two rounds after the one
that delivered its elements.

Invariants, in this order:
1. Every element of every unit of the target that is neither shared nor hosted is written exactly once, with the element
   of the same global index. What the rank holds in the source layout is not sent (it is copied; a shared unit not even
   that); every other element is received once.
2. Over links of a class each element enters a group of ranks connected by faster links at most once, and never if a
   member holds it; it is forwarded inside the group (`senders`).
3. The busiest sender over each class of links sends at most 1.1 times the fractional optimum (`senders`).
4. On every rank, at all times, weights + send, receive and staging buffers ≤ `Plan.bound_bytes`: max(A, B) + SLACK
   buckets (with ``keep``: A + B minus shared units) + the largest external unit. A unit is external if its format does
   not cut tensors to fit units: it is allocated as a whole. The stacks of a layer's experts are one such unit. (Without
   one, no unit may be larger than a bucket.) An order that keeps it is searched for. Where none is found, the units of
   the source are parked in host memory and restored one by one (`pack_through_host`), which keeps it by construction.
   In a round no rank sends more than half of ``bucket_bytes``, nor writes more than that (received and copied), in
   bytes of the wider dtype.
5. Each source unit that is not shared is released once, after its last read: before the first round if no rank reads
   it, else after the last round that reads it; with ``keep`` none is released. One that is parked is also released
   before the first round, and restored once, before it is read. Each target unit that is not shared is allocated once,
   before it is written. A relayed move reads elements that arrived at least two rounds before.
6. The plan is a function of its arguments: equal on every rank and in every process."""

import gc
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain

import numpy as np
import torch

from fusion.ep_switch.demands import demands_of
from fusion.ep_switch.fragments import CutFamily, families, slabs_of
from fusion.ep_switch.hops import Hops, Units
from fusion.ep_switch.layout import Layout
from fusion.ep_switch.moves import Round, UnitId, united, units_of
from fusion.ep_switch.order import Method, Storage, fill_order
from fusion.ep_switch.rounds import IN_FLIGHT, pack_rounds, pack_through_host
from fusion.ep_switch.senders import choose_senders
from fusion.ep_switch.topology import LEVELS, Topology

SLACK = 4
"""Buckets that a rank may hold beyond max(A, B): units of both layouts, send and receive buffers."""

TRIES: tuple[tuple[float, int, Method], ...] = (
    (2.5, 2, "slabs"),
    (3.0, 2, "slabs"),
    (3.0, 4, "slabs"),
    (3.5, 4, "slabs"),
    (SLACK, 4, "slabs"),
    (SLACK, 8, "slabs"),
    (SLACK, 16, "slabs"),
    (SLACK, 16, "clusters"),
    *((SLACK, 16, weighting) for weighting in range(9)),
)
"""(buckets beyond max(A, B), slots of a send or receive buffer per bucket, method of the order), tried until one is
found. The rest of SLACK is left for the allocator's rounding and fragmentation. Smaller slots leave more room for
weights, but need more rounds."""

SMALLEST_SLOT = max(slots for _, slots, _ in TRIES)
"""Slots per bucket where weights have most room"""

SLOTS_OF_PARKED = 4
"""Slots per bucket where the source is parked: buffers of a bucket and a unit of at most one are within SLACK"""

STAGING = 16
"""Staging buffers per bucket: a rank that fills units from its host has one staging buffer (`fill`)."""

Shared = tuple[tuple[int, int, int], ...]
"""(rank, unit of the target, unit of the source) with common storage."""


@dataclass(frozen=True)
class Plan:
    """The moves of a switch in order.
    ``keep``: the source stays resident (separate cards for training and generation); none of its units is released.
    ``hosted``: units of the target that are allocated in order, but filled from the host instead of by moves.
    ``shared``: units of both layouts with common storage.
    ``unread``: units of the source that no rank reads, released before the first round.
    ``digest``: hash of the arguments in 63 bits, which ranks compare before they start.
    ``relays``, ``parks``: whether any rank forwards what it received, so that others read its target while it is being
    filled; whether any has units of the source that wait in host memory.
    ``rank``: the only rank whose moves and units it has (`host_plan`); None: all.
    ``unites``: number of rounds that `in_place` unites; 0: not yet determined."""

    source: Layout
    target: Layout
    bucket_bytes: int
    topology: Topology
    keep: bool
    hosted: tuple[UnitId, ...] = field(hash=False)
    shared: Shared = field(hash=False, repr=False)
    unread: tuple[UnitId, ...] = field(hash=False, repr=False)
    rounds: tuple[Round, ...] = field(hash=False, repr=False)
    digest: int
    relays: bool
    parks: bool
    rank: int | None = None
    unites: int = 0

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that take part."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @cached_property
    def wire_dtype(self) -> torch.dtype:
        """The narrower dtype of the two layouts: values are converted before they are sent, or after."""
        return min(self.target.dtype, self.source.dtype, key=lambda dtype: dtype.itemsize)

    @cached_property
    def parked(self) -> tuple[UnitId, ...]:
        """Units of the source that wait in host memory until the round before which they are restored."""
        return tuple(unit for round_ in self.rounds for unit in round_.restore_before)

    @property
    def sends_card_values(self) -> bool:
        """Whether a rank of the target has none of the values apart from the units: all ranks then broadcast them."""
        return self.source.card_numel > 0 and not {*self.target.ranks} <= {*self.source.ranks}

    def shared_units(self, rank: int) -> dict[int, int]:
        """Map units of the target to the unit of the source with common storage on a rank."""
        return {target: source for owner, target, source in self.shared if owner == rank}

    def wire_bytes(self, rank: int) -> tuple[int, int]:
        """Return the bytes of a rank's (send, receive) buffers, two slots each, of the size of its largest round."""
        send, receive = self._slots
        return 2 * send.get(rank, 0), 2 * receive.get(rank, 0)

    def staging_bytes(self, rank: int) -> int:
        """Return the bytes of the float32 buffer through which a rank's hosted units are filled; at most one unit."""
        largest = max((self.target.units(rank)[unit].numel for unit in self.hosted_units(rank)), default=0)
        return min(self.bucket_bytes // STAGING, largest * torch.float32.itemsize)

    def hosted_units(self, rank: int) -> tuple[int, ...]:
        """Return the units of a rank's target that are filled from its host."""
        return tuple(sorted({*units_of(rank, self.hosted)} - self.shared_units(rank).keys()))

    def received_bytes(self, rank: int) -> dict[str, int]:
        """Return the bytes that a rank receives in the whole switch, by the level of the link (`LEVELS`)."""
        return dict(zip(LEVELS, self._received.get(rank, (0,) * len(LEVELS)), strict=True))

    def bound_bytes(self, rank: int) -> int:
        """Return the bound on the weights and buffers that a rank holds (invariant 4)."""
        before, after = self.source.nbytes(rank), self.target.nbytes(rank)
        kept = [target for owner, target, _ in self.shared if owner == rank] if self.keep else []
        both = before + after - sum(self.target.unit_nbytes(rank)[unit] for unit in kept)
        weights = both if self.keep else max(before, after)
        return weights + SLACK * self.bucket_bytes + _external_bytes(self.source, self.target, rank)

    def peak_bytes(self, rank: int) -> int:
        """Return the maximum bytes of weights and buffers that a rank holds, with two rounds in flight."""
        return self._peak_weights(rank) + sum(self.wire_bytes(rank)) + self.staging_bytes(rank)

    def in_place(self) -> "Plan":
        """Return the same moves in fewer, larger rounds, for an exchange without send and receive buffers: a rank holds
        more weights instead, at most its `peak_bytes`. The invariants hold, but for the limit on a round, which is up
        to four times as large."""
        return self if self.max_united == 1 else self._united(self.max_united)

    @cached_property
    def max_united(self) -> int:
        """Number of rounds that `in_place` may unite: as many as all ranks have memory for."""
        if self.unites:
            return self.unites
        for times in () if self.relays or self.parks else (4, 3, 2):
            held = self._united(times)._peak_weights
            if all(held(rank) <= self._peak_weights(rank) + sum(self.wire_bytes(rank)) for rank in self.ranks):
                return times
        return 1

    def _united(self, times: int) -> "Plan":
        starts = range(0, len(self.rounds), times)
        return replace(self, rounds=tuple(united(self.rounds[at : at + times]) for at in starts))

    def _peak_weights(self, rank: int) -> int:
        return max((self.source.nbytes(rank), *self.held_bytes(rank)))

    def held_bytes(self, rank: int) -> list[int]:
        """Return the bytes of a rank's weights after the allocation of each round."""
        return self._held_by_rank.get(rank) or [0] * len(self.rounds)  # it may not be in the plan

    @cached_property
    def _held_by_rank(self) -> dict[int, list[int]]:
        """`held_bytes` of all ranks, which take one pass over the rounds."""
        ranks = self.ranks if self.rank is None else (self.rank,)
        place = {rank: place for place, rank in enumerate(ranks)}
        sizes = [{rank: layout.unit_nbytes(rank) for rank in ranks} for layout in (self.source, self.target)]
        before = [sum(sizes[0][rank]) for rank in ranks]
        for rank, unit in self.unread + self.parked:
            before[place[rank]] -= sizes[0][rank][unit]
        change = np.zeros((len(self.rounds) + IN_FLIGHT, len(place)), np.int64)
        for index, round_ in enumerate(self.rounds):
            for rank, unit in round_.allocate_before:
                change[index, place[rank]] += sizes[1][rank][unit]
            for rank, unit in round_.restore_before:
                change[index, place[rank]] += sizes[0][rank][unit]
            for rank, unit in round_.release_after:
                change[index + IN_FLIGHT, place[rank]] -= sizes[0][rank][unit]
        held = (before + change.cumsum(0))[: len(self.rounds)].T.tolist()
        return dict(zip(ranks, held, strict=True))

    @cached_property
    def _slots(self) -> tuple[dict[int, int], ...]:
        """Bytes of a (send, receive) slot by rank: of the largest round."""
        largest = np.zeros((2, self.ranks[-1] + 1), np.int64)
        for sender, receiver, numel in self._sent():
            of_round = [np.bincount(ranks, numel, largest.shape[1]) for ranks in (sender, receiver)]
            largest = np.maximum(largest, np.array(of_round, np.int64))
        return tuple(dict(enumerate(way)) for way in (largest * self.wire_dtype.itemsize).tolist())

    @cached_property
    def _received(self) -> dict[int, list[int]]:
        """Bytes by receiver and level."""
        received = np.zeros((self.ranks[-1] + 1, len(LEVELS)), np.int64)
        for sender, receiver, numel in self._sent():
            levels = self.topology.level(sender, receiver)
            np.add.at(received, (receiver, levels), numel * self.wire_dtype.itemsize)
        return dict(enumerate(received.tolist()))

    def _sent(self) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield (senders, receivers, elements) of what is sent in each round."""
        for round_ in self.rounds:
            sender, receiver, numel, _ = round_.moves.ends.T
            sent = sender != receiver
            yield sender[sent], receiver[sent], numel[sent]


def _external_bytes(source: Layout, target: Layout, rank: int) -> int:
    return max(source.external_nbytes(rank), target.external_nbytes(rank))


@contextmanager
def _without_collection() -> Iterator[None]:
    """Make no search for garbage: a plan at scale has a million objects, and no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collection()
def plan_switch(
    source: Layout,
    target: Layout,
    bucket_bytes: int,
    topology: Topology | None = None,
    keep: bool = False,
    hosted: tuple[UnitId, ...] = (),
) -> Plan:
    """Plan the switch from one layout of a model to another. Their ranks may be the same, overlap or be disjoint.
    ``bucket_bytes``: at least the largest storage unit; twice the limit on what a rank sends, and writes, in a round.
    ``topology``: default: one node with equal links.
    ``keep``: keep the source resident.
    ``hosted``: (rank, unit of the target) that are filled from the host after their allocation (`fill`)."""
    assert source.config == target.config, "the layouts are of different models"
    topology = topology or Topology.single_node()
    wide = max(source.dtype.itemsize, target.dtype.itemsize)
    assert bucket_bytes >= wide * SMALLEST_SLOT, f"{bucket_bytes} bytes are too few for a bucket"
    all_families, shared = _families_between(source, target, hosted)
    units, ranks = (Units(source), Units(target)), tuple(sorted({*source.ranks, *target.ranks}))
    hops = choose_senders(all_families, units, topology, ranks)
    weights = _Weights(source, target, hops=hops, shared=shared, keep=keep)
    for rank in {rank for rank, _ in hosted}:
        weights.max_bytes[rank] -= bucket_bytes // STAGING
    rounds = _rounds(hops, weights, bucket_bytes, wide=wide, itemsize=target.dtype.itemsize)
    arguments = repr((source, target, bucket_bytes, topology, keep, hosted)).encode()
    return Plan(
        source=source,
        target=target,
        bucket_bytes=bucket_bytes,
        topology=topology,
        keep=keep,
        hosted=hosted,
        shared=shared,
        unread=weights.unread,
        rounds=rounds,
        digest=int.from_bytes(hashlib.blake2b(arguments, digest_size=8).digest(), "big") >> 1,
        relays=any(bool(round_.moves.ends[:, 3].any()) for round_ in rounds),
        parks=any(round_.restore_before for round_ in rounds),
    )


def _rounds(hops: Hops, weights: "_Weights", bucket_bytes: int, *, wide: int, itemsize: int) -> tuple[Round, ...]:
    """Return the rounds of the first order that keeps the bound, or, if none does, those through host memory."""
    if not hops.families:  # all is shared
        return ()
    demands = demands_of(hops, weights.size, itemsize)
    for slack, slots, method in TRIES:
        slot = bucket_bytes // slots // wide
        storage = weights.storage(int(slack * bucket_bytes), slot)
        order, over = fill_order(demands, storage, bucket_bytes=bucket_bytes, method=method)
        if not over:
            return pack_rounds(hops, order, room=slot, storage=storage, itemsize=itemsize)
    slot = bucket_bytes // SLOTS_OF_PARKED // wide
    parked = weights.storage(SLACK * bucket_bytes, slot, parked=True)
    return pack_through_host(hops, room=slot, storage=parked, itemsize=itemsize)


def _families_between(source: Layout, target: Layout, hosted: tuple[UnitId, ...]) -> tuple[list[CutFamily], Shared]:
    """Return the families that fill the target, and the shared units."""
    have, need = slabs_of(source), slabs_of(target)
    shared: list[tuple[int, int, int]] = []
    if source.dtype == target.dtype:
        for key in need.keys() & have.keys():
            slab = need[key]
            if not (holders := set().union(*have[key].groups)).isdisjoint(chain.from_iterable(slab.groups)):
                held = dict(have[key].owners())
                shared += [(rank, index, held[rank]) for rank, index in slab.owners() if rank in held]
                left = [tuple([rank for rank in ranks if rank not in holders]) for ranks in slab.groups]
                slab.set_owners([(ranks, index) for ranks, index in zip(left, slab.indices, strict=True) if ranks])
    needed = families(have, {key: slab for key, slab in need.items() if slab.groups})
    if hosted:
        all_hosted = frozenset(hosted)
        needed = [family._replace(hosted=all_hosted.intersection(family.owners())) for family in needed]
    return needed, tuple(sorted(shared))


class _Weights:
    """Compute the memory of both layouts' weights on each rank, and the number of readers of each unit.
    ``size``: bytes of every unit of the source, by number; 0: it is not released.
    ``max_bytes``: of the larger layout, with ``keep`` of both; plus those of an external unit; by rank."""

    def __init__(self, source: Layout, target: Layout, *, hops: Hops, shared: Shared, keep: bool):
        self.wire_itemsize = min(source.dtype.itemsize, target.dtype.itemsize)
        units, ranks = hops.units[0], sorted({*source.ranks, *target.ranks})
        size = units.nbytes * (not keep)
        size[[units.first[rank] + index for rank, _, index in shared]] = 0
        readers = np.bincount(hops.reads[:, 1], minlength=len(size))
        unread = ((size > 0) & (readers == 0)).nonzero()[0].tolist()
        self.owner, self.size, self.readers = units.rank, size.tolist(), readers.tolist()
        self.unread = tuple([units.names[unit] for unit in unread])
        self.max_bytes, self.resident = [0] * (ranks[-1] + 1), [0] * (ranks[-1] + 1)
        for rank in ranks:
            before, after = source.nbytes(rank), target.nbytes(rank)
            self.resident[rank] = before
            self.max_bytes[rank] = before + after if keep else max(before, after)
            self.max_bytes[rank] += _external_bytes(source, target, rank)
        for rank, index, _ in shared if keep else ():
            self.max_bytes[rank] -= target.unit_nbytes(rank)[index]
        for unit in unread:
            self.resident[self.owner[unit]] -= self.size[unit]
        sender, receiver, start, stop = hops.rows[:, [5, 6, 7, 8]].T
        numel = (stop - start) * (sender != receiver)
        self.exchanged = np.array([np.bincount(of, numel, ranks[-1] + 1) for of in (sender, receiver)], np.int64)
        """[2, ranks]: elements that each rank sends, and receives"""

    def storage(self, slack: int, slot: int, parked: bool = False) -> Storage:
        """Return the storage available to the order with wire buffers of two slots of ``slot`` elements, which are
        never larger than all that a rank sends, or receives. ``parked``: all units of the source that will be released
        wait in host memory."""
        slots = 2 * self.wire_itemsize * np.minimum(slot, self.exchanged).sum(0)
        limit = [nbytes + slack - of_slots for nbytes, of_slots in zip(self.max_bytes, slots.tolist(), strict=True)]
        resident = [*self.resident]
        for unit, nbytes in enumerate(self.size) if parked else ():
            resident[self.owner[unit]] -= nbytes if self.readers[unit] else 0
        return Storage(resident=resident, limit=limit, size=self.size, readers=self.readers, owner=self.owner)

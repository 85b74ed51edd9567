"""What has to move between two layouts, in which order, and when storage may go and must come.

    boxes of the target ∩ boxes of the source ─► fragments ─► senders ─► order ─► rounds of bounded size ─► Plan

Pure: no device, no process. Invariants:
1. Every element of every local tensor of the target is written exactly once, from an element of the same global index.
2. What the target rank already holds does not travel (a move to itself is a local copy); every other element travels
   once.
3. In a round no rank sends more than ``bucket_bytes``, nor writes more than that (received and copied together), in
   bytes of the wider dtype of the two layouts.
4. Each source bucket is released once, and not before its last reader is done: before the first round if nobody reads
   it, else after the last round that does. Each target bucket is allocated once, before the first round that writes it.
5. The plan is a function of its arguments: equal on every rank and in every process.

Senders: of the replicas that hold a fragment, the one with the least to send so far; fragments with the fewest holders
choose first, then the largest. Order: dense and expert parameters are two streams, each in the order of the forward
pass, in which layouts pack their buckets too; the next parameter comes from the stream whose allocation overshoots
max(A, B) least, then from the one that shrinks most. So storage is freed before it is needed, where layouts allow it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch

from fusion.ep_switch.layout import Layout, Place, intersect, numel, subtract
from fusion.ep_switch.moves import BucketId, Move, Round, Step, step_of
from fusion.ep_switch.order import order_moves, pack_rounds
from fusion.model.table import Box


@dataclass(frozen=True)
class Plan:
    """The moves of a switch in order. ``unread``: source buckets that nobody reads, released before the first round."""

    source: Layout
    target: Layout
    bucket_bytes: int
    unread: tuple[BucketId, ...]
    rounds: tuple[Round, ...]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The global ranks that take part."""
        return tuple(sorted({*self.source.ranks, *self.target.ranks}))

    @property
    def wire_dtype(self) -> torch.dtype:
        """The narrower dtype of the two layouts: values are converted before they travel, or after."""
        return min(self.target.dtype, self.source.dtype, key=lambda dtype: dtype.itemsize)

    @cached_property
    def digest(self) -> int:
        """63 bits that ranks compare before they start: different arguments, different digest."""
        text = repr((self.source, self.target, self.bucket_bytes)).encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1

    @cached_property
    def _steps(self) -> dict[int, tuple[Step, ...]]:
        return {rank: tuple(step_of(rank, round_) for round_ in self.rounds) for rank in self.ranks}

    def steps(self, rank: int) -> tuple[Step, ...]:
        return self._steps[rank]

    def wire_bytes(self, rank: int) -> tuple[int, int]:
        """(send buffer, receive buffer) of a rank in bytes: the most of any round."""
        size = self.wire_dtype.itemsize
        sent = [sum(m.numel for moves in step.send.values() for m in moves) for step in self.steps(rank)]
        received = [sum(m.numel for moves in step.receive.values() for m in moves) for step in self.steps(rank)]
        return max(sent, default=0) * size, max(received, default=0) * size

    def peak_bytes(self, rank: int) -> int:
        """The most bytes of weights and wire buffers that a rank holds at once during the switch."""
        source, target = self.source.bucket_nbytes(rank), self.target.bucket_nbytes(rank)
        most = sum(source)
        resident = most - sum(source[index] for owner, index in self.unread if owner == rank)
        for step in self.steps(rank):
            resident += sum(target[index] for index in step.allocate)
            most = max(most, resident)
            resident -= sum(source[index] for index in step.release)
        return most + sum(self.wire_bytes(rank))


@lru_cache(maxsize=32)
def plan_switch(source: Layout, target: Layout, bucket_bytes: int) -> Plan:
    """The plan from one layout of a model to another.

    Args:
        bucket_bytes: bound on what a rank sends, and on what it writes, in one round.
    """
    assert source.config == target.config, "the layouts are of different models"
    itemsize = max(source.dtype.itemsize, target.dtype.itemsize)
    assert bucket_bytes >= itemsize
    moves = _choose_senders(_fragments(source, target), itemsize)
    readers = {(move.source_rank, move.source.bucket) for move in moves}
    buckets = [(rank, index) for rank in source.ranks for index in range(len(source.buckets(rank)))]
    unread = tuple(bucket for bucket in buckets if bucket not in readers)
    ordered = order_moves(source, target, moves, unread)
    return Plan(source, target, bucket_bytes, unread, pack_rounds(ordered, bucket_bytes // itemsize))


Fragment = tuple[int, str, Box, Place, tuple[tuple[int, Place], ...]]
"""(target rank, global tensor, box, target place, the (rank, place) of everyone who holds the box)."""


def _fragments(source: Layout, target: Layout) -> list[Fragment]:
    holders: dict[str, dict[Box, dict[int, Place]]] = defaultdict(lambda: defaultdict(dict))
    for rank in source.ranks:
        for place in source.places(rank):
            holders[place.part.name][place.part.region].setdefault(rank, place)
    fragments: list[Fragment] = []
    for rank in target.ranks:
        for place in target.places(rank):
            name, todo = place.part.name, [place.part.region]
            mine_first = sorted(holders[name].items(), key=lambda held: rank not in held[1])
            for region, held in mine_first:
                candidates = ((rank, held[rank]),) if rank in held else tuple(held.items())
                rest: list[Box] = []
                for box in todo:
                    hit = intersect(box, region)
                    if hit is None:
                        rest.append(box)
                        continue
                    rest += subtract(box, hit)
                    fragments.append((rank, name, hit, place, candidates))
                todo = rest
            assert not todo, f"nobody in {source} holds {todo} of {name}"
    return fragments


def _choose_senders(fragments: list[Fragment], itemsize: int) -> list[Move]:
    """One move a fragment, in the order of the fragments."""
    sent: dict[int, int] = defaultdict(int)
    chosen: dict[int, tuple[int, Place]] = {}
    pickiest = sorted(range(len(fragments)), key=lambda i: (len(fragments[i][4]), -numel(fragments[i][2]), i))
    for i in pickiest:
        target_rank, _, box, _, candidates = fragments[i]
        sender, place = min(candidates, key=lambda held: (sent[held[0]], held[0]))
        chosen[i] = sender, place
        if sender != target_rank:
            sent[sender] += numel(box) * itemsize
    return [
        Move(chosen[i][0], rank, name, box, chosen[i][1].narrow(box), place.narrow(box))
        for i, (rank, name, box, place, _) in enumerate(fragments)
    ]

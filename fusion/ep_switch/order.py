"""Puts the moves of a switch in order and packs them into rounds. Pure; its invariants stand in `plan`."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from itertools import chain

from fusion.ep_switch.layout import Layout, numel
from fusion.ep_switch.moves import BucketId, Move, Round


def order_moves(source: Layout, target: Layout, moves: list[Move], unread: Iterable[BucketId]) -> list[list[Move]]:
    """The moves in units, one a parameter of the target."""
    params = {param.name: param for rank in target.ranks for param in target.params(rank)}
    units: dict[str, list[Move]] = {name: [] for name in params}
    for move in moves:
        units[move.target.param].append(move)
    streams = [deque(unit for name, unit in units.items() if params[name].expert == expert) for expert in (False, True)]
    memory = _Residency(source, target, moves, unread)
    ordered = []
    while any(streams):
        stream = min(filter(None, streams), key=lambda stream: memory.cost(stream[0]))
        ordered.append(stream.popleft())
        memory.apply(ordered[-1])
    return ordered


class _Residency:
    """What every rank holds while units are put in order."""

    def __init__(self, source: Layout, target: Layout, moves: list[Move], unread: Iterable[BucketId]):
        self.itemsizes = source.dtype.itemsize, target.dtype.itemsize
        self.source = {(r, i): n for r in source.ranks for i, n in enumerate(source.bucket_nbytes(r))}
        self.target = {(r, i): n for r in target.ranks for i, n in enumerate(target.bucket_nbytes(r))}
        ranks = {*source.ranks, *target.ranks}
        self.bound = {rank: max(source.nbytes(rank), target.nbytes(rank)) for rank in ranks}
        self.resident = {rank: source.nbytes(rank) for rank in ranks}
        self.readers: dict[BucketId, int] = defaultdict(int)
        for move in moves:
            self.readers[move.source_rank, move.source.bucket] += 1
        for bucket in unread:
            self.resident[bucket[0]] -= self.source[bucket]
        self.allocated: set[BucketId] = set()
        self.stored: dict[str, int] = defaultdict(int)
        for rank in source.ranks:
            for place in source.places(rank):
                self.stored[place.part.name] += numel(place.part.region)

    def cost(self, unit: list[Move]) -> tuple[int, int]:
        """(bytes past max(A, B) on the worst rank while the unit runs, bytes written less bytes stored of it)."""
        grown = dict(self.resident)
        for rank, index in {(m.target_rank, m.target.bucket) for m in unit} - self.allocated:
            grown[rank] += self.target[rank, index]
        past = max(0, max(grown[rank] - bound for rank, bound in self.bound.items()))
        stored = sum(self.stored[name] for name in {m.name for m in unit})
        return past, sum(m.numel for m in unit) * self.itemsizes[1] - stored * self.itemsizes[0]

    def apply(self, unit: list[Move]) -> None:
        for move in unit:
            into, out_of = (move.target_rank, move.target.bucket), (move.source_rank, move.source.bucket)
            if into not in self.allocated:
                self.allocated.add(into)
                self.resident[into[0]] += self.target[into]
            self.readers[out_of] -= 1
            if self.readers[out_of] == 0:
                self.resident[out_of[0]] -= self.source[out_of]


def pack_rounds(units: list[list[Move]], room: int) -> tuple[Round, ...]:
    """Packs moves first-fit, ``room`` elements a rank and round; no unit starts before the one in front of it ends."""
    rounds: list[list[Move]] = [[]]
    sent: list[dict[int, int]] = [defaultdict(int)]
    written: list[dict[int, int]] = [defaultdict(int)]
    for unit in units:
        start = len(rounds) - 1
        for move in chain.from_iterable(move.split(max(1, room // 4)) for move in unit):
            size, index = move.numel, start
            while True:
                if index == len(rounds):
                    rounds.append([])
                    sent.append(defaultdict(int))
                    written.append(defaultdict(int))
                outgoing = 0 if move.local else size
                fits = sent[index][move.source_rank] + outgoing <= room
                if fits and written[index][move.target_rank] + size <= room:
                    break
                index += 1
            rounds[index].append(move)
            sent[index][move.source_rank] += outgoing
            written[index][move.target_rank] += size
    return _with_storage(rounds)


def _with_storage(rounds: list[list[Move]]) -> tuple[Round, ...]:
    first: dict[BucketId, int] = {}
    last: dict[BucketId, int] = {}
    for index, moves in enumerate(rounds):
        for move in moves:
            first.setdefault((move.target_rank, move.target.bucket), index)
            last[move.source_rank, move.source.bucket] = index
    allocate: list[list[BucketId]] = [[] for _ in rounds]
    release: list[list[BucketId]] = [[] for _ in rounds]
    for bucket, index in sorted(first.items()):
        allocate[index].append(bucket)
    for bucket, index in sorted(last.items()):
        release[index].append(bucket)
    return tuple(Round(tuple(m), tuple(a), tuple(r)) for m, a, r in zip(rounds, allocate, release, strict=True))

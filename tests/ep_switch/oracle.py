"""Random switches of small models, and what a plan has to be, told from the elements of the tensors alone."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import combinations
from math import prod
from typing import Any

import numpy as np
import torch

from fusion.ep_switch import Layout, Move, Place, Plan, Topology
from fusion.ep_switch.topology import LEVELS
from fusion.model import ModelConfig, Parallel, global_params
from fusion.model.formats import EMBEDDED, MEGATRON, STACKED, VLLM_ASCEND, VLLM_CPU, Format, megatron, vllm
from tests.helpers import tiny_config

Choose = Callable[[Sequence[Any]], Any]
"""One of a sequence, by chance."""


def choices(seed: int) -> Choose:
    """A sequence of choices."""
    chance = random.Random(seed)
    return lambda options: chance.choice(list(options))


SIZES = dict(vocab_size=48, hidden_size=24, intermediate_size=48, head_dim=2, num_attention_heads=12)
BUCKETS = (512, 1024, 2048, 6144)
MISFITS = {MEGATRON: megatron.misfit, VLLM_CPU: vllm.misfit, VLLM_ASCEND: vllm.misfit}


def random_config(choose: Choose) -> ModelConfig:
    experts = choose((0, 4, 6, 12))
    changes: dict[str, Any] = dict(
        num_hidden_layers=choose((1, 2, 3, 5)),
        num_key_value_heads=choose((1, 2, 4, 6)),
        tie_word_embeddings=choose((True, False)),
    )
    if experts:
        changes |= dict(num_experts=experts, moe_intermediate_size=choose((12, 24)))
    return tiny_config(bool(experts), **(SIZES | changes))


def random_layout(
    choose: Choose, config: ModelConfig, ranks: Sequence[int], bucket_bytes: int, format: Format = EMBEDDED
) -> Layout:
    fitting = [grid for grid in grids(config, len(ranks)) if format not in MISFITS or not MISFITS[format](config, grid)]
    parallel = choose(fitting)
    engines = choose(range(1, len(ranks) // parallel.world + 1))
    left, taken = list(ranks), []
    in_order = choose((True, True, False))
    start = choose(range(len(ranks) - engines * parallel.world + 1))
    for _ in range(engines * parallel.world):
        taken.append(left.pop(start) if in_order else left.pop(choose(range(len(left)))))
    dtype = choose((torch.float32, torch.float32, torch.bfloat16))
    return Layout(config, parallel, tuple(taken), dtype, bucket_bytes // choose((1, 1, 1, 2)), format)


@cache
def grids(config: ModelConfig, most_ranks: int) -> list[Parallel]:
    """Every grid of at most so many ranks that the model can be cut for."""
    found = []
    for world in (1, 2, 3, 4, 6, 8):
        if world > most_ranks:
            continue
        sizes = [n for n in range(1, world + 1) if world % n == 0]
        for tp, ep, pp, etp in ((a, b, c, d) for a in sizes for b in sizes for c in sizes for d in sizes):
            try:
                parallel = Parallel(world, tp, ep, pp, etp)
                parallel.check(config, "parallel")
            except ValueError:
                continue
            found.append(parallel)
    return found


def random_topology(choose: Choose) -> Topology:
    if choose((True, False)):
        return Topology.single_node()
    card = choose((1, 2))
    node = card * choose((1, 2, 3))
    supernode = node * choose((1, 2))
    in_node = 100.0 * choose((1.0, 1.0, 0.5))
    across = in_node * choose((0.97, 0.3))
    return Topology(card, node, supernode, (100.0, in_node, across, across * choose((0.95, 0.1))))


def random_switch(choose: Choose, most_ranks: int = 8) -> tuple[Layout, Layout, int, Topology, bool]:
    config, bucket_bytes = random_config(choose), choose(BUCKETS)
    ranks = range(most_ranks)
    source = random_layout(choose, config, ranks, bucket_bytes)
    target = random_layout(choose, config, ranks, bucket_bytes)
    return source, target, bucket_bytes, random_topology(choose), choose((False, False, False, True))


def random_switch_of_formats(choose: Choose, most_ranks: int = 4) -> tuple[Layout, Layout, int, Topology, bool]:
    """Between any two formats that are not both embedded. Some units of Megatron's and vLLM's are larger than a bucket,
    and vLLM's vocabulary is padded: 80 rows to 128, of which the last of four ranks holds only padding."""
    config, bucket_bytes = random_config(choose), choose(BUCKETS)
    config = replace(config, vocab_size=choose((config.vocab_size, 80)))
    formats = [choose((EMBEDDED, *MISFITS)), choose([*MISFITS])]
    if choose((True, False)):
        formats.reverse()
    layouts = [random_layout(choose, config, range(most_ranks), bucket_bytes, format) for format in formats]
    return *layouts, bucket_bytes, random_topology(choose), choose((False, False, False, True))


def random_switch_of_stacks(choose: Choose, most_ranks: int = 6) -> tuple[Layout, Layout, int, Topology, bool]:
    """Where a card stacks the matrices of its experts at both ends, or another program has other units."""
    config, bucket_bytes = random_config(choose), choose(BUCKETS)
    formats = [STACKED, choose((STACKED, STACKED, MEGATRON, VLLM_ASCEND))]
    if choose((True, False)):
        formats.reverse()
    layouts = [random_layout(choose, config, range(most_ranks), bucket_bytes, format) for format in formats]
    return *layouts, bucket_bytes, random_topology(choose), choose((False, False, False, True))


class Elements:
    """Every element of every global tensor has a number of its own."""

    def __init__(self, config: ModelConfig):
        self.first: dict[str, np.ndarray] = {}
        self._stored: dict[tuple[Layout, int], list[np.ndarray]] = {}
        count = 0
        for name, shape in global_params(config).items():
            self.first[name] = np.arange(count, count + prod(shape), dtype=np.int64).reshape(shape)
            count += prod(shape)
        self.count = count

    @classmethod
    @lru_cache(maxsize=1)
    def of_config(cls, config: ModelConfig) -> Elements:
        """Those of the last model that was asked for: several checks read them."""
        return cls(config)

    def storage(self, layout: Layout, rank: int) -> list[np.ndarray]:
        """A rank's units as they should be; -1 where nothing lies (alignment)."""
        if (layout, rank) not in self._stored:
            self._stored[layout, rank] = self._storage(layout, rank)
        return [unit.copy() for unit in self._stored[layout, rank]]

    def _storage(self, layout: Layout, rank: int) -> list[np.ndarray]:
        units = [np.full(unit.numel, -1, dtype=np.int64) for unit in layout.units(rank)]
        for name, region, place in layout.places(rank):
            box = self.first[name][tuple(slice(*span) for span in region)]
            view(units, place, box.shape)[...] = box
        return units

    def of(self, move: Move) -> np.ndarray:
        """The elements a move says it carries, flat."""
        found = []
        for name, box, start, stop in move.pieces():
            piece = self.first[name][tuple(slice(*span) for span in box)].reshape(-1)
            assert len(piece) == stop - start
            found.append(piece)
        return np.concatenate(found)


def view(units: list[np.ndarray], place: Place, shape: tuple[int, ...]) -> np.ndarray:
    flat = units[place.unit]
    last = place.offset + sum((n - 1) * step for n, step in zip(shape, place.strides, strict=True))
    assert 0 <= place.offset and last < len(flat), "outside of the unit"
    steps = [step * flat.itemsize for step in place.strides]
    return np.lib.stride_tricks.as_strided(flat[place.offset :], shape, steps)


GONE, NEW = -2, -3


def check_contents(plan: Plan) -> dict[int, int]:
    """Runs the plan, two rounds in flight, on element numbers; returns the most bytes of weights each rank held."""
    elements = Elements.of_config(plan.source.config)
    have = {rank: elements.storage(plan.source, rank) for rank in plan.ranks}
    want = {rank: elements.storage(plan.target, rank) for rank in plan.ranks}
    into = {rank: [np.full_like(unit, GONE) for unit in want[rank]] for rank in plan.ranks}
    stays = {(rank, theirs) for rank, _, theirs in plan.shared}
    for rank, mine, theirs in plan.shared:
        into[rank][mine] = have[rank][theirs]
    taken = {(rank, mine) for rank, mine, _ in plan.shared}
    live = {(rank, i) for rank in plan.ranks for i in range(len(have[rank]))}
    size = plan.source.dtype.itemsize, plan.target.dtype.itemsize
    resident = {rank: plan.source.nbytes(rank) for rank in plan.ranks}
    most = dict(resident)
    times = {rank: [np.zeros_like(unit) for unit in want[rank]] for rank in plan.ranks}
    hosted = {(rank, index) for rank in plan.ranks for index in plan.hosted_units(rank)}

    def release(units) -> None:
        for rank, index in units:
            assert not plan.keep and (rank, index) in live and (rank, index) not in stays
            live.remove((rank, index))
            have[rank][index][...] = GONE
            resident[rank] -= have[rank][index].size * size[0]

    def write(move: Move, values: np.ndarray) -> None:
        assert (move.target_rank, move.target.unit) in taken, "written before it was allocated"
        view(into[move.target_rank], move.target, move.shape)[...] = values
        view(times[move.target_rank], move.target, move.shape)[...] += 1

    release(plan.unread + plan.parked)
    flying: list[tuple[Move, np.ndarray]] = []
    leaving: tuple = ()
    for round_ in plan.rounds:
        for rank, index in round_.allocate_before:
            assert (rank, index) not in taken
            taken.add((rank, index))
            into[rank][index][...] = NEW
            resident[rank] += into[rank][index].size * size[1]
            most[rank] = max(most[rank], resident[rank])
            if (rank, index) in hosted:
                into[rank][index][...] = want[rank][index]
                times[rank][index][...] = 1
        for rank, index in round_.restore_before:
            assert (rank, index) not in live
            live.add((rank, index))
            have[rank][index][...] = elements.storage(plan.source, rank)[index]
            resident[rank] += have[rank][index].size * size[0]
            most[rank] = max(most[rank], resident[rank])
        departing = []
        for move in round_.moves:
            storage = into if move.relayed else have
            values = view(storage[move.source_rank], move.source, move.shape).copy()
            assert np.array_equal(values.reshape(-1), elements.of(move)), f"{move} reads something else"
            if move.local:
                assert not move.relayed
                write(move, values)
            else:
                departing.append((move, values))
        for move, values in flying:
            write(move, values)
        release(leaving)
        flying, leaving = departing, round_.release_after
    for move, values in flying:
        write(move, values)
    release(leaving)
    for rank in plan.ranks:
        shared = plan.shared_units(rank)
        for index, unit in enumerate(want[rank]):
            filled = unit >= 0
            assert np.array_equal(into[rank][index][filled], unit[filled])
            assert (rank, index) in taken
            assert (times[rank][index][filled] == (0 if index in shared else 1)).all()
    left = {(rank, i) for rank in plan.ranks for i in range(len(have[rank]))} if plan.keep else stays
    assert live == left
    return most


def sent_bytes(plan: Plan) -> dict[tuple[int, str], int]:
    """(rank, level of the link) → bytes that the rank sends in the whole switch."""
    sent: dict[tuple[int, str], int] = defaultdict(int)
    for round_ in plan.rounds:
        for move in round_.moves:
            if not move.local:
                level = LEVELS[plan.topology.level(move.source_rank, move.target_rank)]
                sent[move.source_rank, level] += move.numel * plan.wire_dtype.itemsize
    return sent


def speed_class(topology: Topology, one: int, other: int) -> int:
    """Index in `Topology.classes` of the link between two ranks; 0 is the fastest."""
    level = topology.level(one, other)
    return next(index for index, levels in enumerate(topology.classes) if level in levels)


def check_traffic(plan: Plan, busiest: float) -> list[float]:
    """Minimal bytes, slow links, busiest senders; returns the busiest over the optimum of each class of links."""
    elements = Elements.of_config(plan.source.config)
    topology, ranks = plan.topology, plan.ranks
    held = {rank: _mask(elements, elements.storage(plan.source, rank)) for rank in ranks}
    moved = {
        rank: [unit for index, unit in enumerate(elements.storage(plan.target, rank)) if index not in hosted]
        for rank in ranks
        for hosted in [plan.hosted_units(rank)]
    }
    need = {rank: _mask(elements, moved[rank]) & ~held[rank] for rank in ranks}
    speeds = range(len(topology.classes))
    got = {rank: np.zeros(elements.count, dtype=np.int64) for rank in ranks}
    sent: list[dict[int, int]] = [defaultdict(int) for _ in speeds]
    entered: list[dict[int, np.ndarray]] = [{} for _ in speeds]
    for round_ in plan.rounds:
        for move in round_.moves:
            if move.local:
                continue
            speed, numbers = speed_class(topology, move.source_rank, move.target_rank), elements.of(move)
            got[move.target_rank][numbers] += 1
            sent[speed][move.source_rank] += len(numbers)
            if speed:
                group = topology.group(move.target_rank, speed - 1)
                entered[speed].setdefault(group, np.zeros(elements.count, dtype=np.int64))[numbers] += 1
    for rank in ranks:
        assert np.array_equal(got[rank], need[rank].astype(np.int64)), "what is missing travels once, nothing else does"
    for speed in speeds:
        for group, times in entered[speed].items():
            inside = [rank for rank in ranks if topology.group(rank, speed - 1) == group]
            there = np.logical_or.reduce([held[rank] for rank in inside])
            assert times.max() <= 1, "a slow link is crossed once"
            assert not times[there].any(), "nor at all for what is there"
    ratios = []
    for speed, demand in enumerate(_demands(plan, held, need)):
        best = optimum(demand)
        most = max(sent[speed].values(), default=0)
        assert sum(sent[speed].values()) == sum(demand.values())
        ratios.append(most / best if best else 1.0)
    if len({topology.group(rank, 0) for rank in ranks}) == 1 or len(ratios) < 3:
        assert max(ratios) <= busiest, f"busiest senders at {ratios} of the optimum"
    return ratios


def _mask(elements: Elements, units: list[np.ndarray]) -> np.ndarray:
    mask = np.zeros(elements.count, dtype=bool)
    for unit in units:
        mask[unit[unit >= 0]] = True
    return mask


def _demands(plan: Plan, held: dict[int, np.ndarray], need: dict[int, np.ndarray]) -> list[dict[frozenset[int], int]]:
    """By class of links: who may send, and how many elements. A group of faster links takes an element in once, if
    nobody there holds it, and passes it on among those that need it."""
    ranks, topology = plan.ranks, plan.topology
    table = np.stack([*(held[rank] for rank in ranks), *(need[rank] for rank in ranks)])
    codes, counts = np.unique((1 << np.arange(len(table))) @ table, return_counts=True)
    kinds = codes[:, None] >> np.arange(len(table)) & 1
    demands: list[dict[frozenset[int], int]] = [defaultdict(int) for _ in topology.classes]

    def reach(have: frozenset[int], lack: frozenset[int], speed: int, count: int) -> None:
        for inside in split(lack, speed):
            near = frozenset(r for r in have if speed and same(r, next(iter(inside)), speed - 1))
            if near:
                reach(near, inside, speed - 1, count)
            else:
                demands[speed][have] += count
                spread(inside, speed - 1, count)

    def spread(lack: frozenset[int], speed: int, count: int) -> None:
        if len(lack) > 1:
            groups = split(lack, speed)
            if len(groups) > 1:
                demands[speed][lack] += count * (len(groups) - 1)
            for inside in groups:
                spread(inside, speed - 1, count)

    def split(members: frozenset[int], speed: int) -> list[frozenset[int]]:
        found = defaultdict(set)
        for rank in members:
            found[topology.group(rank, speed - 1) if speed else rank].add(rank)
        return [frozenset(group) for group in found.values()]

    def same(one: int, other: int, speed: int) -> bool:
        return topology.group(one, speed) == topology.group(other, speed)

    for kind, count in zip(kinds, counts, strict=True):
        have, lack = (frozenset(r for r, yes in zip(ranks, part, strict=True) if yes) for part in np.split(kind, 2))
        if lack:
            reach(have, lack, len(topology.classes) - 1, int(count))
    return demands


def optimum(demands: dict[frozenset[int], int]) -> float:
    """Least possible load of the busiest: by max-flow min-cut, over all sets of ranks what only they can send."""
    ranks = sorted(frozenset().union(*demands)) if demands else []
    best = 0.0
    for size in range(1, len(ranks) + 1):
        for group in combinations(ranks, size):
            chosen = set(group)
            best = max(best, sum(count for who, count in demands.items() if who <= chosen) / size)
    return best

"""Choose the units of the weights that a rank rounds from its masters on the host when it switches to TRAIN. Pure.

    fp32 masters of a rank     │ master.0: its share of bucket 0 │ master.1: … │      sharded over replicas
    units of its weights       │ layer 0, norms ▓▓│ layer 0, qkv … ░░│ expert 0 ▓▓│ expert 1 ░▓│
                                 ▓ covered by the rank's own masters: the host can supply it

Trained weights are rounded masters, so both sources give the same bits. A unit comes entirely from the host or entirely
from other ranks. Each rank chooses by `plan_return`, which uses two links at the same time: to other ranks, at the
speed of the slowest link to the nearest engine, and to the host. With expert parallelism most units are experts, whose
masters are seldom sharded. Units whose masters are sharded over replicas come from other ranks.

Invariants: every element of a hosted unit is in exactly one run; a hosted unit is covered by the rank's masters, is
partly or entirely missing in the source layout, and was assigned to the host by `plan_return`. All hosts compute the
same choice."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch

from fusion.ep_switch import Layout, Topology, shared_units
from fusion.ep_switch.fill import HostPart
from fusion.ep_switch.moves import UnitId
from fusion.ep_switch.unit_sources import TrainedPart, plan_return
from fusion.model.boxes import Box, intersect, numel
from fusion.training.shards import gradient_buckets, own_range, shard_pieces


class MasterRun(NamedTuple):
    """``numel`` elements of the parameter ``name``, which begin at ``start`` in a unit of the weights and at ``at`` in
    the master of the optimizer's shard number ``shard``."""

    name: str
    start: int
    shard: int
    at: int
    numel: int


def master_runs(layout: Layout, rank: int) -> dict[int, tuple[MasterRun, ...]]:
    """Map the units of a rank of the training layout that its own masters cover to the runs they consist of."""
    parallel, place = layout.parallel, layout.ranks.index(rank) % layout.parallel.world
    buckets, _ = gradient_buckets(layout.config, parallel, layout.table(place), bucket_bytes=layout.bucket_bytes)
    by_name: dict[str, list[MasterRun]] = defaultdict(list)
    for shard, bucket in enumerate(buckets):
        for piece in shard_pieces(bucket, *own_range(bucket, parallel, place)):
            name = piece.param.name
            by_name[name].append(MasterRun(name, start=piece.start, shard=shard, at=piece.at, numel=piece.numel))
    runs_by_unit = {}
    for index, unit in enumerate(layout.units(rank)):
        runs = [run._replace(start=run.start + at) for param, at in unit.entries for run in by_name[param.name]]
        if sum(run.numel for run in runs) == sum(param.numel for param, _ in unit.entries):
            runs_by_unit[index] = tuple(runs)
    return runs_by_unit


def choose_hosted(source: Layout, train: Layout, ranks: Iterable[int], topology: Topology) -> tuple[UnitId, ...]:
    """Return the units of the training layout that ``ranks``, whose masters are on the host, fill from them."""
    hosted: list[UnitId] = []
    for rank in ranks:
        runs, shared, held = master_runs(train, rank), shared_units(source, train, rank), _boxes(source, rank)
        units = [index for index in range(len(train.units(rank))) if index not in shared]
        lacking = _lacking(train, rank, held)
        parts = [
            TrainedPart(
                lacking[index] * train.dtype.itemsize,
                sum(run.numel for run in runs[index]) * torch.float32.itemsize if index in runs else None,
            )
            for index in units
        ]
        wire = topology.bytes_per_s[_level_to_nearest_engine(source, rank, topology)]
        plan = plan_return(parts, wire, topology.host_bytes_per_s)
        hosted += [
            (rank, index) for index, unit_source in zip(units, plan.sources, strict=True) if unit_source == "host"
        ]
    return tuple(sorted(hosted))


def host_parts(
    runs: Mapping[int, Iterable[MasterRun]], masters: Mapping[int, torch.Tensor]
) -> dict[int, list[HostPart]]:
    """Return the runs as views of the masters, flat float32 host tensors by shard."""
    return {
        unit: [HostPart(run.name, run.start, masters[run.shard][run.at : run.at + run.numel]) for run in unit_runs]
        for unit, unit_runs in runs.items()
    }


def _boxes(layout: Layout, rank: int) -> dict[str, set[Box]]:
    boxes: dict[str, set[Box]] = defaultdict(set)
    for name, region, _ in layout.places(rank):
        boxes[name].add(region)
    return boxes


def _lacking(layout: Layout, rank: int, held: Mapping[str, set[Box]]) -> dict[int, int]:
    """Count by unit the elements that the rank does not hold. The boxes it holds of a tensor are disjoint."""
    lacking: dict[int, int] = defaultdict(int)
    for name, region, place in layout.places(rank):
        hits = [hit for box in held.get(name, ()) if (hit := intersect(region, box))]
        lacking[place.unit] += numel(region) - sum(map(numel, hits))
    return lacking


def _level_to_nearest_engine(source: Layout, rank: int, topology: Topology) -> int:
    """Return the level of the slowest link to the ranks of the nearest engine, which together hold all weights."""
    size = source.parallel.world
    engines = [source.ranks[first : first + size] for first in range(0, len(source.ranks), size)]
    return min(max(topology.level(rank, other) for other in engine) for engine in engines)

"""Plan which parameters of a rank are stored together, in pieces whose memory is freed, moved and shared as one. Pure.

Units, in which weights are stored, freed, moved and shared:

    layer 3, replicated | input_norm | q_norm | k_norm | post_norm | router |
    layer 3, TP shard   | attention.qkv | attention.out |
    layer 3, expert 17  | gate_up | down |
    layer 3, adapters   | attention.qkv.lora_a | attention.out.lora_b |     beside a frozen base (`adapters`)
    layer 3, a stack    | experts.16.gate_up | experts.17.gate_up | …     where experts are stacked (`LocalParam.stack`)

Buckets, in which gradients and optimizer states are stored and reduced:

    bucket 0 (dense)    | embed | layers.0.input_norm | layers.0.attention.qkv | …
    bucket 1 (expert)   | layers.0.moe.experts.0.gate_up | layers.0.moe.experts.0.down | …

Invariants: a parameter is stored whole in one piece, at an offset that is a multiple of ALIGN elements; a bucket is no
larger than ``bucket_bytes``, a unit no larger than `unit_bytes` of it, unless its only parameter is, or it is a stack,
which is one unit and nothing else. The content of a unit depends on the slices alone, so layouts that hold the same
slices hold equal units, and two models on one card can share them. Dense and expert parameters never share a bucket
(their gradients are reduced over different ranks), and a bucket is padded, beyond ``bucket_bytes`` if need be, to a
multiple of its number of replicas, so that an optimizer can shard it evenly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING

from fusion.model.local_param import LocalParam, Part
from fusion.model.parallel import Parallel

if TYPE_CHECKING:
    import torch

ALIGN = 16
"""Alignment in elements: 64 bytes in fp32, as vector units and DMA engines require."""

UNITS_A_BUCKET = 8
"""Units per bucket. Arriving units must fit into the holes that released units leave in the allocator's segments. With
units as large as a bucket the allocator reserved up to 7 buckets more than the larger layout, with quarters 4, with
eighths 2 (`benchmarks/switch.py`)."""


def unit_bytes(bucket_bytes: int) -> int:
    """Return the upper bound on a unit of storage, in bytes."""
    return bucket_bytes // UNITS_A_BUCKET


@dataclass(frozen=True)
class BucketPlan:
    """List the parameters of one flat piece as (parameter, offset in elements); ``numel`` is the piece's size in
    elements."""

    expert: bool
    numel: int
    entries: tuple[tuple[LocalParam, int], ...]

    @cached_property
    def content(self) -> tuple[tuple[int, tuple[int, ...], int | None, tuple[Part, ...] | str], ...]:
        """(offset, shape, block, parts) of every parameter: pieces of equal content are stored alike, whatever the
        formats that name their parameters. A parameter that is all padding is told apart by its name."""
        return tuple([(offset, param.shape, param.block, param.parts or param.name) for param, offset in self.entries])

    @property
    def frozen(self) -> bool:
        """Whether it holds parameters that are never trained, and no others."""
        return self.entries[0][0].frozen

    def views(self, flat: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return views of the parameters, by name, in a piece of this plan."""
        return {param.name: flat[at : at + param.numel].view(param.shape) for param, at in self.entries}

    @property
    def stacks(self) -> frozenset[str]:
        """Names of the stacks of which it has matrices."""
        return frozenset(param.stack for param, _ in self.entries if param.stack is not None)

    def runs(self, stack: str, flat: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield views [n, …] of the matrices of a stack that lie at equal distances in a piece of this plan, in order;
        all of them at once where the piece has nothing else between them but the same."""
        entries = [(param, at) for param, at in self.entries if param.stack == stack]
        start = 0
        while start < len(entries):
            (param, first), stop = entries[start], start + 1
            distance = entries[stop][1] - first if stop < len(entries) else param.numel
            while stop < len(entries) and entries[stop][1] - entries[stop - 1][1] == distance:
                stop += 1
            steps = [prod(param.shape[d + 1 :]) for d in range(len(param.shape))]
            place = flat.storage_offset() + first
            yield flat.as_strided((stop - start, *param.shape), (distance, *steps), place)
            start = stop

    def holes(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the parameters' padding in a piece of this plan."""
        return [
            flat[at : at + param.numel].view(param.shape)[tuple(slice(start, stop) for start, stop in hole)]
            for param, at in self.entries
            for hole in param.holes
        ]


def plan_units(params: Iterable[LocalParam], itemsize: int, max_bytes: int) -> tuple[BucketPlan, ...]:
    """Pack parameters into units of at most ``max_bytes``, in the order in which a forward pass uses them; those that
    are stored elsewhere (`LocalParam.storage`) are left out."""
    kinds: dict[tuple[bool, int | str, int | str | None], list[LocalParam]] = {}
    for param in (param for param in params if param.storage == "unit"):
        kinds.setdefault(_unit_kind(param), []).append(param)
    units = []
    for members in kinds.values():
        for entries in _fill(members, itemsize, math.inf if members[0].stack else max_bytes):
            last, offset = entries[-1]
            units.append(BucketPlan(last.expert, offset + last.numel, tuple(entries)))
    return tuple(units)


def trained_units(units: Iterable[BucketPlan]) -> tuple[BucketPlan, ...]:
    """Return the units of what is trained: of a model with adapters theirs, else all."""
    return tuple(unit for unit in units if not unit.frozen)


def _unit_kind(param: LocalParam) -> tuple[bool, int | str, int | str | None]:
    """Return (whether it is frozen, layer or global tensor, which ranks replicate it): parameters of one kind may share
    a unit."""
    own = param.parts[0].name if param.parts else param.name  # a share of the vocabulary may be all padding
    scope = own if param.layer is None else param.layer
    if param.stack is not None:
        return param.frozen, scope, param.stack
    if param.expert:
        return param.frozen, scope, param.expert_index
    return param.frozen, scope, "share" if param.tp_sharded else "replicated"


def plan_buckets(
    params: Iterable[LocalParam], parallel: Parallel, itemsize: int, bucket_bytes: int
) -> tuple[BucketPlan, ...]:
    """Pack parameters in order into buckets of at most ``bucket_bytes`` (a larger parameter gets its own bucket)."""
    params = list(params)
    plans: list[BucketPlan] = []
    for expert in (False, True):
        replicas = parallel.edp if expert else parallel.dp
        for entries in _fill([param for param in params if param.expert == expert], itemsize, bucket_bytes):
            last, offset = entries[-1]
            end = offset + last.numel
            plans.append(BucketPlan(expert, end + -end % replicas, tuple(entries)))
    return tuple(plans)


def _fill(params: list[LocalParam], itemsize: int, max_bytes: float) -> Iterator[list[tuple[LocalParam, int]]]:
    """Yield lists of consecutive (parameter, offset in elements), each of which fits into one piece."""
    entries: list[tuple[LocalParam, int]] = []
    end = 0
    for param in params:
        offset = end + -end % ALIGN
        if entries and (offset + param.numel) * itemsize > max_bytes:
            yield entries
            entries, offset = [], 0
        entries.append((param, offset))
        end = offset + param.numel
    if entries:
        yield entries

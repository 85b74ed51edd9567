"""The storage of one rank's weights: flat buckets whose memory can go and come back while every view stays valid.

    bucket 0 (dense)  | embed | layers.0.input_norm | layers.0.attention.qkv | …
    bucket 1 (dense)  | …
    bucket 2 (expert) | layers.0.moe.gate_up | layers.0.moe.down | …

Invariants: a parameter lies whole in one bucket, at an offset that is a multiple of ALIGN elements; dense and expert
parameters never share a bucket (their gradients are reduced over different ranks); the size of a bucket is a multiple
of its number of replicas, so that an optimizer can shard it evenly; `release` gives back every byte of the buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from fusion.model.parallel import Parallel
from fusion.model.table import LocalParam
from fusion.npu import Device

ALIGN = 16
"""Elements: 64 bytes in fp32, what vector units and DMA engines want."""


@dataclass(frozen=True)
class BucketPlan:
    """Which parameters lie in one flat bucket: (parameter, offset in elements) and the bucket's size in elements."""

    expert: bool
    numel: int
    entries: tuple[tuple[LocalParam, int], ...]


def plan_buckets(
    params: Iterable[LocalParam], parallel: Parallel, itemsize: int, bucket_bytes: int
) -> tuple[BucketPlan, ...]:
    """Packs parameters in order into buckets of at most ``bucket_bytes`` (a larger parameter gets one of its own)."""
    params = list(params)
    plans: list[BucketPlan] = []
    for expert in (False, True):
        replicas = parallel.edp if expert else parallel.dp
        for entries in _fill([param for param in params if param.expert == expert], itemsize, bucket_bytes):
            last, offset = entries[-1]
            end = offset + last.numel
            plans.append(BucketPlan(expert, end + -end % replicas, tuple(entries)))
    return tuple(plans)


def _fill(params: list[LocalParam], itemsize: int, bucket_bytes: int) -> Iterator[list[tuple[LocalParam, int]]]:
    """Runs of (parameter, offset in elements) that fit into a bucket each."""
    entries: list[tuple[LocalParam, int]] = []
    end = 0
    for param in params:
        offset = end + -end % ALIGN
        if entries and (offset + param.numel) * itemsize > bucket_bytes:
            yield entries
            entries, offset = [], 0
        entries.append((param, offset))
        end = offset + param.numel
    if entries:
        yield entries


class Buckets:
    """Flat storage for every parameter of a plan: weights, or gradients of the same geometry."""

    def __init__(self, plans: tuple[BucketPlan, ...], device: Device, dtype: torch.dtype, owner: str):
        self.plans, self.dtype, self.owner, self._device = plans, dtype, owner, device
        with device.owner(owner):
            self.flats = [torch.zeros(plan.numel, dtype=dtype, device=device.torch_device) for plan in plans]
        self.views: dict[str, torch.Tensor] = {}
        for plan, flat in zip(plans, self.flats, strict=True):
            for param, offset in plan.entries:
                self.views[param.name] = flat[offset : offset + param.numel].view(param.shape)

    def __iter__(self) -> Iterator[tuple[BucketPlan, torch.Tensor]]:
        return zip(self.plans, self.flats, strict=True)

    @property
    def nbytes(self) -> int:
        return sum(plan.numel for plan in self.plans) * self.dtype.itemsize

    @property
    def resident(self) -> bool:
        return all(flat.untyped_storage().nbytes() > 0 for flat in self.flats)

    def allocate(self, index: int | None = None) -> None:
        """Takes memory for all buckets, or one. The content of what was not resident is undefined."""
        with self._device.owner(self.owner):
            for flat in self.flats if index is None else [self.flats[index]]:
                if flat.untyped_storage().nbytes() == 0:
                    flat.untyped_storage().resize_(flat.numel() * flat.itemsize)

    def release(self, index: int | None = None) -> None:
        """Gives the memory of all buckets, or one, back to the device; views stay, their content is gone."""
        for flat in self.flats if index is None else [self.flats[index]]:
            flat.untyped_storage().resize_(0)

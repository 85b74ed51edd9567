"""Shared by the sides of `benchmarks/switch.py`: one clock over all ranks, and values that identify their element."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from zlib import crc32

import torch
import torch.distributed as dist

from fusion.model import LocalParam, Part
from fusion.npu import Device


def wall(device: Device, work: Callable[[], object]) -> float:
    """Return the seconds from the first rank's start to the last rank's end, the same on every rank."""
    device.synchronize()
    dist.barrier()
    start = time.perf_counter()  # one clock for all processes of a machine
    work()
    device.synchronize()
    span = torch.tensor([-start, time.perf_counter()], dtype=torch.float64)
    dist.all_reduce(span, op=dist.ReduceOp.MAX)
    return float(span.sum())


def worst(value: int) -> int:
    """Return the maximum over all ranks."""
    tensor = torch.tensor([value])
    dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
    return int(tensor)


def values_of(part: Part, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Compute a value for every element of a box, from the tensor's name and the element's global index alone."""
    columns = torch.arange(*part.region[-1])
    rows = torch.arange(*part.region[0])[:, None] if len(part.region) > 1 else torch.zeros(1, dtype=torch.int64)
    mixed = (rows * 40503 + columns * 9973 + crc32(part.name.encode())) & 0x3FFFFF
    return mixed.view(part.shape).to(dtype)


def fill(table: Iterable[LocalParam], views: dict[str, torch.Tensor]) -> None:
    """Write `values_of` into every parameter of ``table``. ``views``: its tensors by name."""
    for param in table:
        for part in param.parts:
            part.view(views[param.name]).copy_(values_of(part, views[param.name].dtype))


def check(table: Iterable[LocalParam], views: dict[str, torch.Tensor]) -> None:
    """Compare every parameter with the values of `fill`.

    Raises:
        AssertionError: elements differ; names their tensor and the rank.
    """
    for param in table:
        for part in param.parts:
            values = part.view(views[param.name]).cpu()
            assert torch.equal(values, values_of(part, values.dtype)), f"rank {dist.get_rank()}: {part.name} differs"

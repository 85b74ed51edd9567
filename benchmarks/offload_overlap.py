"""Profile offloading beside matrix products on a CUDA card: for how much of the copies' time other kernels ran."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.offload_sides import states_of
from fusion.npu import Device
from fusion.offload import Offloader

Interval = tuple[float, float]


def overlap(device: Device, *, numel: int, groups: int, copy_s: float, trace: Path) -> dict[str, Any]:
    """Profile both directions beside matrix products that last as long as the copies; return the trace's figures."""
    states, offloader = states_of(device, numel, groups), Offloader(device)
    x_DD = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device.torch_device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(x_DD, x_DD)

    products(3)
    device.synchronize()
    start = time.perf_counter()
    products(20)
    device.synchronize()
    count = max(1, int(copy_s / 2 / ((time.perf_counter() - start) / 20)))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        offloader.out(states)
        products(count)
        offloader.wait()
        offloader.back()
        products(count)
        offloader.wait()
        device.synchronize()
    profile.export_chrome_trace(str(trace))
    return read_trace(json.loads(trace.read_text())["traceEvents"])


def read_trace(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the seconds of copies in each direction, and for how many of them kernels ran on another stream."""
    figures: dict[str, Any] = {}
    kernels = [event for event in events if event.get("cat") == "kernel"]
    for direction in ("DtoH", "HtoD"):
        copies = [event for event in events if event.get("cat") == "gpu_memcpy" and direction in event["name"]]
        streams = {event["args"]["stream"] for event in copies}
        others = [event for event in kernels if event["args"]["stream"] not in streams]
        busy = union([(event["ts"], event["ts"] + event["dur"]) for event in copies])
        beside = union([(event["ts"], event["ts"] + event["dur"]) for event in others])
        copied = sum(stop - start for start, stop in busy)
        both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in busy for b in beside)
        figures[direction] = {
            "copy_s": copied * 1e-6,
            "overlapped_s": both * 1e-6,
            "share": both / copied if copied else 0.0,
            "copy_streams": sorted(streams),
            "compute_streams": sorted({event["args"]["stream"] for event in others}),
        }
    return figures


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge intervals into disjoint ones that cover the same time, ascending."""
    merged: list[Interval] = []
    for start, stop in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return merged

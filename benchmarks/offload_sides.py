"""Run the sides of `benchmarks/offload.py`: one plain copy, the offloader, and one streamed pass, of the same bytes."""

from __future__ import annotations

import json
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Figures, in_turns, medians, timed
from benchmarks.runs import temporary_folder
from fusion.npu import Device, open_device
from fusion.offload import Offloader, StreamedStates

NAMES = ("master", "exp_avg", "exp_avg_sq")
Interval = tuple[float, float]


def measure(args: Namespace) -> Figures:
    """Measure a round trip of each side, and the overlap on a CUDA card."""
    torch.set_num_threads(1)
    device = open_device(args.device)
    numel = max(1, (args.mib << 20) // (4 * len(NAMES) * args.groups))
    nbytes = 2 * 4 * len(NAMES) * args.groups * numel
    works = sides(device, numel, args.groups)
    seconds = medians(in_turns({name: lambda _, work=work: timed(work) for name, work in works.items()}, args.rounds))
    figures: Figures = {
        name: {"seconds": value, "gb_per_s": nbytes / value / 1e9, "ratio": seconds["floor"] / value}
        for name, value in seconds.items()
    }
    if device.kind != "cuda":
        print(f"overlap is not measured on a card of kind {device.kind}: only on CUDA")
        return figures
    with temporary_folder() as folder:
        trace = Path(args.trace) if args.trace else folder / "trace.json"
        overlapped = overlap(device, numel=numel, groups=args.groups, copy_s=seconds["floor"], trace=trace)
    return figures | {"overlap": overlapped}


def states_of(device: Device, numel: int, groups: int) -> dict[str, torch.Tensor]:
    """Allocate Adam's three states for ``groups`` gradient buckets, ``numel`` elements each."""
    names = (f"{name}.{index}" for index in range(groups) for name in NAMES)
    with device.owner("optimizer"):
        return {name: torch.randn(numel, device=device.torch_device) for name in names}


def sides(device: Device, numel: int, groups: int) -> dict[str, Callable[[], None]]:
    """Return floor, offload and stream; each makes one round trip and returns when the card has finished."""
    states = states_of(device, numel, groups)
    nbytes = sum(state.nbytes for state in states.values())
    flat = torch.ones(nbytes, dtype=torch.uint8, device=device.torch_device)
    host = device.host_empty((nbytes,), torch.uint8)
    offloader = Offloader(device)
    streamed = StreamedStates(device, [dict.fromkeys(NAMES, numel)] * groups, offloader.pool)

    def floor() -> None:
        host.copy_(flat, non_blocking=True)
        device.synchronize()
        flat.copy_(host, non_blocking=True)
        device.synchronize()

    def offload() -> None:
        offloader.out(states)
        offloader.wait()
        offloader.back()
        offloader.wait()
        device.synchronize()

    def stream() -> None:
        for _ in streamed:
            pass
        device.synchronize()

    return {"floor": floor, "offload": offload, "stream": stream}


def overlap(device: Device, *, numel: int, groups: int, copy_s: float, trace: Path) -> dict[str, Any]:
    """Profile both directions beside matrix products that last as long as the copies; return the trace's figures."""
    states, offloader = states_of(device, numel, groups), Offloader(device)
    x_DD = torch.randn(4096, 4096, dtype=torch.bfloat16, device=device.torch_device)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(x_DD, x_DD)

    products(3)
    count = max(1, int(copy_s / 2 / (timed(lambda: products(20), time.perf_counter, device) / 20)))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for move in (lambda: offloader.out(states), offloader.back):
            move()
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

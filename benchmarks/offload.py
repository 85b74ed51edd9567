"""Measure offloading optimizer states to the host and back, against a plain copy of the same bytes.

    python benchmarks/offload.py --json offload.json [--device cuda --mib 4096 --trace offload_trace.json]

floor: one flat tensor of all the bytes, copied to pinned host memory and back into the same device memory: no
allocation, no pieces, no bookkeeping. offload: `Offloader` frees the states on the card and reallocates them. stream:
one pass of `StreamedStates` over the same bytes, both directions at once where the link can. Rounds alternate; figures
are median seconds for both directions together; ratio = floor / figure, target for offload >= 0.9.

On a CUDA card a profile of copies and matrix products then shows for what share of the copies' time kernels ran on the
compute stream. The emulated NPU copies synchronously: there is no overlap to measure on it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fusion.npu import Device, open_device  # noqa: E402
from fusion.offload import Offloader, StreamedStates  # noqa: E402

NAMES = ("master", "exp_avg", "exp_avg_sq")
TARGET = 0.9
Interval = tuple[float, float]


def states_of(device: Device, numel: int, groups: int) -> dict[str, torch.Tensor]:
    """Allocate Adam's three states for ``groups`` gradient buckets, ``numel`` elements each."""
    with device.owner("optimizer"):
        return {
            f"{name}.{index}": torch.randn(numel, device=device.torch_device)
            for index in range(groups)
            for name in NAMES
        }


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


def measure(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each; the order rotates from round to round."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    names = list(ways)
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            start = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--device", default="auto", help="a kind of fusion.npu: auto (default), npu, cuda, emulated")
    parser.add_argument("--mib", type=int, default=192, help="MiB of optimizer states")
    parser.add_argument("--groups", type=int, default=16, help="gradient buckets to which the states belong")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trace", type=Path, help="CUDA: write the profile to this file (Chrome trace)")
    args = parser.parse_args()
    torch.set_num_threads(1)

    device = open_device(args.device)
    numel = max(1, (args.mib << 20) // (4 * len(NAMES) * args.groups))
    seconds = measure(sides(device, numel, args.groups), args.rounds)
    figures: dict[str, Any] = {"bytes": 2 * 4 * len(NAMES) * args.groups * numel}
    print(device.describe())
    print(f"{figures['bytes'] / 2**21:.0f} MiB out and back, {args.groups} groups, median of {args.rounds} rounds")
    for name, value in seconds.items():
        rate = figures["bytes"] / value / 1e9
        print(f"{name:8} {value * 1e3:9.2f} ms {rate:8.2f} GB/s {seconds['floor'] / value:6.2f} of the floor")
        figures |= {f"{name}_s": value, f"{name}_ratio": seconds["floor"] / value}
    print(f"offload: {figures['offload_ratio']:.2f}, target >= {TARGET}")
    if device.kind == "cuda":
        with tempfile.TemporaryDirectory() as folder:
            trace = args.trace or Path(folder) / "trace.json"
            figures["overlap"] = overlap(device, numel=numel, groups=args.groups, copy_s=seconds["floor"], trace=trace)
        for direction, copies in figures["overlap"].items():
            print(
                f"{direction}: {copies['copy_s'] * 1e3:.2f} ms of copies on stream {copies['copy_streams']}; kernels "
                f"on {copies['compute_streams']} overlapped {copies['share']:.0%} of it"
            )
    else:
        figures["overlap"] = None
        print(f"overlap is not measured on a card of kind {device.kind}: only on CUDA")
    if args.json:
        args.json.write_text(json.dumps({"device": device.describe(), "figures": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()

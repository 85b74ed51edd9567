"""Run the sides of `benchmarks/offload.py`: one plain copy, the offloader, and one streamed pass, of the same bytes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.rotation import in_rotation
from fusion.npu import Device
from fusion.offload import Offloader, StreamedStates

NAMES = ("master", "exp_avg", "exp_avg_sq")


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
    for number in range(rounds):
        for name in in_rotation(list(ways), number):
            start = time.perf_counter()
            ways[name]()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}

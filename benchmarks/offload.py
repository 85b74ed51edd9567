"""Measure offloading optimizer states to the host and back, against a plain copy of the same bytes.

The states are 192 MiB, of 16 gradient buckets. floor: one flat tensor of all the bytes, copied to pinned host memory
and back into the same device memory: no allocation, no pieces, no bookkeeping. offload: `Offloader` frees the states on
the card and reallocates them. stream: one pass of `StreamedStates` over the same bytes, both directions at once where
the link can. Figures are median seconds for both directions together; ratio = floor / figure. What a card overlaps with
it, `benchmarks/overlap.py` measures.
"""

from collections.abc import Callable

from benchmarks.harness import Arguments, Benchmark, Figures, Option, in_turns, medians, timed

BENCHMARK = Benchmark(
    __doc__,
    [
        Option("device", "auto", smoke="emulated", help="a kind of fusion.npu: auto, npu, cuda, emulated"),
        Option("rounds", 15, smoke=1, help="rounds that are measured"),
    ],
    "offload.ratio >= 0.9",
    sizes={"mib": (192, 2), "groups": (16, 2)},
)
BENCHMARK.run_as(__name__)

import torch

from fusion.npu import Device, open_device
from fusion.offload import Offloader, StreamedStates

NAMES = ("master", "exp_avg", "exp_avg_sq")


def measure(args: Arguments) -> Figures:
    torch.set_num_threads(1)
    return compared(open_device(args.device), args.mib << 20, args.groups, args.rounds)


def compared(device: Device, nbytes: int, groups: int, rounds: int) -> Figures:
    """Return the figures of all sides, in turns, of ``nbytes`` of states of ``groups`` buckets."""
    numel = max(1, nbytes // (4 * len(NAMES) * groups))
    works, moved = sides(device, numel, groups), 2 * 4 * len(NAMES) * groups * numel
    seconds = medians(in_turns({name: lambda _, work=work: timed(work) for name, work in works.items()}, rounds))
    return {
        name: {"seconds": value, "gb_per_s": moved / value / 1e9, "ratio": seconds["floor"] / value}
        for name, value in seconds.items()
    }


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
        for target, source in ((host, flat), (flat, host)):
            target.copy_(source, non_blocking=True)
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

"""Measure the overhead of the emulated NPU: the same operations on it and on the plain CPU, in alternating rounds.

    python benchmarks/emulator.py --json emulator.json

The floor is the time of the operation on the plain CPU. Figures are medians over the rounds, in microseconds of CPU
time per call, summed over all threads, so that other work on the machine does not distort them. A backward pass runs in
the device's thread, as on a real card: its figure includes handing the work over, but not waiting for the thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def microseconds(function: Callable[[], object], seconds: float) -> float:
    """Return the mean CPU time of one call, over at least ``seconds``."""
    for _ in range(20):
        function()
    calls = 0
    start = time.process_time()
    while (elapsed := time.process_time() - start) < seconds:
        for _ in range(50):
            function()
        calls += 50
    return elapsed / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="CPU seconds of each operation in each round")
    args = parser.parse_args()

    import torch  # only now: --help must not wait for torch

    from benchmarks.emulator_operations import operations
    from fusion.npu import open_device
    from fusion.npu.emulator.build import build

    torch.set_num_threads(1)
    start = time.perf_counter()
    build()
    build_s = time.perf_counter() - start
    device = open_device("emulated")
    if device.kind != "emulated":
        raise SystemExit("the emulated NPU cannot be built: no C++ compiler found, install g++")
    sides = {"cpu": operations(torch.device("cpu")), "npu": operations(device.torch_device)}
    times: dict[str, dict[str, list[float]]] = {name: {side: [] for side in sides} for name in sides["cpu"]}
    for _ in range(args.rounds):
        for name in times:
            for side in sides:
                times[name][side].append(microseconds(sides[side][name], args.seconds))

    figures = {}
    print(f"torch {torch.__version__}, one thread, build {build_s:.1f} s")
    print(f"median of {args.rounds} rounds, µs of CPU time per call")
    print(f"{'operation':18} {'cpu (floor)':>12} {'npu':>9} {'overhead':>9}")
    for name, by_side in times.items():
        cpu, npu = (statistics.median(by_side[side]) for side in ("cpu", "npu"))
        figures[name] = {"cpu_us": cpu, "npu_us": npu, "overhead_us": npu - cpu}
        print(f"{name:18} {cpu:12.2f} {npu:9.2f} {npu - cpu:9.2f}")
    if args.json:
        device_line = f"{device.describe()}, one thread"
        args.json.write_text(
            json.dumps({"device": device_line, "build_s": build_s, "figures": figures}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()

"""What the emulated NPU adds to an operation: the same operations on it and on the plain CPU, in alternating rounds.

    python benchmarks/emulator.py --json emulator.json

The floor is the CPU's own time for the operation. Figures are medians over the rounds, in microseconds of processor
time a call, all threads together, so that other work on the machine does not blur them. A backward pass runs in the
card's own thread, as on a real card: handing it over is in its figure, waiting for the thread to wake is not.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fusion.npu import open_device
from fusion.npu.emulator.build import build


def operations(device: torch.device) -> dict[str, Callable[[], object]]:
    """Small operations, so that what is measured is the way to the kernel."""
    x_BD, y_BD, out_BD = (torch.randn(16, 16, device=device) for _ in range(3))
    parameters = [torch.randn(16, 16, device=device, requires_grad=True) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, foreach=True)
    index_B = torch.arange(16, device=device)

    def train() -> None:
        (torch.nn.functional.silu(x_BD @ parameters[0]) @ parameters[1]).sum().backward()

    return {
        "add": lambda: x_BD + y_BD,
        "add_out": lambda: torch.add(x_BD, y_BD, out=out_BD),
        "mul_": lambda: out_BD.mul_(1.0),
        "matmul": lambda: x_BD @ y_BD,
        "view": lambda: x_BD.view(-1),
        "empty": lambda: torch.empty(16, 16, device=device),
        "index": lambda: x_BD[index_B],
        "cat": lambda: torch.cat([x_BD, y_BD]),
        "forward_backward": train,
        "adamw_step": optimizer.step,
    }


def microseconds(function: Callable[[], object], seconds: float) -> float:
    """Mean processor time of one call over at least `seconds`."""
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
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="of one operation in one round")
    args = parser.parse_args()
    torch.set_num_threads(1)

    start = time.perf_counter()
    build()
    build_s = time.perf_counter() - start
    device = open_device("emulated")
    if device.kind != "emulated":
        raise SystemExit("there is no compiler to build the emulated NPU with")
    sides = {"cpu": operations(torch.device("cpu")), "npu": operations(device.torch_device)}
    times: dict[str, dict[str, list[float]]] = {name: {side: [] for side in sides} for name in sides["cpu"]}
    for _ in range(args.rounds):
        for name in times:
            for side in sides:
                times[name][side].append(microseconds(sides[side][name], args.seconds))

    figures = {}
    print(f"torch {torch.__version__}, one thread, build {build_s:.1f} s")
    print(f"median of {args.rounds} rounds, µs of processor time a call")
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

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
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TARGET = 0.9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--device", default="auto", help="a kind of fusion.npu: auto (default), npu, cuda, emulated")
    parser.add_argument("--mib", type=int, default=192, help="MiB of optimizer states")
    parser.add_argument("--groups", type=int, default=16, help="gradient buckets to which the states belong")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--trace", type=Path, help="CUDA: write the profile to this file (Chrome trace)")
    args = parser.parse_args()

    import torch  # only now: --help must not wait for torch

    from benchmarks.offload_overlap import overlap
    from benchmarks.offload_sides import NAMES, measure, sides
    from fusion.npu import open_device

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

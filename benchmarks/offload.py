"""Measure offloading optimizer states to the host and back, against a plain copy of the same bytes.

    python benchmarks/offload.py --json offload.json [--device cuda --mib 4096 --trace offload_trace.json]

floor: one flat tensor of all the bytes, copied to pinned host memory and back into the same device memory: no
allocation, no pieces, no bookkeeping. offload: `Offloader` frees the states on the card and reallocates them. stream:
one pass of `StreamedStates` over the same bytes, both directions at once where the link can. Figures are median seconds
for both directions together; ratio = floor / figure.

On a CUDA card a profile of copies and matrix products then shows for what share of the copies' time kernels ran on the
compute stream. What an emulated NPU overlaps, `benchmarks/overlap.py` measures.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.offload_sides:measure"},
    [
        Option("device", "auto", smoke="emulated", help="a kind of fusion.npu: auto, npu, cuda, emulated"),
        Option("mib", 192, smoke=2, help="MiB of optimizer states"),
        Option("groups", 16, smoke=2, help="gradient buckets to which the states belong"),
        Option("rounds", 15, smoke=1, help="rounds that are measured"),
        Option("trace", None, help="CUDA: write the profile to this file (Chrome trace)"),
    ],
    {"offload.ratio": ">= 0.9"},
)

if __name__ == "__main__":
    BENCHMARK.main()

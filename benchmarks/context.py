"""Measure what context parallelism saves of a training card's memory, on emulated NPUs.

    python benchmarks/context.py --json context.json

peak_bytes, by cp: peak of HBM in forward and backward pass of one micro-batch of whole sequences, from the allocator,
without what is held before (weights, gradients, states) and without recomputation. ratio: that over the one of cp=1.
planned: the cost model's estimate of the ratio. seconds: of the pass, where all cards share the machine's cores.

A dense and a sparse layer of grouped-query attention (fp32), one process and one thread a card.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.context_sides:measure"},
    [
        Option("tokens", 8192, smoke=256, help="of the micro-batch"),
        Option("sequences", 2, help="that share them"),
        Option("hidden", 128, smoke=32),
    ],
    {"ratio.2": "<= 0.6", "ratio.4": "<= 0.35"},
)

if __name__ == "__main__":
    BENCHMARK.main()

"""Measure training a group whose responses share the rows of their prompt against training whole sequences.

    python benchmarks/shared_prefix.py --json shared_prefix.json [--rounds 3]

n8      a prompt of 1,024 tokens, 8 responses of 64: time of forward and backward without shared rows over that with
        `training.share_prefixes=auto`; the floor is that ratio if time were rows
short   a prompt of 16 tokens, 8 responses of 512: `auto` shares nothing, and costs nothing

A Qwen3-MoE of 53M parameters (fp32) on one emulated NPU with one thread. Both sides run in turns; ratios are those of
medians.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.shared_prefix_sides:measure"},
    [
        Option("rounds", 3, smoke=1, help="rounds that are measured"),
        Option("layers", 4, smoke=2),
        Option("hidden", 512, smoke=64),
        Option("long", 1024, smoke=256),
        Option("answer", 512, smoke=64),
    ],
    {"n8.ratio": ">= 3", "short.ratio": ">= 0.95", "short.shared_rows_share": "<= 0"},
)

if __name__ == "__main__":
    BENCHMARK.main()

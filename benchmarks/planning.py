"""Measure planning a switch at scale, and verify the plan on every rank.

    python benchmarks/planning.py --json planning.json

Pangu 718B (61 layers) on the 768 dies of a CloudMatrix 384, in bfloat16, between TP8 EP8 PP16 and three engines in
TP8 EP256, in both directions, each planned from shapes alone for the first host, by fresh processes over gloo:

    planners            processes of the host that plan
    cpu_s               CPU seconds of `plan_switch`, its layouts included
    peak_mb             resident memory of the planner at its peak beyond that of the process with everything imported,
                        with the parts of all ranks of its host
    parts_cpu_s         CPU seconds in which the planner makes and sends the parts of all ranks of its host
    part_kb             bytes that a rank receives; of the largest part
    part_cpu_s          CPU seconds in which a rank that does not plan receives and decodes its part
    part_mb             its resident memory at the peak, as peak_mb
    over_bound          bytes of weights and buffers at the peak over the bound (max(A, B) + 4 buckets), on the worst of
                        all ranks, counted from the rounds
    busiest             bytes that the busiest rank sends over those of the busiest in the cost model, which divides
                        every share among all its holders
    missing             bytes that ranks need and do not receive, or receive twice, by the cost model's count
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.planning_sides:measure"},
    [Option("layers", 61, smoke=4), Option("ranks", 768, smoke=16), Option("host", 16, smoke=2)],
    {
        "*.planners": "<= 1",
        "*.cpu_s": "<= 5",
        "*.peak_mb": "<= 200",
        "*.part_cpu_s": "<= 0.5",
        "*.part_mb": "<= 20",
        "*.over_bound": "<= 1",
        "*.busiest": "<= 1.1",
        "*.missing": "<= 0",
    },
)

if __name__ == "__main__":
    BENCHMARK.main()

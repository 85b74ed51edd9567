"""Measure what conversations cost while their environments work.

    python benchmarks/environments.py [--only pool] [--json PATH]

pool: conversations that are away in one pool process, which all wait in their environments, and then take turns: each
reply is followed by the next step at once. Memory is what the process and its pool hold above the idle ones (idle_mb),
share of a core that of both together. Floor: as many sleeping tasks of asyncio in a process of their own.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"pool": "benchmarks.environments_pool:away"},
    [
        Option("conversations", 1000, smoke=20, help="that are away at once"),
        Option("latency_s", 10.0, smoke=0.2, help="of an environment's step, where they take turns"),
        Option("seconds", 30.0, smoke=0.5, help="of each measurement"),
    ],
    {"pool.waiting_mb": "<= 200", "pool.turning_mb": "<= 200", "pool.waiting_core": "<= 0.05"},
)

if __name__ == "__main__":
    BENCHMARK.main()

"""Measure what conversations cost while their environments work.

    python benchmarks/environments.py [--only zero_latency,latency,kv] [--json PATH]

pool: conversations that are away in one pool process, which all wait in their environments, and then take turns: each
reply is followed by the next step at once. Memory is what the process and its pool hold above the idle ones (idle_mb),
share of a core that of both together. Floor: as many sleeping tasks of asyncio in a process of their own.

zero_latency, latency, kv: conversations on an engine of a paced card (OLMoE-1B-7B on a 910C die) whose environments
answer at once, or after ten decode steps. ratio: tokens/s over those of responses of one turn with as many sampled
tokens, the two in turns, of the medians over the rounds. occupancy: share of the slots that decode. restored: share of
the context of later turns whose KV is not computed again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {
        "pool": "benchmarks.environments_pool:away",
        "zero_latency": "benchmarks.environments_paced:zero_latency",
        "latency": "benchmarks.environments_paced:latency",
        "kv": "benchmarks.environments_paced:kv",
    },
    [
        Option("conversations", 1000, smoke=20, help="that are away at once"),
        Option("latency_s", 10.0, smoke=0.2, help="of an environment's step, where they take turns"),
        Option("seconds", 30.0, smoke=0.5, help="of each measurement of `pool`"),
        Option("rounds", 3, smoke=1, help="of the paced parts"),
        Option("slots", 16, smoke=2, help="sequences that the paced engine decodes at a time"),
        Option("turns", 4, smoke=2, help="of a conversation"),
        Option("turn_tokens", 32, smoke=4, help="that a turn samples"),
        Option("observation_tokens", 16, smoke=4, help="that an environment answers"),
        Option("speed", 0.5, smoke=4.0, help="modelled seconds a second of the paced engine"),
    ],
    {
        "pool.waiting_mb": "<= 200",
        "pool.turning_mb": "<= 200",
        "pool.waiting_core": "<= 0.05",
        "zero_latency.ratio": ">= 0.95",
        "latency.occupancy": ">= 0.9",
        "kv.restored": ">= 0.95",
    },
)

if __name__ == "__main__":
    BENCHMARK.main()

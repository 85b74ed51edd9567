"""Measure what the overlap of switch, offload and compute hides, on emulated cards whose copies take time.

    python benchmarks/overlap.py --json overlap.json

Two emulated NPUs with `device.streams=timed`: copies to and from the host and collectives last as long as their bytes
take at configured rates, beside what the card computes; here so that each takes about --seconds. The optimizer's states
leave while the weights switch to the engine's layout by collectives, and return while the card computes matrix
products, as between the phases of a step.

    …_s                 seconds, alone and together: the minimum of rounds in which all ran in turn, since other
                        programs on the machine only add to it
    hidden_share        (seconds of both alone - together) / seconds of the shorter one: 1 where it is hidden, 0 where
                        nothing overlaps; of both pairs, all seconds hidden over all that could be
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.overlap_sides:measure"},
    [
        Option("seconds", 0.4, smoke=0.05, help="of the copies, and of the collectives, alone"),
        Option("rounds", 5, smoke=1, help="rounds that are measured"),
        Option("mib", 16, smoke=1, help="MiB of optimizer states on each card"),
    ],
    {"overlap.hidden_share": ">= 0.8"},
)

if __name__ == "__main__":
    BENCHMARK.main()

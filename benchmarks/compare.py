"""Compare deployments and systems side by side, and with what their authors published, on one page.

    bash recipes/compare.sh                        writes runs/compare/compare.html
    bash recipes/compare.sh --simulated            … and the published model and cluster in the simulator

deployments: separate, colocated, full and hybrid at staleness 0 and 1, with the same prompts, lengths and reference, on
emulated cards of modelled speed (`device=paced`): processes, Ray, queue and switches are real, and only the time that
cards take is modelled. On two cores idle cards would lend their CPU to the others otherwise.
schedules: requests in order of arrival, in the order `history`, without and in chunks, and HistoPipe one step ahead.
drafts: an engine's tokens a CPU second with drafts and without, in turns: this is wall clock.

Every cell of the table says where it is from: `measured` (a clock around real work), `paced`, `simulated`, `published`
or `input` (chosen, not found out). The page also has a typical step of every deployment on one axis of time.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.compare_runs:measure"},
    [
        Option("out", "runs/compare", smoke="", help="folder of the runs and of compare.html"),
        Option("simulated", False, help="simulate the published model and cluster, too"),
        Option("steps", 2, smoke=1, help="measured steps of each run"),
        Option("cards", 4, smoke=2),
        Option("prompts", 16, smoke=2),
        Option("speed", 80.0, smoke=3000.0),
        Option("bounds", (0, 1), smoke=(0,)),
        Option("deployments", ("separate", "colocated", "full", "hybrid"), smoke=("separate", "full")),
        Option("rounds", 1, smoke=1),
        Option("layers", 8, smoke=1),
        Option("live", (1, 8), smoke=(1,)),
        Option("new_tokens", 128, smoke=8),
    ],
    {"*.pace_overrun": "<= 0.03"},
)

if __name__ == "__main__":
    BENCHMARK.main()

"""Measure learning: the quickstart over seeds and deployments, and the long-answer task at staleness 0, 1 and 2.

    python benchmarks/learning.py --json learning.json --svg benchmarks/learning.svg
    python benchmarks/learning.py --curves learning.json --svg benchmarks/learning.svg     (only draw the plot)
    python benchmarks/learning.py algorithm.correction=none                                (override the config)
    python benchmarks/learning.py --only quickstart --fusion colocated,separate

staleness: all runs share one base model and the default correction; the seed determines prompts and samples, hence the
whole run. The lag is forced: the engine has room for every sample that the bound admits, so samples are about as old as
the bound allows. The final reward of a run is that of its last policy on held-out prompts, which are the same for all
runs of a seed; differences are paired with the run of the same seed at staleness 0.

quickstart: each seed makes its own base model and runs `recipes/quickstart.sh` from it in every deployment: mean
rewards of the first and last five steps, the seconds of making the base model, of the steps, and of the whole command,
which includes the start of its processes but not the base model.
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402


def check(args: Namespace) -> str:
    without = args.curves and (args.overrides or args.given & {"seeds", "steps", "jobs"})
    return "--curves runs nothing: --seeds, --steps, --jobs and overrides have no effect with it" if without else ""


BENCHMARK = Benchmark(
    __doc__,
    {"staleness": "benchmarks.learning_runs:staleness", "quickstart": "benchmarks.learning_runs:quickstart"},
    [
        Option("seeds", None, smoke="1", help="number of seeds (default: 10, of `quickstart` 5)"),
        Option("steps", None, smoke="2", help="training steps of a run (default: those of the task)"),
        Option("jobs", 2, help="runs of `staleness` at a time"),
        Option("fusion", "colocated", help="deployments of `quickstart`, separated by commas"),
        Option("curves", None, help="read the curves of an earlier --json, run nothing"),
        Option("svg", None, help="write the plot of `staleness` to this file"),
        Option("bounds", "0,1,2", smoke="0,1"),
        Option("base", "", smoke="0"),
        Option("prompts", 64, smoke=8),
    ],
    {"staleness.?.difference": ">= -0.03", "staleness.?.worst": ">= -0.15"},
    default=("staleness",),
    extra="overrides of the runs' config",
    check=check,
)

if __name__ == "__main__":
    BENCHMARK.main()

"""Measure the speedup of stale-synchronous training: the same work in every mode, on emulated cards of modelled speed.

    python benchmarks/stalesync.py --json stalesync.json          (21 minutes on two cores)
    python benchmarks/stalesync.py --modes colocated:1,hybrid:2:2 deployment:bound[:cards that only generate]
    python benchmarks/stalesync.py --lending                      lending of cards (6 minutes)
    python benchmarks/stalesync.py --calibrate                    recompute the share of generation

Processes, Ray, queue and switches are real; only the time that cards take is modelled (`device=paced`), so the modes
differ in how they spend the cards' time. Every mode has the same prompts, lengths (`stalesync.prompts.lengths`), cards
and pace. Synchronous `separate` is run at every split of the cards, and the best is reported; splits whose modelled
work alone takes longer than the best measured time are skipped. The one free parameter, the factor by which the cost of
training is multiplied, is set so that `colocated` is the published 1.785 times as fast as `separate`
(`benchmarks/stalesync_calibration.json`).

The work-conserving bound of a mode is the speed at which all its modelled work would be done if it were spread over all
cards and decoded in full batches: every prompt prefilled once, every token decoded, every sample trained. Utilisation
is the modelled work of full batches divided by the cards' time; `lost` breaks down the rest. A run whose cards overran
their modelled time by more than 3 % is invalid.

--lending: in the tail of a step, cards that train leave generation, and train what is ready: the same run with and
without (`stalesync.lend`). Running ahead, steps are long and short in turns, so only whole runs are compared.
"""

import sys
from argparse import Namespace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import Benchmark, Option  # noqa: E402

CALIBRATION = Path(__file__).with_name("stalesync_calibration.json")


def check(args: Namespace) -> str:
    chosen = args.given & {"modes", "calibrate", "lending"}
    if len(chosen) > 1:
        return f"{' and '.join(f'--{name}' for name in sorted(chosen))} exclude each other"
    return "--json is written only without --calibrate" if args.json and "calibrate" in chosen else ""


BENCHMARK = Benchmark(
    __doc__,
    {"": "benchmarks.stalesync_modes:measure"},
    [
        Option("modes", None, help="run only these; no gain is computed"),
        Option("calibrate", False, help="recompute the share of generation and save it"),
        Option("lending", False, help="compare a run with one that lends cards"),
        Option("rounds", 1, help="of --lending"),
        Option("steps", 6, smoke=1),
        Option("lending_steps", 14, smoke=1),
        Option("cards", 8, smoke=2),
        Option("prompts", 64, smoke=2),
        Option("speed", 96.0, smoke=3000.0, help=""),
        Option("bounds", (0, 1, 2), smoke=(0, 1)),
    ],
    {
        "*.pace_overrun": "<= 0.03",
        "*.stale_beyond_bound": "<= 0",
        "*.mixed": ">= 1",
        "*.suspended": ">= 1",
        "*.over_synchronous": ">= 1",
        "best_ratio_to_bound": ">= 0.92",
        "stalesync_gain": ">= 1",
        "calibration_error": "<= 0.05",
    },
    check=check,
)

if __name__ == "__main__":
    BENCHMARK.main()

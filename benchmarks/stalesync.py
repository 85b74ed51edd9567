"""Measure the speedup of stale-synchronous training: the same work in every mode, on emulated cards of modelled speed.

Processes, Ray, queue and switches are real; only the time that cards take is modelled (`device=paced`). Every mode has
the same prompts, lengths (`stalesync.prompts.lengths`), cards and pace. Synchronous `separate` is run at every split of
the cards whose modelled work alone takes less than the best measured time, and the best is reported. The one free
parameter, the factor of the cost of training, is set so that `colocated` is the published 1.785 times as fast as
`separate` (`benchmarks/stalesync_calibration.json`).

The work-conserving bound of a mode is the speed at which all its modelled work would be done if it were spread over all
cards in full batches: every prompt prefilled once, every token decoded, every sample trained. Utilisation is that work
over the cards' time. A run whose cards overran their modelled time by more than 3 % is invalid.

--lending: in the tail of a step, cards that train leave generation, and train what is ready: the same run with and
without (`stalesync.lend`). Running ahead, steps are long and short in turns, so only whole runs are compared.
"""

import json
import sys
from dataclasses import replace
from itertools import product
from math import inf
from pathlib import Path

from benchmarks.harness import Arguments, Benchmark, Figures, Option

CALIBRATION = Path(__file__).with_name("stalesync_calibration.json")


def check(args: Arguments) -> str:
    chosen = args.given & {"calibrate", "lending"}
    if len(chosen) > 1:
        return "--calibrate and --lending exclude each other"
    return "--json is written only without --calibrate" if args.json and "calibrate" in chosen else ""


BENCHMARK = Benchmark(
    __doc__,
    [
        Option("calibrate", False, help="recompute the share of generation and save it"),
        Option("lending", False, help="compare a run with one that lends cards"),
        Option("rounds", 1, help="of --lending"),
    ],
    "*.pace_overrun <= 0.03, *.stale_beyond_bound <= 0, *.mixed >= 1, *.suspended >= 1, *.over_synchronous >= 1, "
    "best_ratio_to_bound >= 0.92, stalesync_gain >= 1, calibration_error <= 0.05",
    check=check,
    sizes={"steps": (6, 1), "lending_steps": (14, 1), "cards": (8, 2), "prompts": (64, 2)}
    | {"speed": (52.0, 3000.0), "bounds": ((0, 1, 2), (0, 1))},
)
BENCHMARK.run_as(__name__)

from benchmarks.paced import Measured, Mode, Workload, run
from benchmarks.runs import temporary_folder
from tests.helpers import MINIMAL, runnable_checkpoint

PUBLISHED = {"fusion_gain": 1.785, "stalesync_gain": 1.40, "total_gain": 2.5}


def measure(args: Arguments) -> Figures:
    training = json.loads(CALIBRATION.read_text())["training"]
    workload = Workload(training=training, cards=args.cards, prompts=args.prompts, speed=args.speed)
    with temporary_folder() as folder:
        runnable_checkpoint(folder / "model", **MINIMAL)
        if args.lending:
            return lending(args, replace(workload, training=1.0, speed=32.0, sequences=64), folder)
        if args.calibrate:
            CALIBRATION.write_text(json.dumps(calibrated(args, workload, folder), indent=2) + "\n")
            return json.loads(CALIBRATION.read_text())
        return compared(args, workload, folder)


def compared(args: Arguments, workload: Workload, folder: Path) -> Figures:
    def measured(fusion: str, bound: int, generating: int | None = None) -> Measured:
        return run(Mode(fusion, bound, generating), workload, folder, args.steps)

    colocated = measured("colocated", 0)
    splits: dict[int, Measured] = {}
    min_step_s = {cards: colocated.separate_s(cards, ahead=False) for cards in range(1, workload.cards)}
    for cards in sorted(min_step_s, key=lambda cards: min_step_s[cards]):
        if min_step_s[cards] < min((one.step_s for one in splits.values()), default=inf):
            splits[cards] = measured("separate", 0, cards)
    modes = {"separate_s0": min(splits.values(), key=lambda one: one.step_s), "colocated_s0": colocated}
    for bound in args.bounds[1:]:
        modes[f"separate_s{bound}"] = measured("separate", bound, colocated.best_split(ahead=True))
        modes[f"colocated_s{bound}"] = measured("colocated", bound)
        modes[f"hybrid_s{bound}"] = measured("hybrid", bound, max(1, workload.cards // 4))
    figures: Figures = {name: one.figures(colocated) for name, one in modes.items()}
    speed = {name: one["tokens_per_s"] for name, one in figures.items()}
    for name in figures:
        if not name.endswith("s0") and (synchronous := speed.get(f"{name[:-1]}0")):
            figures[name]["over_synchronous"] = speed[name] / synchronous
    best = max((name for name in speed if not name.endswith("s0")), key=lambda name: speed[name])
    figures |= {
        "best": best,
        "best_ratio_to_bound": figures[best]["ratio_to_bound"],
        "fusion_gain": speed["colocated_s0"] / speed["separate_s0"],
        "stalesync_gain": speed[best] / speed["colocated_s0"],
        "total_gain": speed[best] / speed["separate_s0"],
    }
    figures["calibration_error"] = abs(figures["fusion_gain"] / PUBLISHED["fusion_gain"] - 1)
    by_split = {str(cards): split.figures(colocated)["tokens_per_s"] for cards, split in splits.items()}
    return figures | {"published": PUBLISHED, "splits": by_split}


def lending(args: Arguments, workload: Workload, folder: Path) -> Figures:
    mode, figures = Mode("hybrid", 1, workload.cards // 2), dict[str, Figures]()
    sides = ("true", "false")
    for round, lend in product(range(args.rounds), sides):
        measured = run(mode, workload, folder, args.lending_steps, [f"stalesync.lend={lend}"])
        step_s = [row["timing_s/step"] * workload.speed for row in measured.rows]
        lent_s = measured.mean("rollout/lent_card_s") * workload.speed
        own = {"lent_card_s": lent_s, "min_step_s": min(step_s), "max_step_s": max(step_s)}
        figures[f"lend={lend}, round {round + 1}"] = measured.figures() | own
    on, off = (sum(one["step_s"] for name, one in figures.items() if f"lend={lend}" in name) for lend in sides)
    return figures | {"gain": off / on}


def calibrated(args: Arguments, workload: Workload, folder: Path) -> Figures:
    """Find the factor of the cost of training. One run of each split suffices for all factors: the rest of a step takes
    as long whatever training takes."""
    first = replace(workload, training=8.0)
    colocated = run(Mode("colocated", 0), first, folder, args.steps)
    splits = [run(Mode("separate", 0, cards), first, folder, args.steps) for cards in range(2, first.cards - 1)]

    def gain(times: float) -> float:
        own, *others = (one.step_s + (times / first.training - 1) * one.train_s for one in (colocated, *splits))
        return min(others) / own

    curve = {0.5 * i: gain(0.5 * i) for i in range(2, 80)}
    times = next((times for times, speedup in curve.items() if speedup >= PUBLISHED["fusion_gain"]), None)
    if times is None:
        sys.exit(f"colocated is at most {max(curve.values()):.3f} times as fast as separate, at any cost of training")
    work = colocated.generation_s, colocated.training_s * times / first.training
    return {
        "training": times,
        "share_of_generation": work[0] / sum(work),
        "predicted_fusion_gain": curve[times],
        "how": "least multiple of training at which, of the seconds measured at training = 8 in one run of each split, "
        "colocated is the published 1.785 times as fast as the best split of separate; a multiple of 0.5",
        "curve": {str(times): round(speedup, 3) for times, speedup in curve.items() if times % 4 == 0},
    }

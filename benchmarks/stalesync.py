"""What running ahead is worth: the same work in every mode, on emulated cards that take modelled time.

    python benchmarks/stalesync.py --json stalesync.json          (21 minutes on two cores)
    python benchmarks/stalesync.py --calibrate                    finds the share of generation anew

Real processes, Ray, queue and switches; only the cards' seconds are modelled (`device=paced`), so what is compared is
how the cards' time is spent. Every mode has the same prompts, lengths (`stalesync.prompts.lengths`), cards and pace.
`separate` synchronous is taken at the best of all splits of the cards; splits whose modelled work alone takes longer
than the best one's measured time are not run. The one free parameter, how many times training counts, is set so that
`colocated` is the published 1.785 times as fast as `separate` (`benchmarks/stalesync_calibration.json`).

The work-conserving bound of a mode is the speed at which all its modelled work would be done if it were spread over all
cards, decoding in full batches: prompts prefilled once, tokens decoded, an update of every sample. Utilisation is the
modelled work of full batches over the cards' time; what is missing from 1 is told by name (`lost`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.stalesync_modes import CARDS, Figures, Mode, Workload, make_model, run  # noqa: E402

PUBLISHED = {"fusion_gain": 1.785, "stalesync_gain": 1.40, "total_gain": 2.5}
TOLERANCE, TARGET = 0.05, 0.92
CALIBRATION = Path(__file__).with_name("stalesync_calibration.json")
HYBRID = CARDS // 4
"""Cards of `hybrid` that only generate"""


def best_split(workload: Workload, folder: Path, colocated: Figures) -> dict[int, Figures]:
    """`separate` synchronous by cards that generate, as far as a split could be the best."""
    found: dict[int, Figures] = {}
    splits = sorted(range(1, CARDS), key=lambda cards: least_step_s(colocated, cards))
    for cards in splits:
        fastest = min((figures.step_s for figures in found.values()), default=float("inf"))
        if least_step_s(colocated, cards) < fastest:
            found[cards] = told(run(Mode("separate", 0, cards), workload, folder))
    return found


def least_step_s(figures: Figures, generating: int) -> float:
    """Seconds of a synchronous step whose modelled work is all that takes time, on so many cards and the others."""
    return figures.generation_s / generating + figures.training_s / (CARDS - generating)


def balanced(figures: Figures) -> int:
    """Cards that generate where both sides go on all the time."""
    return min(range(1, CARDS), key=lambda k: max(figures.generation_s / k, figures.training_s / (CARDS - k)))


def told(figures: Figures) -> Figures:
    print(figures, flush=True)
    return figures


def measure(workload: Workload, folder: Path) -> dict:
    colocated = told(run(Mode("colocated", 0), workload, folder))
    splits = best_split(workload, folder, colocated)
    separate = min(splits.values(), key=lambda figures: figures.step_s)
    modes = {"separate_s0": separate, "colocated_s0": colocated}
    for bound in (1, 2):
        modes[f"separate_s{bound}"] = told(run(Mode("separate", bound, balanced(colocated)), workload, folder))
        modes[f"colocated_s{bound}"] = told(run(Mode("colocated", bound), workload, folder))
        modes[f"hybrid_s{bound}"] = told(run(Mode("hybrid", bound, HYBRID), workload, folder))
    figures: dict = {name: found.as_dict(colocated) for name, found in modes.items()}
    speed = {name: found["tokens_per_s"] for name, found in figures.items()}
    best = max((name for name in speed if not name.endswith("s0")), key=lambda name: speed[name])
    figures["best"] = best
    figures["fusion_gain"] = speed["colocated_s0"] / speed["separate_s0"]
    figures["stalesync_gain"] = speed[best] / speed["colocated_s0"]
    figures["total_gain"] = speed[best] / speed["separate_s0"]
    figures["published"] = PUBLISHED
    figures["splits"] = {str(cards): found.as_dict(colocated)["tokens_per_s"] for cards, found in splits.items()}
    return figures


def misses(figures: dict) -> list[str]:
    """Targets that were not reached, and runs that say nothing."""
    modes = {name: found for name, found in figures.items() if isinstance(found, dict) and "tokens_per_s" in found}
    found = []
    for name, mode in modes.items():
        if mode["pace_overrun"] > 0.03:
            found.append(f"{name} is invalid: overrun {mode['pace_overrun']:.1%}")
        if mode["max_staleness_seen"] > int(name[-1]):
            found.append(f"{name}: a sample {mode['max_staleness_seen']} versions old was trained")
        twin = modes.get(f"{name[:-1]}0")
        if not name.endswith("s0"):
            if twin and mode["tokens_per_s"] <= twin["tokens_per_s"]:
                found.append(f"{name} is not ahead of its synchronous twin")
            if not (mode["mixed"] and mode["suspended"]):
                found.append(f"{name}: no sample was suspended, or none is of several versions")
    best = modes[figures["best"]]
    if best["ratio_to_bound"] < TARGET:
        found.append(f"{figures['best']} reaches {best['ratio_to_bound']:.3f} of its bound, target {TARGET}")
    if best["tokens_per_s"] <= max(mode["tokens_per_s"] for name, mode in modes.items() if name.endswith("s0")):
        found.append("a synchronous mode is the fastest")
    if abs(figures["fusion_gain"] / PUBLISHED["fusion_gain"] - 1) > TOLERANCE:
        found.append(f"fusion_gain {figures['fusion_gain']:.3f}: the calibration does not hold, --calibrate")
    return found


def calibrate(folder: Path) -> dict:
    """How many times training has to count. One run of each split tells it for all values: what is no training takes
    as long whatever training takes."""
    first = Workload(training=8.0)
    colocated = told(run(Mode("colocated", 0), first, folder))
    splits = {cards: told(run(Mode("separate", 0, cards), first, folder)) for cards in range(2, CARDS - 1)}

    def gain(times: float) -> float:
        def step_s(figures: Figures) -> float:
            return figures.step_s + (times / first.training - 1) * figures.train_s

        return min(map(step_s, splits.values())) / step_s(colocated)

    curve = {round(0.5 * i, 1): gain(0.5 * i) for i in range(2, 80)}
    fits = [times for times, found in curve.items() if found >= PUBLISHED["fusion_gain"]]
    if not fits:
        sys.exit(f"colocated is at most {max(curve.values()):.3f} times as fast as separate, whatever training takes")
    times = min(fits)
    work = colocated.generation_s, colocated.training_s * times / first.training
    return {
        "training": times,
        "share_of_generation": work[0] / sum(work),
        "predicted_fusion_gain": curve[times],
        "how": "least multiple of training at which, of the seconds measured at training = 8 in one run of each split, "
        "colocated is the published 1.785 times as fast as the best split of separate; a multiple of 0.5",
        "curve": {str(times): round(found, 3) for times, found in curve.items() if times % 4 == 0},
    }


def show(figures: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = "mode", "tokens/s", "of bound", "utilisation", "tail s", "switch s", "max stale", "suspended", "mixed"
    table = Table(*columns, "overrun")
    for name, mode in figures.items():
        if isinstance(mode, dict) and "tokens_per_s" in mode:
            lost = f"{mode['utilisation']:.1%}"
            row = f"{mode['tokens_per_s']:,.0f}", f"{mode['ratio_to_bound']:.3f}", lost, f"{mode['tail_s']:.1f}"
            row += f"{mode['switch_s']:.1f}", str(mode["max_staleness_seen"]), str(mode["suspended"])
            table.add_row(name, *row, str(mode["mixed"]), f"{mode['pace_overrun']:.1%}")
    console = Console(width=130)
    console.print(table)
    for name, published in PUBLISHED.items():
        console.print(f"{name}: {figures[name]:.3f} (published {published})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--calibrate", action="store_true", help="find the share of generation and write it down")
    parser.add_argument(
        "--modes", help="only these, e.g. colocated:1,hybrid:2:2 (deployment:bound[:cards]); no targets"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        if args.calibrate:
            CALIBRATION.write_text(json.dumps(calibrate(folder), indent=2) + "\n")
            print(CALIBRATION.read_text())
            return
        workload = Workload(training=json.loads(CALIBRATION.read_text())["training"])
        if args.modes:
            for mode in args.modes.split(","):
                told(run(Mode.parse(mode), workload, folder))
            return
        figures = measure(workload, folder)
    show(figures)
    missed = misses(figures)
    for line in missed:
        print("MISSED:", line)
    if args.json:
        pace = f"{workload.pace}; seconds and tokens are the modelled ones"
        told_json = {"pace": pace, "workload": asdict(workload), "figures": figures, "missed": missed}
        args.json.write_text(json.dumps(told_json, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Measure the speedup of stale-synchronous training: the same work in every mode, on emulated cards of modelled speed.

    python benchmarks/stalesync.py --json stalesync.json          (21 minutes on two cores)
    python benchmarks/stalesync.py --calibrate                    recompute the share of generation

Processes, Ray, queue and switches are real; only the time that cards take is modelled (`device=paced`), so the modes
differ in how they spend the cards' time. Every mode has the same prompts, lengths (`stalesync.prompts.lengths`), cards
and pace. Synchronous `separate` is run at every split of the cards, and the best is reported; splits whose modelled
work alone takes longer than the best measured time are skipped. The one free parameter, the factor by which the cost of
training is multiplied, is set so that `colocated` is the published 1.785 times as fast as `separate`
(`benchmarks/stalesync_calibration.json`).

The work-conserving bound of a mode is the speed at which all its modelled work would be done if it were spread over all
cards and decoded in full batches: every prompt prefilled once, every token decoded, every sample trained. Utilisation
is the modelled work of full batches divided by the cards' time; `lost` breaks down the rest.
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
"""Cards of `hybrid` that only generate."""


def best_split(workload: Workload, folder: Path, colocated: Figures) -> dict[int, Figures]:
    """Run synchronous `separate` at every split that could be the best; return figures by generating cards."""
    figures_by_cards: dict[int, Figures] = {}
    splits = sorted(range(1, CARDS), key=lambda cards: min_step_s(colocated, cards))
    for cards in splits:
        fastest_s = min((figures.step_s for figures in figures_by_cards.values()), default=float("inf"))
        if min_step_s(colocated, cards) < fastest_s:
            figures_by_cards[cards] = run_and_print(Mode("separate", 0, cards), workload, folder)
    return figures_by_cards


def min_step_s(figures: Figures, generating: int) -> float:
    """Return a lower bound of a synchronous step's seconds: its modelled work alone, with ``generating`` cards that
    generate and the others training."""
    return figures.generation_s / generating + figures.training_s / (CARDS - generating)


def balanced(figures: Figures) -> int:
    """Return the number of generating cards that minimises the step's time when both sides run continuously."""
    return min(range(1, CARDS), key=lambda k: max(figures.generation_s / k, figures.training_s / (CARDS - k)))


def run_and_print(mode: Mode, workload: Workload, folder: Path) -> Figures:
    figures = run(mode, workload, folder)
    print(figures, flush=True)
    return figures


def measure(workload: Workload, folder: Path) -> dict:
    colocated = run_and_print(Mode("colocated", 0), workload, folder)
    splits = best_split(workload, folder, colocated)
    separate = min(splits.values(), key=lambda figures: figures.step_s)
    modes = {"separate_s0": separate, "colocated_s0": colocated}
    for bound in (1, 2):
        modes[f"separate_s{bound}"] = run_and_print(Mode("separate", bound, balanced(colocated)), workload, folder)
        modes[f"colocated_s{bound}"] = run_and_print(Mode("colocated", bound), workload, folder)
        modes[f"hybrid_s{bound}"] = run_and_print(Mode("hybrid", bound, HYBRID), workload, folder)
    figures: dict = {name: measured.as_dict(colocated) for name, measured in modes.items()}
    speed = {name: mode["tokens_per_s"] for name, mode in figures.items()}
    best = max((name for name in speed if not name.endswith("s0")), key=lambda name: speed[name])
    figures["best"] = best
    figures["fusion_gain"] = speed["colocated_s0"] / speed["separate_s0"]
    figures["stalesync_gain"] = speed[best] / speed["colocated_s0"]
    figures["total_gain"] = speed[best] / speed["separate_s0"]
    figures["published"] = PUBLISHED
    figures["splits"] = {str(cards): split.as_dict(colocated)["tokens_per_s"] for cards, split in splits.items()}
    return figures


def misses(figures: dict) -> list[str]:
    """Return a line for each target that was missed and each run that is invalid."""
    modes = {name: mode for name, mode in figures.items() if isinstance(mode, dict) and "tokens_per_s" in mode}
    missed = []
    for name, mode in modes.items():
        if mode["pace_overrun"] > 0.03:
            missed.append(f"{name} is invalid: overrun {mode['pace_overrun']:.1%}")
        if mode["max_staleness_seen"] > int(name[-1]):
            missed.append(f"{name}: a sample with staleness {mode['max_staleness_seen']} was trained")
        synchronous = modes.get(f"{name[:-1]}0")
        if not name.endswith("s0"):
            if synchronous and mode["tokens_per_s"] <= synchronous["tokens_per_s"]:
                missed.append(f"{name} is not faster than its deployment at staleness 0")
            if not (mode["mixed"] and mode["suspended"]):
                missed.append(f"{name}: no sample was suspended, or none has tokens of several policy versions")
    best = modes[figures["best"]]
    if best["ratio_to_bound"] < TARGET:
        missed.append(f"{figures['best']} reaches {best['ratio_to_bound']:.3f} of its bound, target {TARGET}")
    if best["tokens_per_s"] <= max(mode["tokens_per_s"] for name, mode in modes.items() if name.endswith("s0")):
        missed.append("a synchronous mode is the fastest")
    if abs(figures["fusion_gain"] / PUBLISHED["fusion_gain"] - 1) > TOLERANCE:
        missed.append(f"fusion_gain {figures['fusion_gain']:.3f}: the calibration is outdated, run with --calibrate")
    return missed


def calibrate(folder: Path) -> dict:
    """Find the factor by which the cost of training must be multiplied.

    One run of each split suffices for all factors: the rest of a step takes as long whatever training takes.
    """
    first = Workload(training=8.0)
    colocated = run_and_print(Mode("colocated", 0), first, folder)
    splits = {cards: run_and_print(Mode("separate", 0, cards), first, folder) for cards in range(2, CARDS - 1)}

    def gain(times: float) -> float:
        def step_s(figures: Figures) -> float:
            return figures.step_s + (times / first.training - 1) * figures.train_s

        return min(map(step_s, splits.values())) / step_s(colocated)

    curve = {round(0.5 * i, 1): gain(0.5 * i) for i in range(2, 80)}
    fits = [times for times, speedup in curve.items() if speedup >= PUBLISHED["fusion_gain"]]
    if not fits:
        sys.exit(f"colocated is at most {max(curve.values()):.3f} times as fast as separate, at any cost of training")
    times = min(fits)
    work = colocated.generation_s, colocated.training_s * times / first.training
    return {
        "training": times,
        "share_of_generation": work[0] / sum(work),
        "predicted_fusion_gain": curve[times],
        "how": "least multiple of training at which, of the seconds measured at training = 8 in one run of each split, "
        "colocated is the published 1.785 times as fast as the best split of separate; a multiple of 0.5",
        "curve": {str(times): round(speedup, 3) for times, speedup in curve.items() if times % 4 == 0},
    }


def show(figures: dict) -> None:
    from rich.console import Console
    from rich.table import Table

    columns = ["mode", "tokens/s", "of bound", "utilisation", "tail s", "switch s", "max stale", "suspended", "mixed"]
    table = Table(*columns, "overrun")
    for name, mode in figures.items():
        if isinstance(mode, dict) and "tokens_per_s" in mode:
            speed, utilisation = f"{mode['tokens_per_s']:,.0f}", f"{mode['utilisation']:.1%}"
            row = [name, speed, f"{mode['ratio_to_bound']:.3f}", utilisation, f"{mode['tail_s']:.1f}"]
            row += [f"{mode['switch_s']:.1f}", str(mode["max_staleness_seen"]), str(mode["suspended"])]
            row += [str(mode["mixed"]), f"{mode['pace_overrun']:.1%}"]
            table.add_row(*row)
    console = Console(width=130)
    console.print(table)
    for name, published in PUBLISHED.items():
        console.print(f"{name}: {figures[name]:.3f} (published {published})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--calibrate", action="store_true", help="recompute the share of generation and save it")
    parser.add_argument(
        "--modes", help="run only these, e.g. colocated:1,hybrid:2:2 (deployment:bound[:cards]); no targets are checked"
    )
    args = parser.parse_args()
    if args.modes and args.calibrate:
        parser.error("--modes and --calibrate exclude each other")
    if args.json and (args.modes or args.calibrate):
        parser.error("--json is written only with all modes: without --modes and --calibrate")
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
                run_and_print(Mode.parse(mode), workload, folder)
            return
        figures = measure(workload, folder)
    show(figures)
    missed = misses(figures)
    for line in missed:
        print("MISSED:", line)
    if args.json:
        pace = f"{workload.pace}; seconds and tokens are the modelled ones"
        result = {"pace": pace, "workload": asdict(workload), "figures": figures, "missed": missed}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()

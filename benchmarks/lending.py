"""Measure what it brings to lend cards: in the tail of a step, cards that train leave generation, and train what is
ready. The same run with and without (`stalesync.lend`), in turns, on eight emulated cards of modelled speed.

    python benchmarks/lending.py --json lending.json          (6 minutes on two idle cores)

Processes, Ray, queue and switches are real; only the time that cards take is modelled. Lengths, prompts and order are
the same in every run. The floor is the work-conserving bound (`benchmarks/stalesync.py`), which no order reaches.
Running ahead, steps are long and short in turns, so only whole runs are compared.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.stalesync_modes import Figures, Mode, Workload, make_model, run  # noqa: E402

STEPS = 14
"""Measured steps, after the warm-up"""

WORKLOAD = Workload(training=1.0, speed=32.0, sequences=64)


def figures_of(figures: Figures) -> dict[str, Any]:
    """Return the figures of one run, in modelled seconds and tokens."""
    lent_s = figures.sum("rollout/lent_card_s") / len(figures.rows) * figures.workload.speed
    steps_s = [round(row["timing_s/step"] * figures.workload.speed) for row in figures.rows]
    return figures.as_dict(figures) | {"lent_card_s": lent_s, "steps_s": steps_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write all figures there")
    parser.add_argument("--mode", default="hybrid:1:4", help="deployment:bound:cards that only generate")
    parser.add_argument("--rounds", type=int, default=1)
    options = parser.parse_args()
    mode, results = Mode.parse(options.mode), dict[str, list[dict[str, Any]]]()
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home)
        make_model(folder / "model")
        print(f"{mode}: {WORKLOAD.pace}")
        for _ in range(options.rounds):
            for lend in ("true", "false"):
                found = figures_of(run(mode, WORKLOAD, folder, STEPS, [f"stalesync.lend={lend}"]))
                results.setdefault(lend, []).append(found)
                print(
                    f"stalesync.lend={lend}: {found['tokens_per_s']:.0f} tokens/s (bound "
                    f"{found['bound_tokens_per_s']:.0f}), a step takes {found['step_s']:.0f} s, lent "
                    f"{found['lent_card_s']:.0f} card-seconds; overrun {found['pace_overrun']:.1%}; {found['steps_s']}",
                    flush=True,
                )
    with_s, without_s = (sum(one["step_s"] for one in results[lend]) for lend in ("true", "false"))
    print(f"a run that lends is {without_s / with_s:.3f} times as fast")
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Run the quickstart on several seeds and print its rewards.

    python benchmarks/seeds.py [--seeds 5] [--fusion colocated,separate] [--json PATH]

Each seed makes its own base model and runs `recipes/quickstart.sh` from it, in every chosen deployment. Prints for each
run the mean rewards of its first and last five steps (start, end), the seconds of making the base model (once per
seed), of its steps and of the whole command, which includes the start of its processes but not the base model; then the
mean and standard deviation of `end` by deployment.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 5


def make_base(folder: Path, seed: int) -> float:
    """Make the base model of a seed in ``folder``; return the seconds."""
    make = [sys.executable, "scripts/make_base.py", "addition", str(folder), "--seed", str(seed)]
    began_s = time.monotonic()
    subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.monotonic() - began_s


def run(*, seed: int, fusion: str, base: Path, folder: Path) -> dict:
    """Run the quickstart from ``base``; return its row of figures."""
    name = f"{fusion}-{seed}"
    overrides = [f"fusion={fusion}", f"run.seed={seed}", f"run.name={name}", f"run.dir={folder}", f"model.path={base}"]
    began_s = time.monotonic()
    subprocess.run(["bash", "recipes/quickstart.sh", *overrides], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    command_s = time.monotonic() - began_s
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["critic/rewards/mean"] for row in rows]
    return {
        "fusion": fusion,
        "seed": seed,
        "start": sum(rewards[:WINDOW]) / WINDOW,
        "end": sum(rewards[-WINDOW:]) / WINDOW,
        "steps": len(rows),
        "steps_s": sum(row["timing_s/step"] for row in rows),
        "command_s": command_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--fusion", default="colocated", help="deployments, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--dir", type=Path, default=None, help="new folder for the runs (default: runs/seeds-<time>)")
    args = parser.parse_args()
    folder = (args.dir or ROOT / "runs" / time.strftime("seeds-%Y%m%d-%H%M%S")).absolute()
    if folder.exists():
        parser.error(f"--dir {folder} exists: expected a new folder, as runs would be added to those in it")
    make_base(ROOT / "runs" / "base" / "addition", seed=0)  # the quickstart makes it, too, if it is missing
    base_s = {seed: make_base(folder / f"base-{seed}", seed) for seed in range(args.seeds)}
    print(f"{'fusion':<9} {'seed':>4} {'start':>6} {'end':>6} {'steps':>5}", end=" ")
    print(f"{'base s':>7} {'steps s':>8} {'command s':>9}")
    rows, deployments = [], list(dict.fromkeys(args.fusion.split(",")))
    for fusion in deployments:
        for seed in range(args.seeds):
            row = run(seed=seed, fusion=fusion, base=folder / f"base-{seed}", folder=folder) | {"base_s": base_s[seed]}
            rows.append(row)
            print(
                f"{fusion:<9} {seed:4d} {row['start']:6.3f} {row['end']:6.3f} {row['steps']:5d} {row['base_s']:7.1f} "
                f"{row['steps_s']:8.1f} {row['command_s']:9.1f}",
                flush=True,
            )
    for fusion in deployments:
        ends = [row["end"] for row in rows if row["fusion"] == fusion]
        print(f"{fusion}: end {statistics.mean(ends):.3f} ± {statistics.pstdev(ends):.3f} over {len(ends)} seeds")
    if args.json:
        args.json.write_text(json.dumps({"figures": {"seeds": rows}}, indent=2) + "\n")


if __name__ == "__main__":
    main()

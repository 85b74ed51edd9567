"""Run the quickstart on several seeds and print its rewards.

    python benchmarks/seeds.py [--seeds 5] [--fusion colocated,separate] [--json PATH]

Each seed makes its own base model and runs `recipes/quickstart.sh` from the start, in every chosen deployment. Prints
for each run the mean rewards of its first and last five steps (start, end), the seconds of its steps and of the whole
command; then the mean and standard deviation of `end` by deployment.
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


def run(seed: int, fusion: str, folder: Path) -> dict:
    """Make the base model, run the quickstart; return its row of figures."""
    base, name, began_s = folder / f"base-{seed}", f"{fusion}-{seed}", time.monotonic()
    make = [sys.executable, "scripts/make_base.py", "addition", str(base), "--seed", str(seed)]
    subprocess.run(make, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    overrides = [f"fusion={fusion}", f"run.seed={seed}", f"run.name={name}", f"run.dir={folder}", f"model.path={base}"]
    subprocess.run(["bash", "recipes/quickstart.sh", *overrides], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rewards = [row["critic/rewards/mean"] for row in rows]
    return {
        "fusion": fusion,
        "seed": seed,
        "start": sum(rewards[:WINDOW]) / WINDOW,
        "end": sum(rewards[-WINDOW:]) / WINDOW,
        "steps": len(rows),
        "steps_s": sum(row["timing_s/step"] for row in rows),
        "command_s": time.monotonic() - began_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--fusion", default="colocated", help="deployments, separated by commas")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--dir", type=Path, default=None, help="folder of the runs (default: runs/seeds-<time>)")
    args = parser.parse_args()
    folder = (args.dir or ROOT / "runs" / time.strftime("seeds-%Y%m%d-%H%M%S")).absolute()
    print(f"{'fusion':<9} {'seed':>4} {'start':>6} {'end':>6} {'steps':>5} {'steps s':>8} {'command s':>9}")
    rows, deployments = [], args.fusion.split(",")
    for fusion in deployments:
        for seed in range(args.seeds):
            rows.append(row := run(seed, fusion, folder))
            print(
                f"{fusion:<9} {seed:4d} {row['start']:6.3f} {row['end']:6.3f} {row['steps']:5d} "
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

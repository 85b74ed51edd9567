"""Measure the effect of staleness on learning: the long-answer task at staleness 0, 1 and 2, on the same seeds.

    python benchmarks/learning.py --json learning.json --svg benchmarks/learning.svg
    python benchmarks/learning.py --from learning.json --svg benchmarks/learning.svg       (only draw the plot)
    python benchmarks/learning.py algorithm.correction=none                                (override the config)

All runs share one base model and the default correction; the seed determines prompts and samples, hence the whole run.
The lag is forced: the engine has room for every sample that the bound admits, so samples are about as old as the bound
allows. The final reward of a run is that of its last policy on held-out prompts, which are the same for all runs of a
seed. Targets: on average no bound is more than 0.03 below staleness 0, and no run ends more than 0.15 below the run of
the same seed at staleness 0.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BOUNDS = (0, 1, 2)
MARGIN, COLLAPSE = 0.03, 0.15
OPTIONS = """cluster=one device=emulated parallel=single data=worked data.max_prompt_length=64 data.prompts_per_step=64
reward=arithmetic rollout.max_response_length=96 algorithm=grpo algorithm.group_size=8 algorithm.minibatches=2
training.lr=3e-4 training.warmup_steps=6 training.betas=[0.9,0.99] training.weight_decay=0
training.load_balancing_coef=0 rollout.max_seqs=1024 run.eval_prompts=512""".split()

Curves = dict[str, dict[str, dict]]
"""Bound → seed → `rewards` by step, `before` and `after` (held-out), `lag` (mean over all samples)."""


def run(bound: int, seed: int, *, steps: int, base: Path, folder: Path, overrides: list[str]) -> dict:
    """Train one run in ``folder``; return its entry of `Curves`."""
    name = f"s{bound}-{seed}"
    own = [f"model.path={base}", f"run.dir={folder}", f"run.name={name}", f"run.seed={seed}", f"run.steps={steps}"]
    command = [sys.executable, "scripts/train.py", *OPTIONS, *own, f"stalesync.max_staleness={bound}", *overrides]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    lags = [(lag, sum(row.get(f"staleness/lag_{lag}_count", 0) for row in rows)) for lag in range(bound + 1)]
    curve = {
        "rewards": [row["critic/rewards/mean"] for row in rows],
        "before": rows[0]["val/rewards/before"],
        "after": rows[-1]["val/rewards/after"],
        "lag": sum(lag * count for lag, count in lags) / sum(count for _, count in lags),
    }
    print(f"{name}: held-out {curve['before']:.3f} -> {curve['after']:.3f}, mean lag {curve['lag']:.2f}", flush=True)
    return curve


def measure(*, seeds: int, steps: int, jobs: int, overrides: list[str]) -> Curves:
    """Make the base model, then train every seed at every bound, ``jobs`` runs at a time."""
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(jobs) as pool:
        folder = Path(name)
        base = folder / "base"
        subprocess.run([sys.executable, "scripts/make_base.py", "worked_arithmetic", str(base)], cwd=ROOT, check=True)
        train = partial(run, steps=steps, base=base, folder=folder, overrides=overrides)
        tasks = {(b, s): pool.submit(train, b, s) for s in range(seeds) for b in BOUNDS}
        return {str(b): {str(s): tasks[b, s].result() for s in range(seeds)} for b in BOUNDS}


def judge(curves: Curves) -> dict:
    """Compute each bound's mean paired difference to staleness 0 with its standard error, and the worst difference."""
    ends = {bound: {seed: one["after"] for seed, one in runs.items()} for bound, runs in curves.items()}
    figures: dict = {"final": {bound: statistics.mean(after.values()) for bound, after in ends.items()}}
    for bound in ("1", "2"):
        pairs = [ends[bound][seed] - after for seed, after in ends["0"].items()]
        error = statistics.stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0
        figures[bound] = {"difference": statistics.mean(pairs), "standard_error": error, "worst": min(pairs)}
    figures["missed"] = [
        f"staleness {bound}: {name} {figures[bound][name]:+.3f}, allowed {-margin}"
        for bound in ("1", "2")
        for name, margin in (("difference", MARGIN), ("worst", COLLAPSE))
        if figures[bound][name] < -margin
    ]
    return figures


def plot(curves: Curves) -> str:
    """Draw the mean reward by step with a band of one standard deviation over seeds, as SVG."""
    width, height, left, top, bottom = 640, 360, 52, 28, 44
    colours = {"0": "#333333", "1": "#1f77b4", "2": "#d1622b"}
    by_step = {
        bound: [tuple(values) for values in zip(*(one["rewards"] for one in runs.values()), strict=True)]
        for bound, runs in curves.items()
    }
    steps = len(by_step["0"])
    spread = {b: [(statistics.mean(v), statistics.pstdev(v)) for v in values] for b, values in by_step.items()}
    low = min(mean - sd for values in spread.values() for mean, sd in values)
    high = max(mean + sd for values in spread.values() for mean, sd in values)

    def at(step: int, value: float) -> str:
        x = left + step / max(1, steps - 1) * (width - left - 16)
        return f"{x:.1f},{height - bottom - (value - low) / (high - low) * (height - top - bottom):.1f}"

    seeds = len(curves["0"])
    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18">reward of a step, mean of {seeds} seeds and one standard deviation</text>',
        f'<text x="{width / 2:.0f}" y="{height - 8}">training step</text>',
    ]
    ticks = [round(low + (high - low) * tick / 4, 2) for tick in range(5)]
    for value in ticks:
        _, y = at(0, value).split(",")
        elements.append(f'<line x1="{left:.1f}" y1="{y}" x2="{width - 16}" y2="{y}" stroke="#dddddd"/>')
        elements.append(f'<text x="8" y="{float(y) + 4:.1f}">{value:.2f}</text>')
    for step in range(0, steps, 5):
        elements.append(f'<text x="{at(step, low).split(",")[0]}" y="{height - 26}">{step + 1}</text>')
    for row, (bound, values) in enumerate(spread.items()):
        edge = [at(step, mean + sd) for step, (mean, sd) in enumerate(values)]
        edge += [at(step, mean - sd) for step, (mean, sd) in reversed(list(enumerate(values)))]
        elements.append(f'<polygon points="{" ".join(edge)}" fill="{colours[bound]}" opacity="0.12"/>')
        line = " ".join(at(step, mean) for step, (mean, _) in enumerate(values))
        elements.append(f'<polyline points="{line}" fill="none" stroke="{colours[bound]}" stroke-width="2"/>')
        label_y, name = height - bottom - 16 - 18 * row, f"max_staleness={bound}"
        elements.append(f'<text x="{width - 150}" y="{label_y}" fill="{colours[bound]}">{name}</text>')
    return "\n".join([*elements, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="overrides of the runs' config")
    parser.add_argument("--seeds", type=int, help="(default: 10)")
    parser.add_argument("--steps", type=int, help="training steps of a run (default: 30)")
    parser.add_argument("--jobs", type=int, help="runs at a time (default: 2)")
    parser.add_argument("--json", type=Path, help="write the figures and curves to this file")
    parser.add_argument("--from", dest="source", type=Path, help="read the curves of an earlier --json, run nothing")
    parser.add_argument("--svg", type=Path, help="write the plot to this file")
    args = parser.parse_args()
    if args.source:
        if args.overrides or args.seeds or args.steps or args.jobs:
            parser.error("--from runs nothing: --seeds, --steps, --jobs and overrides have no effect with it")
        curves = json.loads(args.source.read_text())["curves"]
    else:
        curves = measure(seeds=args.seeds or 10, steps=args.steps or 30, jobs=args.jobs or 2, overrides=args.overrides)
    figures = judge(curves)
    for bound in ("1", "2"):
        paired = figures[bound]
        print(
            f"staleness {bound}: final reward {figures['final'][bound]:.3f} (0: {figures['final']['0']:.3f}), paired "
            f"difference {paired['difference']:+.3f} +- {paired['standard_error']:.3f}, worst {paired['worst']:+.3f}"
        )
    for line in figures["missed"]:
        print("MISSED:", line)
    if args.json:
        args.json.write_text(json.dumps({"figures": figures, "curves": curves}, indent=1) + "\n")
    if args.svg:
        args.svg.write_text(plot(curves))


if __name__ == "__main__":
    main()

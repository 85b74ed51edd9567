"""Measure learning: the quickstart over seeds and deployments, and the long-answer task at staleness 0, 1 and 2.

staleness: all runs share one base model and the default correction; the seed determines prompts and samples, hence the
whole run. The lag is forced: the engine has room for every sample that the bound admits, so samples are about as old as
the bound allows. The final reward of a run is that of its last policy on held-out prompts, which are the same for all
runs of a seed; differences are paired with the run of the same seed at staleness 0.

deployments: the same on shorter answers, with fewer samples a step, a third of the rate, and more steps, in deployments
whose engines adopt new weights between two tokens and whose cards train while the last responses are generated. The lag
is what the cards' times make of the bound; `adopted`: share of responses of which new weights have sampled a part;
`parts`: in how many a step was trained, more than 1 where training began before its last group was there.

quickstart: each seed makes its own base model and runs `recipes/quickstart.sh` from it in every deployment: mean
rewards of the first and last five steps, the seconds of making the base model, of the steps, and of the whole command,
which includes the start of its processes but not the base model.
"""

import sys
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean, pstdev, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import ROOT, Benchmark, Figures, Option, progress, timed

BENCHMARK = Benchmark(
    __doc__,
    {
        "staleness": "benchmarks.learning:staleness",
        "deployments": "benchmarks.learning:deployments",
        "quickstart": "benchmarks.learning:quickstart",
    },
    [
        Option("seeds", None, smoke="1", help="number of seeds (default: 10, of `quickstart` 5)"),
        Option("steps", None, smoke="2", help="training steps of a run (default: those of the task)"),
        Option("jobs", 2, help="runs of `staleness` at a time"),
        Option("fusion", "colocated", help="deployments of `quickstart`, separated by commas"),
        Option("svg", None, help="write the plot to this file; of `deployments` NAME_hybrid, NAME_separate"),
    ],
    "staleness.?.difference >= -0.03, staleness.?.worst >= -0.15, deployments.?.?.difference >= -0.03, "
    "deployments.?.?.worst >= -0.15",
    default=("staleness",),
    extra="overrides of the runs' config",
    sizes={"bounds": ("0,1,2", "0,1"), "base": ("", "0"), "prompts": (None, 8)},
)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())

from benchmarks.runs import Row, make_base, temporary_folder, train

WINDOW = 5
OPTIONS = """device=emulated parallel=single data=worked data.max_prompt_length=64 reward=arithmetic
rollout.max_response_length=96 algorithm=grpo algorithm.group_size=8 algorithm.minibatches=2 training.warmup_steps=6
training.lr=3e-4 training.betas=[0.9,0.99] training.weight_decay=0 training.load_balancing_coef=0
rollout.engine.max_seqs=1024""".split()
TWO_CARDS = "cluster.npus=2 data.min_digits=2 data.max_digits=3 training.lr=1e-4 rollout.engine.max_seqs=32".split()
"""An engine that is always full, so that new weights meet responses under way"""

Curves = dict[str, dict[str, Figures]]
"""Bound → seed → `rewards` by step, `before` and `after` (held-out), `lag` (mean over all samples), `adopted`,
`parts`."""


def staleness(args: Namespace) -> Figures:
    """Train every seed at every bound."""
    return learned(args, ["cluster=one"], steps=30, prompts=64)


def deployments(args: Namespace) -> Figures:
    """Do the same in `hybrid` and `separate`, one card that generates beside one that trains."""
    return {
        fusion: learned(args, [*TWO_CARDS, f"fusion={fusion}"], fusion, steps=60, prompts=16)
        for fusion in ("hybrid", "separate")
    }


def learned(args: Namespace, options: Sequence[str], name: str = "", **size: int) -> Figures:
    """Return the curves and what they say. ``name``: end of the plot's file name; others: as `trained`."""
    curves = trained(args, options, **size)
    if args.svg:
        path = Path(args.svg)
        path.with_stem("_".join([path.stem, name]).strip("_")).write_text(plot(curves))
    return judged(curves) | {"curves": curves}


def trained(args: Namespace, options: Sequence[str], *, steps: int, prompts: int) -> Curves:
    """Make the base model, then train every seed at every bound, ``args.jobs`` runs at a time. ``steps`` of a run and
    ``prompts`` of a step: unless ``args`` states them."""
    steps, prompts, seeds = int(args.steps or steps), int(args.prompts or prompts), range(int(args.seeds or 10))
    with temporary_folder() as folder, ThreadPoolExecutor(args.jobs) as pool:
        base = make_base(folder / "base", "worked_arithmetic", *(["--target", args.base] if args.base else []))

        def run(bound: int, seed: int) -> Figures:
            own = [
                f"model.path={base}",
                f"run.seed={seed}",
                f"run.steps={steps}",
                f"run.eval_prompts={64 if args.smoke else 512}",
            ]
            own += [f"stalesync.max_staleness={bound}", f"data.prompts_per_step={prompts}", *args.overrides]
            rows = train(folder / f"s{bound}-{seed}", [*OPTIONS, *options, *own], timeout_s=7200)
            curve = curve_of(rows, bound)
            progress(f"{options[-1]}, staleness {bound}, seed {seed}", curve)
            return curve

        bounds = [int(bound) for bound in args.bounds.split(",")]
        tasks = {(bound, seed): pool.submit(run, bound, seed) for seed in seeds for bound in bounds}
        return {str(b): {str(s): tasks[b, s].result() for s in seeds} for b in bounds}


def curve_of(rows: list[Row], bound: int) -> Figures:
    """Return what `Curves` holds of a run."""
    lags = [(lag, sum(row.get(f"staleness/lag_{lag}_count", 0) for row in rows)) for lag in range(bound + 1)]
    samples = sum(count for _, count in lags)
    return {
        "rewards": [row["critic/rewards/mean"] for row in rows],
        "before": rows[0]["val/rewards/before"],
        "after": rows[-1]["val/rewards/after"],
        "lag": sum(lag * count for lag, count in lags) / samples,
        "adopted": sum(row["staleness/mixed_versions_count"] for row in rows) / samples,
        "parts": mean(row["training/parts_total"] for row in rows),
    }


def judged(curves: Curves) -> Figures:
    """Compute each bound's mean paired difference to staleness 0 with its standard error, and the worst difference."""
    figures: Figures = {}
    for bound, runs in curves.items():
        pairs = [run["after"] - curves["0"][seed]["after"] for seed, run in runs.items()]
        figures[bound] = {
            "final": mean(run["after"] for run in runs.values()),
            "difference": mean(pairs),
            "standard_error": stdev(pairs) / len(pairs) ** 0.5 if len(pairs) > 1 else 0.0,
            "worst": min(pairs),
        }
    return figures


def plot(curves: Curves) -> str:
    """Draw the mean reward by step with a band of one standard deviation over seeds, as SVG."""
    width, height, left, top, bottom = 640, 360, 52, 28, 44
    colours = {"0": "#333333", "1": "#1f77b4", "2": "#d1622b"}
    spread = {
        bound: [(mean(v), pstdev(v)) for v in zip(*(one["rewards"] for one in runs.values()), strict=True)]
        for bound, runs in curves.items()
    }
    steps = len(spread["0"])
    low = min(value - sd for values in spread.values() for value, sd in values)
    high = max(value + sd for values in spread.values() for value, sd in values)

    def at(step: int, value: float) -> str:
        x = left + step / max(1, steps - 1) * (width - left - 16)
        return f"{x:.1f},{height - bottom - (value - low) / ((high - low) or 1) * (height - top - bottom):.1f}"

    elements = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="18">reward of a step, mean of {len(curves["0"])} seeds and one standard deviation</text>',
        f'<text x="{width / 2:.0f}" y="{height - 8}">training step</text>',
    ]
    for value in (round(low + (high - low) * tick / 4, 2) for tick in range(5)):
        y = at(0, value).split(",")[1]
        elements.append(f'<line x1="{left:.1f}" y1="{y}" x2="{width - 16}" y2="{y}" stroke="#dddddd"/>')
        elements.append(f'<text x="8" y="{float(y) + 4:.1f}">{value:.2f}</text>')
    for step in range(0, steps, 5):
        elements.append(f'<text x="{at(step, low).split(",")[0]}" y="{height - 26}">{step + 1}</text>')
    for row, (bound, values) in enumerate(spread.items()):
        edge = [at(step, value + sd) for step, (value, sd) in enumerate(values)]
        edge += [at(step, value - sd) for step, (value, sd) in reversed(list(enumerate(values)))]
        line = " ".join(at(step, value) for step, (value, _) in enumerate(values))
        elements.append(f'<polygon points="{" ".join(edge)}" fill="{colours[bound]}" opacity="0.12"/>')
        elements.append(f'<polyline points="{line}" fill="none" stroke="{colours[bound]}" stroke-width="2"/>')
        label = f'<text x="{width - 150}" y="{height - bottom - 16 - 18 * row}" fill="{colours[bound]}">'
        elements.append(f"{label}max_staleness={bound}</text>")
    return "\n".join([*elements, "</svg>"]) + "\n"


def quickstart(args: Namespace) -> Figures:
    """Run the quickstart from the base model of each seed in every deployment."""
    figures: Figures = {}
    seeds = range(int(args.seeds or 5))
    make_base(ROOT / "runs" / "base" / "addition", "addition")  # the recipe makes it, too, if it is missing
    with temporary_folder() as folder:
        target = ["--target", args.base] if args.base else []
        bases = {seed: folder / f"base-{seed}" for seed in seeds}
        base_s = {
            seed: timed(lambda seed=seed: make_base(bases[seed], "addition", "--seed", str(seed), *target))  # type: ignore[misc]
            for seed in seeds
        }
        for fusion in dict.fromkeys(args.fusion.split(",")):
            for seed in seeds:
                options = [f"fusion={fusion}", f"run.seed={seed}", f"model.path={bases[seed]}"]
                options += [f"run.steps={args.steps}"] if args.steps else []
                options += [f"data.prompts_per_step={args.prompts}"] if args.smoke else []
                rows: list[Row] = []
                home, recipe = folder / f"{fusion}-{seed}", ["bash", "recipes/quickstart.sh"]
                command_s = timed(lambda: rows.extend(train(home, options, command=recipe)))  # noqa: B023
                rewards = [row["critic/rewards/mean"] for row in rows]
                figures[f"{fusion} {seed}"] = {
                    "start": mean(rewards[:WINDOW]),
                    "end": mean(rewards[-WINDOW:]),
                    "base_s": base_s[seed],
                    "steps_s": sum(row["timing_s/step"] for row in rows),
                    "command_s": command_s,
                }
                progress(f"{fusion}, seed {seed}", figures[f"{fusion} {seed}"])
            ends = [figures[f"{fusion} {seed}"]["end"] for seed in seeds]
            figures[fusion] = {"mean_end": mean(ends), "spread": pstdev(ends)}
    return figures

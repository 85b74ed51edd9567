"""Measure learning: the quickstart over seeds and deployments, and the long-answer task at staleness 0, 1 and 2.

staleness: all runs share one base model and the default correction; the seed determines prompts and samples. The lag is
forced: the engine has room for every sample that the bound admits. The final reward of a run is that of its last policy
on held-out prompts, the same for all runs of a seed; differences are to the run of the same seed at staleness 0.

deployments: the same on shorter answers, with fewer samples a step, a third of the rate, and more steps, in deployments
whose engines adopt new weights between two tokens and whose cards train while the last responses are generated; the lag
is what the cards' times make of the bound. `adopted`: share of responses of which new weights have sampled a part;
`parts`: in how many a step was trained, more than 1 where training began before its last group was there.

quickstart: each seed makes its own base model and runs `recipes/quickstart.sh` from it in every deployment: mean
rewards of the first and last five steps; seconds of making the base model, of the steps, and of the whole command.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, pstdev, stdev

from benchmarks.harness import ROOT, Arguments, Benchmark, Figures, Option, progress, timed, timed_result

BENCHMARK = Benchmark(
    __doc__,
    [
        Option("seeds", None, smoke="1", help="number of seeds (default: 10, of `quickstart` 5)"),
        Option("steps", None, smoke="2", help="training steps of a run (default: those of the task)"),
        Option("jobs", 2, help="runs of `staleness` at a time"),
        Option("fusion", "colocated", help="deployments of `quickstart`, separated by commas"),
        Option("svg", None, help="write the plot to this file (needs matplotlib); of `deployments` NAME_hybrid, …"),
    ],
    "staleness.?.difference >= -0.03, staleness.?.worst >= -0.15, deployments.?.?.difference >= -0.03, "
    "deployments.?.?.worst >= -0.15",
    parts={part: part for part in ("staleness", "deployments", "quickstart")},
    default=("staleness",),
    extra="overrides of the runs' config",
    sizes={"bounds": ((0, 1, 2), (0, 1)), "base": ("", "0"), "prompts": (None, 8), "eval_prompts": (512, 64)},
)
BENCHMARK.run_as(__name__)

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


def staleness(args: Arguments) -> Figures:
    return learned(args, ["cluster=one"], steps=30, prompts=64)


def deployments(args: Arguments) -> Figures:
    """Do the same in `hybrid` and `separate`, one card that generates beside one that trains."""
    return {
        fusion: learned(args, [*TWO_CARDS, f"fusion={fusion}"], fusion, steps=60, prompts=16)
        for fusion in ("hybrid", "separate")
    }


def learned(args: Arguments, options: Sequence[str], name: str = "", *, steps: int, prompts: int) -> Figures:
    """Make the base model, then train every seed at every bound, ``args.jobs`` runs at a time; return the curves and
    what they say. ``name``: end of the plot's file name; ``steps`` of a run and ``prompts`` of a step: unless ``args``
    states them."""
    steps, prompts, seeds = int(args.steps or steps), int(args.prompts or prompts), range(int(args.seeds or 10))
    with temporary_folder() as folder, ThreadPoolExecutor(args.jobs) as pool:
        base = make_base(folder / "base", "worked_arithmetic", target=args.base)

        def run(bound: int, seed: int) -> Figures:
            own = f"""model.path={base} run.seed={seed} run.steps={steps} run.eval_prompts={args.eval_prompts}
            stalesync.max_staleness={bound} data.prompts_per_step={prompts}""".split()
            rows = train(folder / f"s{bound}-{seed}", [*OPTIONS, *options, *own, *args.overrides], timeout_s=7200)
            return progress(f"{options[-1]}, staleness {bound}, seed {seed}", curve_of(rows, bound))

        tasks = {(bound, seed): pool.submit(run, bound, seed) for seed in seeds for bound in args.bounds}
        curves = {str(b): {str(s): tasks[b, s].result() for s in seeds} for b in args.bounds}
    if args.svg:
        path = Path(args.svg)
        plot(curves, path.with_stem("_".join([path.stem, name]).strip("_")))
    return judged(curves) | {"curves": curves}


def curve_of(rows: list[Row], bound: int) -> Figures:
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


def plot(curves: Curves, path: Path) -> None:
    """Draw the mean reward by step with a band of one standard deviation over seeds."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for bound, runs in curves.items():
        by_step = [*zip(*(one["rewards"] for one in runs.values()), strict=True)]
        middle, spread, steps = [*map(mean, by_step)], [*map(pstdev, by_step)], range(1, len(by_step) + 1)
        (line,) = axes.plot(steps, middle, label=f"max_staleness={bound}")
        low, high = ([m + sign * sd for m, sd in zip(middle, spread, strict=True)] for sign in (-1, 1))
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.12)
    axes.set(xlabel="training step", title=f"reward of a step: mean and deviation of {len(runs)} seeds")
    axes.legend()
    figure.savefig(path)


def quickstart(args: Arguments) -> Figures:
    figures, seeds = Figures(), range(int(args.seeds or 5))
    make_base(ROOT / "runs" / "base" / "addition", "addition")  # the recipe makes it, too, if it is missing
    with temporary_folder() as folder:

        def base_of(seed: int) -> Path:
            return make_base(folder / f"base-{seed}", "addition", "--seed", str(seed), target=args.base)

        base_s = {seed: timed(partial(base_of, seed)) for seed in seeds}
        for fusion in dict.fromkeys(args.fusion.split(",")):
            for seed in seeds:
                options = [f"fusion={fusion}", f"run.seed={seed}", f"model.path={folder / f'base-{seed}'}"]
                options += [f"run.steps={args.steps}"] if args.steps else []
                options += [f"data.prompts_per_step={args.prompts}"] if args.prompts else []
                run = partial(train, folder / f"{fusion}-{seed}", options, command=["bash", "recipes/quickstart.sh"])
                command_s, rows = timed_result(run)
                rewards = [row["critic/rewards/mean"] for row in rows]
                curve = {"start": mean(rewards[:WINDOW]), "end": mean(rewards[-WINDOW:]), "base_s": base_s[seed]}
                curve |= {"steps_s": sum(row["timing_s/step"] for row in rows), "command_s": command_s}
                figures[f"{fusion} {seed}"] = progress(f"{fusion}, seed {seed}", curve)
            ends = [figures[f"{fusion} {seed}"]["end"] for seed in seeds]
            figures[fusion] = {"mean_end": mean(ends), "spread": pstdev(ends)}
    return figures

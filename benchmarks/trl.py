"""Compare a whole run with TRL's GRPOTrainer: seconds a step, and seconds until the reward reaches 0.9.

    python -m venv .venv-trl && .venv-trl/bin/pip install -r requirements/trl.txt
    python benchmarks/trl.py --trl .venv-trl/bin/python --json trl.json [--rounds 3] [--threads 1]

The task of the quickstart on one card: same base model, prompts in the same order, 64 prompts x 8 samples of at most 5
tokens, all generated at once, two minibatches, KL to the reference, optimizer and number of threads. rlfusion runs on
one emulated card, with Ray, queue and switches; TRL in one process on the plain CPU. Every round runs both sides, in
rotating order, each until the mean reward of five steps reaches 0.9. A step's time is that between two rows of
metrics.jsonl, so it holds all that a run does; a round's figure is the median of its steps, the ratio that of the
medians of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

TASK = {
    "prompts": 64,
    "group_size": 8,
    "response_tokens": 5,
    "minibatches": 2,
    "kl_coef": 0.001,
    "lr": 5e-4,
    "betas": [0.9, 0.99],
}
TARGET, REACHED, WINDOW = 1.5, 0.9, 5
POLL_S = 0.005


@dataclass(frozen=True)
class Figures:
    """Of one run: ``step_s``: median seconds of a step; ``reached_s``: seconds of the steps until `REACHED`, None: it
    was not; ``steps``: number of steps; ``reward``: mean of the last `WINDOW` steps."""

    step_s: float
    reached_s: float | None
    steps: int
    reward: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", default=sys.executable, help="interpreter that has TRL (default: this one)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120, help="maximum number of steps of a run")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="config overrides of rlfusion's side")
    args = parser.parse_args()

    from benchmarks.rotation import in_rotation
    from benchmarks.trl_side import VERSION

    refuse_other_version(args.trl, VERSION)
    task = TASK | {"threads": args.threads}
    figures: dict[str, list[Figures]] = {"rlfusion": [], "trl": []}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        subprocess.run([sys.executable, "scripts/make_base.py", "addition", str(base)], cwd=ROOT, check=True)
        for round in range(args.rounds):
            for side in in_rotation(list(figures), round):
                home = Path(folder, f"{side}-{round}")
                home.mkdir()
                options = dict(base=base, home=home, steps=args.steps, seed=round, task=task)
                command = (
                    ours(overrides=args.overrides, **options) if side == "rlfusion" else theirs(args.trl, **options)
                )
                figures[side].append(measure(command, home, args.threads))
                print(side, figures[side][-1], flush=True)
    result = {"rounds": args.rounds, "threads": args.threads, "trl": VERSION, "task": task, "figures": summary(figures)}
    print(json.dumps(result["figures"], indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


def refuse_other_version(python: str, version: str) -> None:
    """End with a message where the interpreter has no TRL, or another version."""
    ask = "import importlib.metadata as m; print(m.version('trl'))"
    answer = subprocess.run([python, "-c", ask], capture_output=True, text=True)
    if answer.stdout.strip() != version:
        found = answer.stdout.strip() or "none"
        sys.exit(f"--trl {python}: TRL {version} is expected (requirements/trl.txt), found {found}")


def ours(*, base: Path, home: Path, steps: int, seed: int, task: dict, overrides: list[str]) -> list[str]:
    """Return the command of rlfusion's side."""
    options = f"""model.path={base} run.dir={home} run.name=run run.steps={steps} run.seed={seed} run.eval_prompts=0
    cluster=one device=emulated parallel=single data=addition data.max_prompt_length=8
    data.prompts_per_step={task["prompts"]} reward=arithmetic rollout.max_response_length={task["response_tokens"]}
    algorithm=grpo algorithm.group_size={task["group_size"]} algorithm.minibatches={task["minibatches"]}
    algorithm.kl_coef={task["kl_coef"]} rollout.max_seqs={task["prompts"] * task["group_size"]}
    training.lr={task["lr"]} training.weight_decay=0 training.load_balancing_coef=0""".split()
    betas = ",".join(map(str, task["betas"]))
    return [sys.executable, "scripts/train.py", *options, f"training.betas=[{betas}]", *overrides]


def theirs(python: str, *, base: Path, home: Path, steps: int, seed: int, task: dict) -> list[str]:
    """Return the command of TRL's side."""
    (home / "run").mkdir()
    options = dict(model=str(base), folder=str(home / "run"), steps=steps, seed=seed, task=task)
    code = "import json, sys; from benchmarks.trl_side import train; train(**json.loads(sys.argv[1]))"
    return [python, "-c", code, json.dumps(options)]


def measure(command: list[str], home: Path, threads: int) -> Figures:
    """Run a side until it reaches the reward or has done its steps; return its figures."""
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    rows = home / "run" / "metrics.jsonl"
    times: list[float] = []
    rewards: list[float] = []
    with (home / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
        read_bytes = 0
        while process.poll() is None and not reached(rewards):
            lines, read_bytes = new_lines(rows, read_bytes)
            times += [time.perf_counter()] * len(lines)
            rewards += [json.loads(line)["critic/rewards/mean"] for line in lines]
            time.sleep(POLL_S)
        process.terminate()
        process.wait()
    if len(times) < 2:
        sys.exit((home / "log").read_text()[-4000:])
    return figures_of(times, rewards)


def new_lines(path: Path, start: int) -> tuple[list[str], int]:
    """Return the whole lines of a growing file from byte ``start`` on, and where the next ones begin."""
    if not path.is_file() or path.stat().st_size == start:
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        whole = file.read().rpartition(b"\n")
    return whole[0].decode().splitlines(), start + len(whole[0]) + len(whole[1])


def figures_of(times: list[float], rewards: list[float]) -> Figures:
    """Return the figures of a run from the times at which its steps ended, and their rewards."""
    step_s = statistics.median(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    seconds = times[-1] - times[0] + step_s  # the first step began one step before its end
    last = rewards[-WINDOW:]
    return Figures(step_s, seconds if reached(rewards) else None, len(rewards), sum(last) / len(last))


def reached(rewards: list[float]) -> bool:
    """Whether the mean of the last `WINDOW` steps has reached the reward."""
    return len(rewards) >= WINDOW and sum(rewards[-WINDOW:]) / WINDOW >= REACHED


def summary(figures: dict[str, list[Figures]]) -> dict[str, float | None]:
    """Return the medians over the rounds, and their ratios (None where a round did not reach the reward)."""
    step_s = {side: statistics.median(one.step_s for one in runs) for side, runs in figures.items()}
    found: dict[str, float | None] = {f"{side}_step_s": value for side, value in step_s.items()}
    found["step_ratio"] = step_s["trl"] / step_s["rlfusion"]
    seconds = {side: [one.reached_s for one in runs if one.reached_s is not None] for side, runs in figures.items()}
    for side, runs in seconds.items():
        found[f"{side}_reached_s"] = statistics.median(runs) if len(runs) == len(figures[side]) else None
    if all(found[f"{side}_reached_s"] is not None for side in figures):
        found["reached_ratio"] = found["trl_reached_s"] / found["rlfusion_reached_s"]  # type: ignore[operator]
    return found


if __name__ == "__main__":
    sys.path[0] = str(ROOT)  # the folder of this file would hide the library of its name
    main()

"""Compare a whole run with TRL's GRPOTrainer: seconds a step, and seconds until the reward reaches 0.9.

The task of the quickstart on one card: same base model, prompts in the same order, 64 prompts x 8 samples of at most 5
tokens, all generated at once, two minibatches, KL to the reference, optimizer and number of threads. rlfusion runs on
one emulated card, with Ray, queue and switches; TRL in one process on the plain CPU. Both sides run in turns, each
until the mean reward of five steps reaches 0.9. A step's time is that between two rows of metrics.jsonl, so it holds
all that a run does; figures are medians of a round's steps, and of the rounds. --smoke runs rlfusion's side alone where
TRL is not installed.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.harness import ROOT, Arguments, Benchmark, Figures, Option, in_turns, progress

BENCHMARK = Benchmark(
    __doc__,
    [
        Option("trl", sys.executable, help="interpreter that has TRL"),
        Option("rounds", 3, smoke=1, help="rounds that are measured"),
        Option("steps", 120, smoke=4, help="maximum number of steps of a run"),
    ],
    "step_ratio >= 1.5",
    extra="config overrides of rlfusion's side",
    sizes={"prompts": (64, 8), "target": ("", "0")},
)
BENCHMARK.run_as(__name__)

from benchmarks.runs import Row, follow, make_base, temporary_folder

VERSION = "1.16.0"
TASK = {"group_size": 8, "response_tokens": 5, "minibatches": 2, "kl_coef": 0.001, "lr": 5e-4, "betas": [0.9, 0.99]}
REACHED, WINDOW, POLL_S = 0.9, 5, 0.005


def measure(args: Arguments) -> Figures:
    ask = [args.trl, "-c", "import importlib.metadata as m; print(m.version('trl'))"]
    installed = subprocess.run(ask, capture_output=True, text=True).stdout.strip()
    if installed != VERSION and not args.smoke:
        sys.exit(f"--trl {args.trl}: TRL {VERSION} is expected (requirements/trl.txt), found {installed or 'none'}")
    task = TASK | {"prompts": args.prompts}
    with temporary_folder() as folder:
        base = make_base(folder / "base", "addition", target=args.target)

        def ended(rows: Sequence[Row]) -> bool:
            return len(rows) >= args.steps or reached([row["critic/rewards/mean"] for row in rows])

        def run(side: str, round: int) -> Figures:
            home = folder / f"{side}-{round}"
            options: Any = dict(base=base, home=home, steps=args.steps, seed=round, task=task)
            command = ours(args.overrides, **options) if side == "rlfusion" else theirs(args.trl, **options)
            environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            rows = follow(command, home, until=ended, poll_s=POLL_S, environment=environment)
            times = figures_of([when for when, _ in rows], [row["critic/rewards/mean"] for _, row in rows])
            return progress(f"{side}, round {round + 1}", times)

        sides = ["rlfusion", *(["trl"] if installed == VERSION else [])]
        return summary(in_turns({name: partial(run, name) for name in sides}, args.rounds, warm_ups=0))


def ours(overrides: Sequence[str], *, base: Path, home: Path, steps: int, seed: int, task: dict[str, Any]) -> list[str]:
    options = f"""model.path={base} run.dir={home} run.name=run run.steps={steps} run.seed={seed} run.eval_prompts=0
    cluster=one device=emulated parallel=single data=addition data.max_prompt_length=8
    data.prompts_per_step={task["prompts"]} reward=arithmetic rollout.max_response_length={task["response_tokens"]}
    algorithm=grpo algorithm.group_size={task["group_size"]} algorithm.minibatches={task["minibatches"]}
    algorithm.kl_coef={task["kl_coef"]} rollout.engine.max_seqs={task["prompts"] * task["group_size"]}
    training.lr={task["lr"]} training.weight_decay=0 training.load_balancing_coef=0""".split()
    betas = ",".join(map(str, task["betas"]))
    return [sys.executable, "scripts/train.py", *options, f"training.betas=[{betas}]", *overrides]


def theirs(python: str, *, base: Path, home: Path, steps: int, seed: int, task: dict[str, Any]) -> list[str]:
    (home / "run").mkdir(parents=True)
    options = dict(model=str(base), folder=str(home / "run"), steps=steps, seed=seed, task=task)
    code = "import json, sys; sys.path.insert(0, sys.argv[1]); from benchmarks.trl import train; "
    return [python, "-c", f"{code}train(**json.loads(sys.argv[2]))", str(ROOT), json.dumps(options)]


def figures_of(times: Sequence[float], rewards: Sequence[float]) -> Figures:
    """Return the figures of a run from the times at which its steps ended, and their rewards. `step_s`: median seconds
    of a step; `reached_s`: seconds of the steps until `REACHED`, None: it was not."""
    step_s = median(later - earlier for earlier, later in zip(times, times[1:], strict=False))
    seconds = times[-1] - times[0] + step_s  # the first step began one step before its end
    reached_s = seconds if reached(rewards) else None
    return {"step_s": step_s, "reached_s": reached_s, "steps": len(rewards), "reward": mean(rewards[-WINDOW:])}


def reached(rewards: Sequence[float]) -> bool:
    """Whether the mean of the last `WINDOW` steps has reached the reward."""
    return len(rewards) >= WINDOW and mean(rewards[-WINDOW:]) >= REACHED


def summary(runs_by_side: dict[str, list[Figures]]) -> Figures:
    """Return the medians over the rounds, and their ratios (None where a round did not reach the reward)."""
    figures: Figures = {}
    for name in ("step", "reached"):
        for side, runs in runs_by_side.items():
            seconds = [one[f"{name}_s"] for one in runs]
            figures[f"{side}_{name}_s"] = None if None in seconds else median(seconds)
        ours, theirs = (figures.get(f"{side}_{name}_s") for side in ("rlfusion", "trl"))
        if ours and theirs:
            figures[f"{name}_ratio"] = theirs / ours
    return figures


def train(*, model: str, folder: str, steps: int, seed: int, task: dict[str, Any]) -> None:
    """Train ``steps`` rollout batches by TRL; append a row to ``folder``/metrics.jsonl when one is trained."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from fusion.rewards.arithmetic import arithmetic
    from stalesync.prompts import DataConfig, PromptSource

    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    data = DataConfig(source="addition", max_prompt_length=8, prompts_per_step=task["prompts"])
    source, rewards = PromptSource(data, tokenizer, seed), list[float]()  # prompts in the order of rlfusion's side
    rows = [{"prompt": prompt.text, "answer": prompt.answer} for _ in range(steps) for prompt in source.next()]

    def reward(prompts: list[str], completions: list[str], answer: list[str], **_: Any) -> list[float]:
        scores = [arithmetic(*one) for one in zip(prompts, completions, answer, strict=True)]
        rewards.append(sum(scores) / len(scores))
        return scores

    class Record(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % task["minibatches"] == 0:
                with Path(folder, "metrics.jsonl").open("a") as file:
                    print(json.dumps({"critic/rewards/mean": rewards[-1]}), file=file)

    samples, parts = task["prompts"] * task["group_size"], task["minibatches"]
    sizes: Any = dict(max_steps=steps * parts, per_device_train_batch_size=samples // parts, steps_per_generation=parts)
    sizes |= dict(num_generations=task["group_size"], max_completion_length=task["response_tokens"])
    loss: Any = dict(loss_type="grpo", beta=task["kl_coef"], temperature=1.0, top_p=1.0, top_k=0, max_grad_norm=1.0)
    adam: Any = dict(zip(("adam_beta1", "adam_beta2"), task["betas"], strict=True), learning_rate=task["lr"])
    adam |= dict(weight_decay=0.0, lr_scheduler_type="constant", gradient_accumulation_steps=1)
    how: Any = dict(gradient_checkpointing=False, shuffle_dataset=False, bf16=False, use_cpu=True, disable_tqdm=True)
    how |= dict(output_dir=folder, seed=seed, report_to="none", save_strategy="no", logging_steps=parts)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32),
        reward_funcs=reward,
        args=GRPOConfig(**sizes, **loss, **adam, **how),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Record()],
    )
    trainer.train()

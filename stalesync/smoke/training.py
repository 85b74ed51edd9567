"""Train ten steps of a small model in bfloat16 by the scripts of this project, and check what the run reports.

scripts/make_base.py ─► a base model that solves a tenth of one-digit sums
scripts/train.py     ─► runs/smoke: GRPO, training and generation on the same cards, checksums of every switch
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fusion.resources import SCRIPTS, SHAPES

STEPS = 10
LOGPROB_TOLERANCE = 0.05
"""Largest mean difference between the trainer's and the engine's log-probabilities of the sampled tokens"""


def base_model_command(python: str, folder: Path, kind: str) -> list[str]:
    shape = ["--shape", str(SHAPES / "tiny" / "smoke.yaml"), "--target", "0.1"]
    return [python, str(SCRIPTS / "make_base.py"), "addition", str(folder / "base"), "--device", kind, *shape]


def train_command(python: str, folder: Path, *, kind: str, cards: int) -> list[str]:
    """Return the command of the run on 1, 2 or 4 cards."""
    layouts = {
        1: [],
        2: ["parallel.train.tp=2", "parallel.infer.ep=2"],
        4: ["parallel.train.tp=2", "parallel.train.ep=2", "parallel.infer.ep=4"],
    }
    settings = """model.dtype=bfloat16 run.name=smoke run.eval_prompts=8 data=addition data.max_prompt_length=8
        data.prompts_per_step=4 reward=arithmetic rollout.max_response_length=5 algorithm=grpo algorithm.group_size=8
        algorithm.minibatches=2 training.lr=5e-4 fusion.checksum=true device.deterministic=true""".split()
    folders = [f"run.dir={folder / 'runs'}", f"model.path={folder / 'base'}"]
    settings += [f"run.steps={STEPS}", f"cluster.npus={cards}", f"device={kind}", *layouts[cards]]
    return [python, str(SCRIPTS / "train.py"), *folders, *settings]


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """Return the steps of the run. Raise OSError, ValueError: there is no such file, or it is damaged."""
    lines = (folder / "runs" / "smoke" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def summarise(rows: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """Return figures of the run, and what is wrong with it; "" if nothing is.

    Invariants: a run is right only if it has all its steps, every loss and gradient norm is finite, some gradient is
    not zero, and trainer and engine agree about the tokens' log-probabilities."""
    if not rows:
        return {}, "the run wrote no step"
    rows = [{name: math.nan if value is None else value for name, value in row.items()} for row in rows]
    norms = [row.get("actor/grad_norm", math.nan) for row in rows]
    differences = [row.get("training/rollout_logprobs_diff_mean", math.nan) for row in rows]
    seconds = sorted(row.get("timing_s/step", math.nan) for row in rows[1:] or rows)
    figures = {
        "steps": len(rows),
        "reward_first": rows[0].get("critic/rewards/mean", math.nan),
        "reward_last": rows[-1].get("critic/rewards/mean", math.nan),
        "step_s": seconds[len(seconds) // 2],
        "logprobs_diff": max(differences),
        "grad_norm_max": max(norms),
    }
    if len(rows) != STEPS:
        return figures, f"the run wrote {len(rows)} steps, not {STEPS}"
    if not all(map(math.isfinite, [*norms, *(row.get("actor/loss", math.nan) for row in rows)])):
        return figures, "a loss or a gradient norm is not finite"
    if not any(norms):
        return figures, "every gradient is zero"
    if not all(difference <= LOGPROB_TOLERANCE for difference in differences):
        worst = max(differences, key=lambda value: (math.isnan(value), value))
        return figures, f"log-probabilities of trainer and engine differ by {worst:.3g} on average"
    return figures, ""

"""Log to Weights & Biases. WANDB_MODE (offline), WANDB_PROJECT, WANDB_API_KEY, … are read by the library."""

from __future__ import annotations

import os
from collections.abc import Mapping

import wandb

from fusion.telemetry.loggers.interface import PROJECT, LoggedRun

STEP = "training/global_step"
"""The axis of all metrics, as in verl. The library's own counter only ascends: it would drop the steps that a resumed
run repeats."""


class WandbLogger:
    """Keep one run of W&B over all starts of a run, by its id. It prints where that is, and takes no output."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            dir=run.folder,
            config=dict(run.config),
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        if not self._run.offline:
            print(f"wandb: {self._run.url}")
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({STEP: step, **metrics})

    def close(self) -> None:
        self._run.finish()

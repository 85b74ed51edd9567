"""Log to Weights & Biases, SwanLab or Trackio. Each library reads its own environment: WANDB_MODE (offline),
SWANLAB_MODE (online, local, offline), TRACKIO_DIR, …_PROJECT, …_API_KEY, …; Trackio is local without any."""

import os
from collections.abc import Mapping
from typing import Any

from fusion.telemetry.loggers.interface import PROJECT, LoggedRun

STEP = "training/global_step"
"""The axis of all metrics of W&B, as in verl. The library's own counter only ascends: it would drop the steps that a
resumed run repeats."""


class Tracker:
    """What the three have in common; ``_run``: the library's object of the run."""

    _run: Any

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()


class WandbLogger(Tracker):
    """Keep one run of W&B over all starts of a run, by its id. It prints where that is, and takes no output."""

    def __init__(self, run: LoggedRun) -> None:
        import wandb

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


class SwanLabLogger(Tracker):
    """Keep one experiment of SwanLab over all starts of a run, by its id; without a server, each start has a folder
    with that id. Nothing is asked on the terminal, nor its output taken."""

    def __init__(self, run: LoggedRun) -> None:
        import swanlab

        folder = run.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=str(folder),
            config=dict(run.config),
            settings=swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")),
        )


class TrackioLogger(Tracker):
    """Keep one run of Trackio over all starts of a run. Trackio resumes by name, so the name has part of the id."""

    def __init__(self, run: LoggedRun) -> None:
        import trackio

        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id[:8]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

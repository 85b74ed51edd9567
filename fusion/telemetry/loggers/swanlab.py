"""Log to SwanLab. SWANLAB_MODE (online, local, offline), SWANLAB_PROJECT, SWANLAB_API_KEY, … are read."""

from __future__ import annotations

import os
from collections.abc import Mapping

import swanlab

from fusion.telemetry.loggers.interface import PROJECT, LoggedRun


class SwanLabLogger:
    """Keep one experiment of SwanLab over all starts of a run, by its id; without a server, each start has a folder
    with that id. Nothing is asked on the terminal, nor its output taken."""

    def __init__(self, run: LoggedRun) -> None:
        folder = run.folder / "swanlab"
        folder.mkdir(exist_ok=True)
        quiet = swanlab.Settings(interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none"))
        self._run = swanlab.init(
            project=os.environ.get("SWANLAB_PROJECT", PROJECT),
            name=run.name,
            id=run.id,
            resume="allow",
            log_dir=str(folder),
            config=dict(run.config),
            settings=quiet,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()

"""Log to Trackio. TRACKIO_DIR, TRACKIO_SPACE_ID, TRACKIO_SERVER_URL, … are read by the library; it is local without."""

from __future__ import annotations

import os
from collections.abc import Mapping

import trackio

from fusion.telemetry.loggers.interface import PROJECT, LoggedRun


class TrackioLogger:
    """Keep one run of Trackio over all starts of a run. Trackio resumes by name, so the name has part of the id."""

    def __init__(self, run: LoggedRun) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=f"{run.name}-{run.id[:8]}",
            resume="allow",
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()

"""A logger of one's own, as `run.loggers=[tests.telemetry.loggers.to_file:ToFile]` names it."""

from collections.abc import Mapping

from fusion.telemetry.files import JsonLines
from fusion.telemetry.loggers import LoggedRun


class ToFile:
    """Writes what it receives to `own.jsonl` in the run's folder."""

    def __init__(self, run: LoggedRun) -> None:
        self._lines = JsonLines(run.folder / "own.jsonl")
        self._lines.write({"id": run.id, "resumed": run.resumed, "steps": run.config["run"]["steps"]})

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._lines.write({"step": step, **metrics})

    def close(self) -> None:
        self._lines.write({"closed": True})
        self._lines.close()

"""Log to several loggers, none of which can end the run or lose the metrics of another."""

import json
import logging
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from fusion.telemetry.files import write_atomic
from fusion.telemetry.loggers.interface import LoggedRun, Logger

NAME = "loggers.json"
"""File of the run folder: the run's id, and the loggers that have logged it."""
MAX_CHARACTERS = 300
"""Maximum length of an error in a note; the whole of it is in the log"""
log = logging.getLogger(__name__)


class LoggerGroup:
    """Start the loggers of ``classes``, by name, for the run in ``folder``. ``notes``: a sentence for each that has
    failed since.
    Raise ValueError: a logger could not be started; the others are closed again."""

    def __init__(
        self, folder: Path, classes: Mapping[str, type[Logger]], config: Mapping[str, Any] | None = None
    ) -> None:
        self._loggers: dict[str, Logger] = {}
        run_id, earlier, self.notes = _read(folder / NAME)
        run = LoggedRun(name=folder.resolve().name, folder=folder, id=run_id, config=config or {})
        for name, cls in classes.items():
            try:
                self._loggers[name] = cls(replace(run, resumed=name in earlier))
            except Exception as error:  # each library has exceptions of its own
                self.close()
                raise ValueError(f"run.loggers: {name} could not be started: {_described(error)}") from error
        write_atomic(folder / NAME, _text(run_id, sorted({*earlier, *classes})))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of one step to each. One that raises is closed and left out from then on."""
        for name, logger in list(self._loggers.items()):
            try:
                logger.log(step, metrics)
            except Exception as error:  # a server that is away for a minute must not end a run of a week
                del self._loggers[name]
                self._report(f"run.loggers: {name} was stopped at step {step}: {_described(error)}")
                self._close(name, logger)

    def close(self) -> None:
        while self._loggers:
            self._close(*self._loggers.popitem())

    def _close(self, name: str, logger: Logger) -> None:
        try:
            logger.close()
        except Exception as error:  # as above
            self._report(f"run.loggers: {name} could not be closed: {_described(error)}")

    def _report(self, note: str) -> None:
        log.warning("%s; metrics.jsonl has all metrics", note, exc_info=True)
        self.notes.append(note)


def _described(error: Exception) -> str:
    """Return the first line of an error, shortened: some libraries' messages are pages long."""
    message = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {message[:MAX_CHARACTERS]}"


def _read(path: Path) -> tuple[str, list[str], list[str]]:
    """Return the id of the run, a new one if it has none yet, the loggers that have logged it, and a note if the file
    is damaged."""
    if not path.exists():
        return secrets.token_hex(8), [], []
    text = path.read_bytes()
    try:
        record = json.loads(text)
        run_id, earlier = str(record["id"]), list(map(str, record["loggers"]))
        has_digest = {*record} != {"id", "loggers"}  # an earlier version had none
        if has_digest and text != _text(run_id, earlier).encode():
            raise ValueError("it does not match its own digest")
        return run_id, earlier, []
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        note = f"{path.name} is damaged ({type(error).__name__}): loggers record this run under a new id"
        log.warning(note)
        return secrets.token_hex(8), [], [note]


def _text(run_id: str, loggers: list[str]) -> str:
    """Return the content of the file, with a digest of it."""
    record = {"id": run_id, "loggers": loggers}
    return json.dumps(record | {"digest": xxhash.xxh3_128_hexdigest(json.dumps(record).encode())}) + "\n"

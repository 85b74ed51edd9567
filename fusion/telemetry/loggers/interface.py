"""State what a logger is."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

PROJECT = "rlfusion"
"""Project or experiment of a run where the library's own setting names none."""


@dataclass(frozen=True)
class LoggedRun:
    name: str
    """Name of the run, that of its folder."""
    folder: Path
    """The run's folder; a logger keeps local files in a folder of its own name in it."""
    id: str
    """Identifier of the run over all its starts: 16 characters, 0-9 and a-f."""
    resumed: bool = False
    """Whether the run was resumed and this logger has logged it before, so that it continues that history."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The resolved config, plain values by group."""


class Logger(Protocol):
    """Receive the metrics of one run, in one thread. A class is named by `run.loggers=[module:Class]`.

    An exception of the constructor ends the run before any worker has started. One of `log` stops this logger only."""

    def __init__(self, run: LoggedRun) -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of one step by their names, verl's; step 0: of the evaluation before the first one. Steps
        ascend, except that a resumed run begins some steps before that of its checkpoint, with the same values: a
        killed run may have lost what its logger had not stored. Values may be nan or inf."""

    def close(self) -> None:
        """Complete the record; called once, also after `log` has failed."""

"""Find the classes of `run.loggers`, and refuse unknown ones and missing libraries before anything is started.

Checking imports no library, so that a config is refused, and `--help` printed, at once."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from fusion.telemetry.classes import OWN_CLASS, find_class

if TYPE_CHECKING:
    from fusion.telemetry.loggers.interface import Logger

BUILT_IN = {
    "tensorboard": "fusion.telemetry.loggers.tensorboard:TensorBoardLogger",
    "wandb": "fusion.telemetry.loggers.trackers:WandbLogger",
    "mlflow": "fusion.telemetry.loggers.mlflow:MlflowLogger",
    "swanlab": "fusion.telemetry.loggers.trackers:SwanLabLogger",
    "trackio": "fusion.telemetry.loggers.trackers:TrackioLogger",
}
"""Class by name; the name is also that of the library, of its package and of its extra in setup.py."""


def check_loggers(names: Sequence[str]) -> None:
    """Check the names of loggers.
    Raise ValueError: a name is unknown or occurs twice, or its library or module is not installed."""
    if len(set(names)) < len(names):
        raise ValueError(f"run.loggers={list(names)}: expected each logger once")
    for name in names:
        if name in BUILT_IN:
            if not _is_installed(name):
                raise ValueError(f"run.loggers: {name} is not installed: pip install {name}")
        elif OWN_CLASS.fullmatch(name) is None:
            raise ValueError(f"run.loggers: unknown logger {name!r}: expected {', '.join(BUILT_IN)} or module:Class")
        elif not _is_installed(module := name.partition(":")[0]):
            raise ValueError(
                f"run.loggers: {name}: there is no module {module!r}: install it, or add its folder to PYTHONPATH"
            )


def find_loggers(names: Sequence[str]) -> dict[str, type[Logger]]:
    """Import the classes of loggers; return them by name.
    Raise ValueError: as `check_loggers`; or a module cannot be imported, or has no such class."""
    check_loggers(names)
    return {name: find_class(name, BUILT_IN, key=f"run.loggers: {name}") for name in names}


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # its package is missing; or a module of that name has no spec
        return False

"""Write the page of runs, once or repeatedly while they are running."""

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from fusion.telemetry.files import write_atomic
from fusion.telemetry.page.document import render
from fusion.telemetry.page.run_data import read_run

NAME = "report.html"

MAX_NAME_BYTES = 200
"""Maximum length of the runs' names in the name of a file; file systems allow 255 bytes, also of a temporary file's"""
MAX_SHARE = 0.1
"""Maximum share of the time in which a followed run is read: the interval grows with the size of its files."""


def default_path(folders: Sequence[Path]) -> Path:
    """Return where the page of these runs is written: in the first one's folder, which is private to its user."""
    if len(folders) == 1:
        return folders[0] / NAME
    names = "-".join(folder.resolve().name for folder in folders)
    short = os.fsencode(names)[:MAX_NAME_BYTES].decode(errors="ignore")  # a character is not cut in two
    return folders[0] / f"report-{short}.html"


def write_page(folders: Sequence[Path], path: Path | None = None, refresh_s: float | None = None) -> Path:
    """Write the page of one or several runs; return its path. A reader sees the old or the new page.
    ``path``: of the file; None: `default_path`.
    ``refresh_s``: seconds after which a page of a running run reloads itself; None: never.
    Raise OSError: the file cannot be written.
    Raise ValueError: a file of a run is damaged."""
    path = path or default_path(folders)
    _write(folders, path, refresh_s)
    return path


def follow(folders: Sequence[Path], path: Path, every_s: float, sleep: Callable[[float], None] = time.sleep) -> None:
    """Rewrite the page until all runs have ended; the last one does not reload itself."""
    while True:
        start = time.monotonic()
        if not _write(folders, path, every_s):
            return
        sleep(max(every_s, (time.monotonic() - start) / MAX_SHARE))


def _write(folders: Sequence[Path], path: Path, refresh_s: float | None) -> bool:
    """Write the page; return whether any run is running."""
    runs = [read_run(folder) for folder in folders]
    if len({run["name"] for run in runs}) < len(runs):
        runs = [run | {"name": str(folder)} for run, folder in zip(runs, folders, strict=True)]
    running = any(run["running"] for run in runs)
    write_atomic(path, render(runs, refresh_s if running else None))
    return running

"""Models, base models and whole runs of benchmarks: what a user would start by a command is started so."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness import ROOT

Row = dict[str, float]
"""Metrics of a step of a run"""


@contextmanager
def temporary_folder(**where: Any) -> Iterator[Path]:
    """Create a folder that is removed at the end of the block."""
    with tempfile.TemporaryDirectory(**where) as name:
        yield Path(name)


def make_base(folder: Path, task: str, *options: str, target: str | None = None) -> Path:
    """Make the base model of a task by `scripts/make_base.py`; return its folder. ``target``: accuracy; "": default."""
    command = [sys.executable, "scripts/make_base.py", task, str(folder), *options]
    command += ["--target", target] if target else []
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return folder


TRAIN = sys.executable, "scripts/train.py"


def train(home: Path, overrides: Sequence[str], *, command: Sequence[str] = TRAIN, **how: Any) -> list[Row]:
    """Run training in the new folder ``home`` as a user does; return the metrics of its steps. Others: as `follow`."""
    return [row for _, row in follow([*command, f"run.dir={home}", "run.name=run", *overrides], home, **how)]


def follow(
    command: Sequence[str],
    home: Path,
    *,
    until: Callable[[list[Row]], bool] | None = None,
    timeout_s: float = 900.0,
    poll_s: float = 0.1,
    environment: Mapping[str, str] = {},  # noqa: B006
) -> list[tuple[float, Row]]:
    """Run a command that writes `run/metrics.jsonl` in ``home``; return its rows, and when each was read. ``until``:
    ends the run by SIGTERM once it is true of the rows; None: the run goes to its end."""
    home.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[float, Row]] = []
    end_s, read_bytes, reached = time.monotonic() + timeout_s, 0, False
    with (home / "log").open("w") as log:
        files: Any = dict(stdout=log, stderr=subprocess.STDOUT)
        process = subprocess.Popen(command, cwd=ROOT, env=os.environ | environment, **files)
        try:
            while not reached and time.monotonic() < end_s:
                ended = process.poll() is not None
                lines, read_bytes = new_lines(home / "run" / "metrics.jsonl", read_bytes)
                rows += [(time.perf_counter(), json.loads(line)) for line in lines]
                reached = until is not None and until([row for _, row in rows])
                if ended:
                    break
                time.sleep(poll_s)
        finally:
            process.terminate()
            status = process.wait(300)
    if not reached and (until is not None or status):
        sys.exit(f"{' '.join(command)}\nexit status {status} after {len(rows)} steps\n"
                 f"{(home / 'log').read_text(errors='replace')[-4000:]}")  # fmt: skip
    return rows


def new_lines(path: Path, start: int) -> tuple[list[str], int]:
    """Return the whole lines of a growing file from byte ``start`` on, and where the next ones begin."""
    if not path.is_file() or path.stat().st_size == start:
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        whole = file.read().rpartition(b"\n")
    return whole[0].decode().splitlines(), start + len(whole[0]) + len(whole[1])

"""Write and read the controller's files of a checkpoint.

    checkpoints/step-N/   trainer/                   weights, optimizer, step: written by the cards
                          queue/                     samples in progress, including suspended ones
                          controller.json            the run's state, written last: marks the checkpoint as complete

The states of run and queue are taken while no engine runs and all generated samples are scored (`TrainingRun.cut`), so
that no work is repeated after a restart.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distqueue import DistQueue
from fusion.telemetry.files import sync, write_atomic

NAME = "controller.json"
QUEUE = "queue"
TRAINER = "trainer"


def begin(target: Path, queue: DistQueue | None) -> None:
    """Creates the folder of a checkpoint and writes the queue's part (None: the queue is empty). Removes files that an
    interrupted run left there."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if queue is not None:
        queue.checkpoint(str((target / QUEUE).resolve()))


def finish(target: Path, state: str) -> None:
    """Completes a checkpoint whose other files are on disk. ``state``: the run's state as JSON."""
    write_atomic(target / NAME, state)
    for path in (target / NAME, target, target.parent):
        sync(path)


def read(checkpoint: Path) -> Mapping[str, Any]:
    """Returns the run's state."""
    return json.loads((checkpoint / NAME).read_text())


def queue_of(checkpoint: Path | None) -> str | None:
    """Returns the queue's part of a checkpoint, to create the queue from; None if the checkpoint has none."""
    folder = None if checkpoint is None else checkpoint / QUEUE
    return str(folder.resolve()) if folder is not None and folder.is_dir() else None


def newest(folder: Path) -> Path | None:
    """Returns the complete checkpoint of a run with the highest step; None if there is none."""
    complete = [path.parent for path in folder.glob(f"checkpoints/step-*/{NAME}")]
    return max(complete, key=lambda path: json.loads((path / NAME).read_text())["step"], default=None)


def prune(folder: Path, keep: int) -> None:
    """Removes complete checkpoints except the last ``keep`` (0: removes none), and incomplete ones older than those. Of
    each checkpoint, the file that marks it as complete is removed first."""
    steps = {path: int(path.name.removeprefix("step-")) for path in folder.glob("step-*")}
    complete = sorted((path for path in steps if (path / NAME).is_file()), key=lambda path: steps[path])
    if keep and len(complete) >= keep:
        for path in [path for path in steps if steps[path] < steps[complete[-keep]]]:
            (path / NAME).unlink(missing_ok=True)
            shutil.rmtree(path)

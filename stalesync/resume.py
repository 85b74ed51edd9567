"""Open the folder of a run that resumes, and find its checkpoint, before anything in the folder changes.

run.resume=true    a complete checkpoint is resumed; without one the run is refused, and no folder is created
run.resume=auto    likewise; without one the run starts, and what an earlier start left is kept in `start-<n>/`
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fusion.telemetry import RunFolder
from fusion.telemetry.run_folder import complete_checkpoints
from stalesync import savepoint
from stalesync.config import RunConfig


@dataclass(frozen=True)
class Reopened:
    """The folder of an earlier start, locked. ``checkpoint``: from which the run resumes; None: it starts. ``notes``:
    what a user must know of it, such as a newer checkpoint that is damaged."""

    folder: RunFolder
    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()


def check_resume(run: RunConfig) -> None:
    """Checks that a run that must resume can.

    Raises:
        NoWholeCheckpoint: it has no complete checkpoint.
    """
    if run.resume == "true":
        savepoint.check_resumable(Path(run.dir) / run.name)


def reopen(run: RunConfig) -> Reopened | None:
    """Opens the folder of an earlier start that this one continues; None: there is none.

    Raises:
        FolderInUse: another process has the folder.
        NoWholeCheckpoint: all complete checkpoints are damaged; or it has none, and the run must resume.
    """
    path = Path(run.dir) / run.name
    if run.resume == "false" or not path.is_dir():
        return None
    folder = RunFolder(run.dir, run.name, "resume")
    try:
        if run.resume == "auto" and not complete_checkpoints(path):
            aside = folder.set_aside()
            kept = f"; what an earlier start left is kept in {aside}" if aside else ""
            print(line := f"nothing to resume, starting in {path}{kept}")
            return Reopened(folder, notes=(line,) if aside else ())
        print(folder.choice)
        print("reading the newest checkpoint to compare it with its manifest", flush=True)
        checkpoint, lines = savepoint.newest(path)
    except BaseException:
        folder.close()
        raise
    return Reopened(folder, checkpoint, tuple(lines))


def new_folder(run: RunConfig) -> RunFolder:
    """Creates the folder of a run that starts: of exactly its name where a later start is to find it."""
    folder = RunFolder(run.dir, run.name, "suffix" if run.resume == "false" else "resume")
    print(f"nothing to resume, starting: {folder.choice}" if run.resume == "auto" else folder.choice)
    return folder

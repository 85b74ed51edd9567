"""Write, verify and read the checkpoints of a run.

    checkpoints/step-N/   trainer/                   masters and moments as global tensors: written by the cards
                          queue/                     samples in progress, including suspended ones
                          drafts/                    history of prompts, with rollout.drafts.source=history or both
                          controller.json            the run's state
                          manifest.json              sizes and digests of all these files, and digests of the rows of
                                                     the logs beside it, written last: marks the checkpoint as complete

The states of run and queue are taken while no engine runs, all generated samples are scored, and all that were scored
or trained are acknowledged to the queue (`Checkpoints.cut`), so that no sample is scored or trained twice after a
restart.

Only folders named `step-<number>` are checkpoints of the run: copies of any other name (`step-4-good`) are neither
resumed nor removed. When a run goes back to an older checkpoint, a damaged one is renamed to `step-N.damaged`, and one
that lacks only its manifest to `step-N.unmarked`."""

import difflib
import json
import logging
import shutil
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusion.model import Parallel
from fusion.model.peft_folder import CONFIG as ADAPTER
from fusion.telemetry.files import sync, write_atomic
from fusion.telemetry.manifest import NAME as MARK
from fusion.telemetry.manifest import find_damage, read_manifest, write_manifest
from fusion.telemetry.row_digests import NO_SEALS, Seal
from fusion.telemetry.run_contents import complete_checkpoints, step_of, unmarked_checkpoints
from fusion.training.schedule import Schedule

if TYPE_CHECKING:
    from distqueue import DistQueue
    from fusion.telemetry import RunFolder
    from stalesync.job.config import Config

NAME = "controller.json"
QUEUE = "queue"
TRAINER = "trainer"
DRAFTS = "drafts"
log = logging.getLogger(__name__)


class NoWholeCheckpoint(ValueError):
    """A run has no checkpoint from which it can resume."""


def path_of(folder: "RunFolder", step: int) -> Path:
    return folder.checkpoints / f"step-{step}"


def begin(target: Path, queue: "DistQueue | None") -> None:
    """Create the folder of a checkpoint and write the queue's part (None: the queue is empty). Remove files that an
    interrupted run left there."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    if queue is not None:
        queue.checkpoint(str((target / QUEUE).resolve()))


def finish(target: Path, state: str, seals: Mapping[str, Seal] = NO_SEALS) -> None:
    """Complete a checkpoint whose other files are on disk. ``state``: the run's state as JSON; ``seals``: of the logs
    in the run's folder (`RunFolder.seal`)."""
    write_atomic(target / NAME, state)
    sync(target / NAME)
    # The cards have hashed what they wrote; only the small files and the queue's are read here.
    written_by_cards = target / TRAINER
    hashed = read_manifest(written_by_cards).files if written_by_cards.is_dir() else {}
    write_manifest(target, {f"{TRAINER}/{name}": record for name, record in hashed.items()}, seals)
    sync(target.parent)


def discard(target: Path) -> None:
    """Remove a checkpoint that could not be completed: its files may be what fills the disk."""
    if not (target / MARK).exists():
        shutil.rmtree(target, ignore_errors=True)


def read(checkpoint: Path) -> Mapping[str, Any]:
    """Return the run's state."""
    return json.loads((checkpoint / NAME).read_text())


def groups_in_progress(state: Mapping[str, Any]) -> list[str]:
    """Return the groups of the run's state that are neither trained nor otherwise ended."""
    return [*state["ledger"]["in_flight"], *state["ledger"]["finished"]]


def without_groups(state: Mapping[str, Any], why: str) -> dict[str, Any]:
    """Return the run's state with all groups in progress ended as `failed:WHY`. The queue's part must not be used."""
    ledger, ended = state["ledger"], dict(state["ledger"]["ended"])
    ended[f"failed:{why}"] = ended.get(f"failed:{why}", 0) + len(groups_in_progress(state))
    nothing: dict[str, Any] = {"buffer": [], "texts": [], "scored": [], "held": []}
    return {**state, **nothing, "ledger": {**ledger, "in_flight": {}, "finished": {}, "tokens": {}, "ended": ended}}


def queue_of(checkpoint: Path | None) -> str | None:
    """Return the queue's part of a checkpoint, to create the queue from; None if the checkpoint has none."""
    folder = None if checkpoint is None else checkpoint / QUEUE
    return str(folder.resolve()) if folder is not None and folder.is_dir() else None


def layout_of(checkpoint: Path) -> Parallel:
    """Return the layout that the checkpoint's trainer had."""
    return Parallel(**json.loads((checkpoint / TRAINER / "trainer.json").read_text())["layout"])


def schedule_of(checkpoint: Path, config: "Config", steps_left: int) -> Schedule:
    """Return the schedule of the learning rate of a run that resumes from the checkpoint."""
    saved, training = json.loads((checkpoint / TRAINER / "trainer.json").read_text()), config.training
    total = config.run.steps * config.algorithm.minibatches
    own = Schedule(training.peak_lr, training.schedule, training.warmup_steps, total)
    return own.resumed(Schedule(**saved["schedule"]), saved["steps"], steps_left) if "schedule" in saved else own


def newest(folder: Path) -> tuple[Path, list[str]]:
    """Read the complete checkpoints of a run from the newest on; return the first that is as it was written, with a
    line for each newer one that was passed over. Those that are damaged or lack only the mark are renamed. Where there
    is no whole one, rename nothing and raise NoWholeCheckpoint."""
    check_resumable(folder)
    damaged: dict[Path, str] = {}
    for step, path in reversed(complete_checkpoints(folder).items()):
        damage = find_damage(path)
        if damage is None:
            newer = [one for number, one in unmarked_checkpoints(folder).items() if number > step]
            lines = [_set_aside(bad, f"is damaged: {why}", "damaged", resumed=path) for bad, why in damaged.items()]
            return path, lines + [_pass_over(step, resumed=path) for step in newer]
        damaged[path] = damage
    listed = "; ".join(f"{path.name}: {damage}" for path, damage in damaged.items())
    key = "model.adapter" if (folder / "hf" / ADAPTER).is_file() else "model.path"
    raise NoWholeCheckpoint(
        f"run.resume: no checkpoint in {folder / 'checkpoints'} is whole ({listed}). Restore one from a copy, "
        f"or start a new run with another run.name ({key}={folder / 'hf'} continues from its last weights)"
    )


def check_resumable(folder: Path) -> None:
    """Raise NoWholeCheckpoint if a run has no complete checkpoint, with what it has, and runs of similar names."""
    if complete_checkpoints(folder):
        return
    unmarked = [*unmarked_checkpoints(folder).values()]
    if old := [path for path in unmarked if (path / NAME).exists() and [*path.glob("trainer/*.pt")]]:
        raise NoWholeCheckpoint(
            f"run.resume: {old[0]} was written by an earlier version, whose checkpoints cannot be resumed; start "
            f"a new run from its weights with model.path={folder / 'hf'} and another run.name"
        )
    has = f"{folder} does not exist"
    if unmarked:
        has = "; ".join(_describe_unmarked(path) for path in unmarked)
    elif folder.exists():
        has = f"{folder / 'checkpoints'} has none"
    others = {path.parent.parent.parent.name for path in folder.parent.glob(f"*/checkpoints/step-*/{MARK}")}
    similar = difflib.get_close_matches(folder.name, others, n=3)
    hint = f". Did you mean run.name={' or run.name='.join(similar)}?" if similar else ""
    raise NoWholeCheckpoint(
        f"run.resume=true: expected a run with a complete checkpoint; {has}{hint} (run.resume=auto starts a run that "
        "has nothing to resume)"
    )


def _describe_unmarked(path: Path) -> str:
    why = "" if (path / NAME).exists() else ", and its save was interrupted"
    return f"checkpoint {path} has no {MARK}{why}"


def _pass_over(path: Path, resumed: Path) -> str:
    """Name a checkpoint without the mark; rename it if it lacks nothing else, as the next save would replace it."""
    if (path / NAME).exists():
        return _set_aside(path, f"has no {MARK}", "unmarked", resumed=resumed)
    line = f"{_describe_unmarked(path)}. Going back to {resumed.name}"
    log.warning(line)
    return line


def _set_aside(path: Path, why: str, suffix: str, *, resumed: Path) -> str:
    """Rename a checkpoint, so that it does not count as one of those to keep; return what happened."""
    aside, number = path.with_name(f"{path.name}.{suffix}"), 2
    while aside.exists():
        aside, number = path.with_name(f"{path.name}.{suffix}-{number}"), number + 1
    path.rename(aside)
    line = f"checkpoint {path} {why}. Going back to {resumed.name}; it is kept as {aside}"
    log.warning(line)
    return line


def prune(checkpoints: Path, keep: int, spared: Container[int] = ()) -> None:
    """Remove complete checkpoints except the last ``keep`` (0: removes none) and those of the steps ``spared``, and
    incomplete ones older than those. Of each checkpoint, the file that marks it as complete is removed first."""
    complete = [*complete_checkpoints(checkpoints.parent)]
    if not keep or len(complete) < keep:
        return
    for path in checkpoints.glob("step-*"):
        step = step_of(path.name)
        if step is None or step >= complete[-keep] or step in spared:
            continue
        if path.is_dir() and not path.is_symlink():
            (path / MARK).unlink(missing_ok=True)
            shutil.rmtree(path)

"""Open the folder of a run that resumes, and find its checkpoint, before anything in the folder changes.

run.resume=true    a complete checkpoint is resumed; without one the run is refused, and no folder is created
run.resume=auto    likewise; without one the run starts, and what an earlier start left is kept in `start-<n>/`
run.resume=false   the run starts, in a new folder, or likewise in one that has nothing but a start that failed before
                   its first step was done
"""

import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from fusion.inference import SamplingParams
from fusion.inference.config import SAMPLING
from fusion.model.box_checksum import MODULUS
from fusion.telemetry import RunFolder
from fusion.telemetry.folder_lock import FolderInUse
from fusion.telemetry.run_contents import EVALUATIONS, complete_checkpoints
from stalesync.job import savepoint
from stalesync.job.automatic import AUTOMATIC
from stalesync.job.config import Config, RunConfig
from stalesync.job.other_names import check_moved, migrate
from stalesync.job.overrides import load
from stalesync.job.resume_rules import ENDED, RULES, ResumeChanges, Rule, compare, decide, superfluous
from stalesync.job.run_inputs import find_other_content, settings_of
from stalesync.process.run_log import ERROR
from stalesync.prompts import PromptSource


@dataclass(frozen=True)
class Reopened:
    """The folder of an earlier start, locked. ``checkpoint``: from which the run resumes; None: it starts; ``notes``:
    what a user must know of it, such as a newer checkpoint that is damaged; ``state``: of the run in the checkpoint;
    ``ended``: groups in progress, where they end because of a change; ``accepted``: keys whose content is known to have
    changed: the user has changed or named them."""

    folder: RunFolder
    checkpoint: Path | None = None
    notes: tuple[str, ...] = ()
    state: Mapping[str, Any] = field(default_factory=dict)
    ended: tuple[str, ...] = ()
    accepted: frozenset[str] = frozenset()


def check_resume(run: RunConfig) -> None:
    """Raise NoWholeCheckpoint if a run that must resume has no complete checkpoint."""
    if run.resume == "true":
        savepoint.check_resumable(Path(run.dir) / run.name)


def reopen(run: RunConfig) -> Reopened | None:
    """Open the folder of an earlier start that this one continues; None: there is none. Raise FolderInUse if another
    process has it, NoWholeCheckpoint if the run must resume and all are damaged or missing."""
    path = Path(run.dir) / run.name
    if run.resume == "false" or not path.is_dir():
        return None
    folder = RunFolder(run.dir, run.name, "resume")
    try:
        if run.resume == "auto" and not complete_checkpoints(path):
            aside = folder.set_aside()
            kept = f"; what an earlier start left is kept in {aside}" if aside else ""
            print(line := f"nothing to resume, starting in the run folder {path}{kept}")
            return Reopened(folder, notes=(line,) if aside else ())
        print(folder.choice)
        print("reading the newest checkpoint to compare it with its manifest", flush=True)
        checkpoint, lines = savepoint.newest(path)
    except BaseException:
        folder.close()
        raise
    return Reopened(folder, checkpoint, tuple(lines))


def new_folder(run: RunConfig) -> RunFolder:
    """Create the folder of a run that starts: of exactly its name where a later start is to find it. Otherwise takes a
    folder that a failed start has left, if it comes before the first free name."""
    numbered = (Path(run.dir, f"{run.name}-{number}" if number > 1 else run.name) for number in count(1))
    for path in takewhile(os.path.lexists, numbered if run.resume == "false" else ()):
        if (folder := _reused(path)) is not None:
            return folder
    folder = RunFolder(run.dir, run.name, "suffix" if run.resume == "false" else "resume")
    print(f"nothing to resume, starting: {folder.choice}" if run.resume == "auto" else folder.choice)
    return folder


def _reused(path: Path) -> RunFolder | None:
    """Open a folder that has only a failed start, and sets aside what that has left; None: it has something else."""
    with suppress(FolderInUse):
        if _has_only_failed_start(path):
            folder = RunFolder(path.parent, path.name, "resume")
            if _has_only_failed_start(path):  # still, now that it is locked
                print(f"starting in {path}, where a start has failed: what it left is kept in {folder.set_aside()}")
                return folder
            folder.close()
    return None


def _has_only_failed_start(path: Path) -> bool:
    """Whether a folder is this user's own, and the last start in it failed before its first step or evaluation was
    done, as none did before."""
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o022:
        return False
    done = ("checkpoints", "hf"), ("metrics.jsonl", EVALUATIONS)
    folders, logs = ([path / name for name in names if os.path.lexists(path / name)] for names in done)
    is_empty = not any(any(folder.iterdir()) for folder in folders) and not any(log.lstat().st_size for log in logs)
    return (path / ERROR).is_file() and is_empty


def check_changes(earlier: Reopened, config: Config, *, source: PromptSource, inputs: Mapping[str, Any]) -> Reopened:
    """Compare what the checkpoint depends on with this start, and note a line that lists every change; raise
    ValueError, by key, for one that is refused. ``inputs``: what this start depends on, without the weights."""
    if earlier.checkpoint is None:
        return earlier
    check_moved(config.run.resume_changed)
    state, notes = savepoint.read(earlier.checkpoint), [*earlier.notes]
    if config.run.steps < state["step"]:
        raise ValueError(f"run.steps={config.run.steps}: expected at least the {state['step']} steps that are done")
    saved = state.get("inputs", {})
    if not saved:
        notes.append(
            f"{earlier.checkpoint.name} was written by an earlier version: its settings are taken to be those of "
            "config.yaml, and other content of models, rewards and evaluation files cannot be found"
        )
    before = migrate(saved.get("settings", {})) or _settings_in(earlier.folder.path)
    settings = compare(before, inputs["settings"])
    content = find_other_content(saved.get("files", {}), inputs["files"], changed=settings)
    if why := source.find_other_order(state["prompts"]):
        keys = [key for key in settings if RULES[key] is Rule.ORDER] or ["data.source"]
        content |= dict.fromkeys(keys, why)
    groups, undecided = savepoint.groups_in_progress(state), _keys_of_large_files(saved)
    masks_others = bool(groups) and saved.get("masked_ids", []) != inputs["masked_ids"]
    if masks_others:
        ending = f"{len(groups)} groups in progress, sampled with other masked ids, would end as failed:{ENDED}"
        content["model.path"] = "; ".join(filter(None, (content.get("model.path"), ending)))
    changes = ResumeChanges(settings, content, len(groups), truncation=_truncates(before) != config.rollout.truncates)
    ends = decide(changes, _needed(changes, config.run, notes.append, undecided), undecided)
    if line := changes.describe():
        notes.append(line)
    if ends := ends or masks_others:
        notes.append(f"{len(groups)} groups in progress end as failed:{ENDED}")
    accepted = content.keys() | {key for key in settings if key.startswith("reward.")}
    ended = tuple(groups) if ends else ()
    return replace(earlier, notes=tuple(notes), state=state, ended=ended, accepted=frozenset(accepted))


def _truncates(settings: Mapping[str, Any]) -> bool:
    keys = {name: f"rollout.sampling.{name}" for name in SAMPLING}
    return SamplingParams(**{name: settings[key] for name, key in keys.items() if key in settings}).truncates


def _needed(
    changes: ResumeChanges, run: RunConfig, note: Callable[[str], None], undecided: Collection[str] = ()
) -> list[str]:
    """Return the named keys. With `run.resume=auto` those that are not needed are left out, and noted: a scheduler
    starts a job with the same names again after the resume that needed them."""
    spare = [name for name in superfluous(changes, run.resume_changed, undecided) if name in RULES]
    if run.resume != "auto" or not spare:
        return run.resume_changed
    note(f"run.resume_changed: {', '.join(spare)}: not needed by this resume, and ignored")
    return [name for name in run.resume_changed if name not in spare]


def kept_automatic(run: RunConfig) -> dict[str, Any]:
    """Return what a run that this start resumes has resolved of the keys that may be `auto`; {}: it resumes none."""
    path = Path(run.dir) / run.name
    if run.resume == "false" or not complete_checkpoints(path):
        return {}
    return {key: value for key, value in _settings_in(path).items() if key in AUTOMATIC}


def keep_operators(earlier: Reopened | None, config: Config) -> Config:
    """Return the config with the table of operators of the checkpoint, where this start states none: until the kind of
    the cards is known, they are taken to be the same."""
    if earlier is None or config.device.operators != "auto":
        return config
    operators = earlier.state.get("inputs", {}).get("settings", {}).get(OPERATORS, "auto")
    return replace(config, device=replace(config.device, operators=operators))


OPERATORS = "device.operators"


def check_weights(
    earlier: Reopened, run: RunConfig, loaded: Iterable[Mapping[str, Mapping[str, int]]], note: Callable[[str], None]
) -> dict[str, dict[str, int]]:
    """Compare the checksums of large files, which the cards have taken while they loaded them, with the checkpoint's;
    return them, to be saved by role and file. ``loaded``: of `Worker.checksums`, by card; ``note``: shows a line to the
    user. Raise ValueError if a model has other content than at the checkpoint, or a key is named whose content is the
    same."""
    sums: dict[str, dict[str, int]] = {}
    for role, by_file in ((role, by_file) for card in loaded for role, by_file in card.items() if by_file):
        for file, value in by_file.items():
            of_role = sums.setdefault(role, {})
            of_role[file] = (of_role.get(file, 0) + value) % MODULUS
    saved, content = earlier.state.get("inputs", {}), dict[str, str]()
    if any(saved.get(SUMS_MOD_2_64, {}).values()):
        note("the checkpoint has checksums of an earlier version: of a large file, three pieces are compared")
    for role, files in saved.get("checksums", {}).items():
        key = ROLES[role]
        if role in sums and key not in earlier.accepted:
            content |= find_other_content({key: files}, {key: sums[role]})
    undecided = _keys_of_large_files(saved) - earlier.accepted
    changes = ResumeChanges({}, content, 0)
    named = replace(run, resume_changed=[key for key in run.resume_changed if key in undecided])
    decide(changes, _needed(changes, named, note))
    return sums


SUMS_MOD_2_64 = "weights"
"""Name in a checkpoint of checksums that were computed otherwise, by earlier versions"""
ROLES = {"policy": "model.path", "reference": "model.path", "reward_model": "reward.model"}
"""The key that names the folder of a role's weights"""


def _keys_of_large_files(saved: Mapping[str, Any]) -> set[str]:
    return {ROLES[role] for role in saved.get("checksums", {})}


def _settings_in(folder: Path) -> dict[str, Any]:
    """Return the settings of the last start; {} if this version cannot read them."""
    try:
        return settings_of(load(folder / "config.yaml"))
    except (OSError, ValueError):
        return {}

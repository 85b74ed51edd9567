"""Open the folder of a run that resumes, and find its checkpoint, before anything in the folder changes.

run.resume=true    a complete checkpoint is resumed; without one the run is refused, and no folder is created
run.resume=auto    likewise; without one the run starts, and what an earlier start left is kept in `start-<n>/`
run.resume=false   the run starts, in a new folder, or likewise in one that has nothing but a start that failed before
                   its first step was done

What a checkpoint depends on (`inputs_of`) is compared with the start:

    {"settings":   {key: value},
     "files":      {key: {file: size and digest}},
     "masked_ids": [[first, end], …], ids without a token,
     "checksums":  {role: {file: checksum of the weights that the cards have loaded from it}}}

Files of at most `WHOLE_BYTES` are digested whole, larger ones in three pieces; of these, the cards add a checksum of
all weights while they load them, which is the same in every layout. The order of prompts depends on `data.source`,
whose digest is part of the state of `PromptSource`."""

import json
import os
import stat
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from pathlib import Path
from typing import Any

from fusion.inference import SamplingParams
from fusion.inference.config import SAMPLING
from fusion.model.box_checksum import MODULUS
from fusion.model.huggingface import WHOLE_BYTES
from fusion.telemetry import RunFolder
from fusion.telemetry.folder_lock import FolderInUse
from fusion.telemetry.run_contents import EVALUATIONS, complete_checkpoints
from stalesync.job import savepoint
from stalesync.job.automatic import AUTOMATIC
from stalesync.job.config import Config, RunConfig
from stalesync.job.keys import value_of
from stalesync.job.other_names import check_moved, migrate
from stalesync.job.overrides import known_keys, load
from stalesync.job.resume_rules import ENDED, RULES, ResumeChanges, Rule, compare, decide, superfluous
from stalesync.process.host_files import MAX_NAMED, digest_of
from stalesync.process.run_log import ERROR
from stalesync.prompts import PromptSource

Digests = Mapping[str, Mapping[str, Any]]
"""Digest by config key and file; the file is "" where the key names one file"""
IN_PART = ("eval.files", "reward.terms")
"""Keys with several entries, of which some may be added and removed: the content of those that stay is compared"""
UNREAD = (".md", ".lock", ".gitattributes", ".gitignore")
"""Ends of the names of files in a model's folder that nothing reads"""


def settings_of(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps({key: value_of(config, key) for key in known_keys()}))  # as a checkpoint returns them


def inputs_of(config: Config, masked_ids: Iterable[Iterable[int]]) -> dict[str, Any]:
    """Return what a start depends on, without the weights. ``masked_ids``: of `WorkerSpec`. Raise OSError if a file
    cannot be read."""
    masked = [list(bounds) for bounds in masked_ids]
    return {"settings": settings_of(config), "files": digest_files(config), "masked_ids": masked}


def digest_files(config: Config) -> dict[str, dict[str, str]]:
    """Return digests of the files that a run depends on, but `data.source`; raise OSError if one cannot be read."""
    reward = config.reward
    paths = {
        "model.path": _folder(config.model.path),
        "reward.model": _folder(reward.model) if reward.model else {},
        "reward.path": _code(reward.path, name=""),
        "environment.path": _code(config.environment.path, name=""),
        "reward.terms": {name: path for spec in reward.term_specs() for name, path in _code(spec.reward).items()},
        "eval.files": {spec.path: Path(spec.path) for spec in config.eval.specs()},
    }
    paths["eval.files"] |= {name: path for spec in config.eval.specs() for name, path in _code(spec.reward).items()}
    named = [(key, name, path) for key, files in paths.items() for name, path in files.items()]
    with ThreadPoolExecutor(8) as threads:
        digests = list(threads.map(lambda one: digest_of(one[2], WHOLE_BYTES), named))
    by_key: dict[str, dict[str, str]] = {key: {} for key, files in paths.items() if files}
    for (key, name, _), digest in zip(named, digests, strict=True):
        by_key[key][name] = digest
    return by_key


def find_other_content(saved: Digests, new: Digests, changed: Iterable[str] = ()) -> dict[str, str]:
    """Return by key what has other content than at the checkpoint. ``changed``: keys with another value. Of a reward or
    an environment that is another one, the content is expected to differ."""
    ignored = {key for key in changed if key.startswith(("reward.", "environment."))}
    changes = {}
    for key in saved.keys() & new.keys() - ignored:
        names = saved[key].keys() & new[key].keys() if key in IN_PART else saved[key].keys() | new[key].keys()
        if differing := sorted(name for name in names if saved[key].get(name) != new[key].get(name)):
            listed = ", ".join(differing[:MAX_NAMED]) + (" …" if len(differing) > MAX_NAMED else "")
            changes[key] = f"other content of {listed}" if listed else "the file has other content"
    return changes


def _folder(path: str) -> dict[str, Path]:
    files = (file for file in Path(path).iterdir() if file.is_file() and not file.name.endswith(UNREAD))
    return {file.name: file for file in files if not file.name.startswith("LICENSE")}


def _code(reward: str | None, name: str | None = None) -> dict[str, Path]:
    """Return the file of a reward that is a function of the user."""
    file, colon, _ = (reward or "").rpartition(":")
    return {file if name is None else name: Path(file)} if colon else {}


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
    """Open a folder that has only a failed start, and set aside what that has left; None: it has something else."""
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
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
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

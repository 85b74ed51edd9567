"""Write the output folder of a run, readable while it runs and after it was killed (`run_contents.py` lists its files).

Only the user who started the run may enter the folder (mode 0700)."""

import dataclasses
import json
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsFloat, TypeVar

from fusion.telemetry.files import (
    FULL,
    NOT_FINITE,
    JsonLines,
    finite,
    read_jsonl,
    remove_temporary,
    tolerating_full,
    write_atomic,
)
from fusion.telemetry.folder_lock import NAME as LOCK
from fusion.telemetry.folder_lock import FolderLock
from fusion.telemetry.loggers import Logger, LoggerGroup, find_loggers
from fusion.telemetry.row_digests import NO_SEALS, ROWS, SINGLE_ROWS, RowDigests, Seal, rewind
from fusion.telemetry.run_contents import BEST, EVALUATIONS, GROUPS, LOGS, METRICS, PROFILES, SAMPLES
from fusion.telemetry.shortening import abridged
from fusion.telemetry.timeline import Span
from fusion.telemetry.trace import TimelineFile
from fusion.telemetry.validation import RUN_NAME, is_run_name

log = logging.getLogger(__name__)

REPEATED_BYTES = 1 << 18
"""Size of the last rows that a resumed run sends to its loggers again: far more than these keep in memory"""
IfExists = Literal["suffix", "resume"]

T = TypeVar("T")

PRIVATE = 0o700
"""Mode of a new run folder: samples, answers and weights are the user's own. An existing folder keeps its mode."""


class RunFolder:
    """Create `root/name` or reopen it, and lock it until `close`.

    If the name exists: `suffix` (default) takes the first free of `name-2`, `name-3`, …; `resume` continues in the
    folder. `choice` states in a sentence which it was.
    FolderInUse: another run has the folder; nothing in it was changed.
    Raise ValueError: ``name`` is not the name of a folder, or ``root`` cannot be written."""

    def __init__(self, root: Path | str, name: str, if_exists: IfExists = "suffix", samples_per_step: int = 4) -> None:
        if not is_run_name(name):
            raise ValueError(f"run name {name!r}: expected {RUN_NAME}")
        try:
            self.path, self.choice, self.resumed = _claim(Path(root), name, if_exists)
            self._lock = FolderLock(self.path)
        except OSError as error:
            if error.errno in FULL:
                raise
            raise ValueError(f"run.dir={root}: cannot be written: {error}") from error
        remove_temporary(self.path)
        self.samples_per_step = samples_per_step
        self.sample_characters: int | None = None
        """Maximum number of characters of a text of `samples.jsonl`; None: texts are whole"""
        self._logs: dict[str, JsonLines] = {}
        self._timeline: TimelineFile | None = None
        self._loggers: LoggerGroup | None = None
        self._full: dict[str, str] = {}
        """A note for each file for which there was no space, by its path"""
        self._digests = {name: RowDigests(1 if name in SINGLE_ROWS else ROWS) for name in LOGS}
        self.damage: list[str] = []
        """A line for each file in which damage was found, and dropped"""

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def profiles(self) -> Path:
        return self.path / PROFILES

    @property
    def checkpoints(self) -> Path:
        """The folder of the checkpoints; created on first access."""
        return self._made("checkpoints")

    @property
    def hf(self) -> Path:
        """The folder of the Hugging Face export; created on first access."""
        return self._made("hf")

    def set_aside(self) -> Path | None:
        """Move everything that an earlier start left to a new folder in this one, `start-<n>`, and continue as in a new
        run; returns `start-<n>`, None if nothing was left."""
        kept = rf"{LOCK}|start-\d+"
        left = sorted(path for path in self.path.iterdir() if not re.fullmatch(kept, path.name))
        self.resumed = False
        if not left:
            return None
        number = 1
        while (aside := self.path / f"start-{number}").exists():
            number += 1
        aside.mkdir(mode=PRIVATE)
        for path in left:
            path.rename(aside / path.name)
        return aside

    def write_config(self, config: str | Mapping[str, Any] | Any, *, keep: bool = True) -> None:
        """Write config.yaml from YAML text, a mapping or a dataclass. ``keep``: a different one, of an earlier start,
        is kept."""
        text = config if isinstance(config, str) else _yaml(config)
        path = self.path / "config.yaml"
        if keep and path.exists() and path.read_bytes() != text.encode():
            earlier = len(list(self.path.glob("config.start-*.yaml"))) + 1
            path.rename(self.path / f"config.start-{earlier}.yaml")
        write_atomic(path, text)

    def open_loggers(self, classes: Mapping[str, type[Logger]], config: Mapping[str, Any] | None = None) -> None:
        """Start the loggers that `log` writes to (`find_loggers`); without this call, it is TensorBoard's.
        Raise ValueError: one of them could not be started."""
        assert self._loggers is None, "loggers are open"
        self._loggers = LoggerGroup(self.path, classes, config)

    @property
    def notes(self) -> list[str]:
        """A line for each file in which damage was found, for which there was no space, and each logger that failed."""
        return [*self.damage, *self._full.values(), *([] if self._loggers is None else self._loggers.notes)]

    def log(self, step: int, figures: Mapping[str, SupportsFloat]) -> None:
        """Write the figures of one step to metrics.jsonl and the loggers."""
        numbers = {name: float(value) for name, value in figures.items()}
        self._log(METRICS).write({"step": step, **numbers})
        self._opened_loggers().log(step, numbers)

    def complete(
        self,
        step: int,
        figures: Mapping[str, SupportsFloat],
        seal: Callable[[Mapping[str, Seal]], None] = lambda seals: None,
    ) -> None:
        """Add figures to the row of a step that an earlier start of the run has logged, the last one. Called before the
        first `log` of a start; `repeat` then sends the row to the loggers.
        ``seal``: called before the row is written, with the seals of what an evaluation writes, for the checkpoint."""
        assert METRICS not in self._logs, "complete after writing"
        path, log_bytes = self.path / METRICS, self.log_bytes()
        seals = self.seal({name: log_bytes[name] for name in (METRICS, EVALUATIONS)})
        rows = read_jsonl(path, {"step": int})
        logged: dict[str, Any] = next((row for row in reversed(rows) if row["step"] == step), {})
        added = {name: float(value) for name, value in figures.items()}
        completed = {"step": step, **_figures(logged), **added}
        kept = [row for row in rows if row["step"] != step]
        lines = [json.dumps(finite(row), ensure_ascii=False) + "\n" for row in [*kept, completed]]
        digests = self._digests[METRICS] = RowDigests(1)
        digests.add(line.encode() for line in lines)
        before = seals[METRICS].blocks[-1] if logged else None
        seal({**seals, METRICS: dataclasses.replace(digests.sealed(), before=before)})
        write_atomic(path, "".join(lines))

    def log_bytes(self) -> dict[str, int]:
        """Return the size of each log now, for `seal`."""
        return {name: path.stat().st_size if (path := self.path / name).exists() else 0 for name in LOGS}

    def seal(self, log_bytes: Mapping[str, int]) -> dict[str, Seal]:
        """Digest what the logs had when `log_bytes` was called, for the manifest of a checkpoint; any thread may."""
        return {name: self._digests[name].seal(self.path / name, end) for name, end in log_bytes.items()}

    def repeat(self, before_first: Mapping[str, float]) -> None:
        """Send the last rows of an earlier start of the run to the loggers again: a logger may keep in memory what it
        has received, as W&B does offline until a block of 32 KiB is full, and a run that is killed loses that.
        ``before_first``: figures of the evaluation before the first step, which no row has."""
        rows, size = read_jsonl(self.path / METRICS, {"step": int}), 0
        first = len(rows)
        while first and size < REPEATED_BYTES:
            first -= 1
            size += len(json.dumps(rows[first]))
        if first == 0 and before_first:
            self._opened_loggers().log(0, before_first)
        for row in rows[first:]:
            self._opened_loggers().log(row["step"], _figures(row))

    def log_samples(
        self, step: int, samples: Sequence[Any], describe: Callable[[Any], Mapping[str, Any]] = dict
    ) -> None:
        """Write `samples_per_step` of the samples, evenly spaced.

        `describe` returns the row of one: `prompt`, `response`, `reward`, and what else the caller likes to keep. A row
        whose texts are longer than `sample_characters` keeps their starts and ends, and states so as `abridged`."""
        file = self._log(SAMPLES)
        count = min(self.samples_per_step, len(samples))
        for index in range(count):
            row = {"step": step, **describe(samples[index * len(samples) // count])}
            limit = self.sample_characters
            if limit is not None and (short := abridged(row, limit)) != row:
                row = {**short, "abridged": limit}
            file.write(row)

    def log_groups(
        self,
        step: int,
        groups: Iterable[str],
        ended: str,
        lag: int | None = None,
        tokens: Mapping[str, Sequence[int | list[int]]] | None = None,
    ) -> None:
        """Write how groups have ended.
        ``lag``: policy versions between the admission and the training of each.
        ``tokens``: `prompt_tokens` of each group, and lists for each: `response_tokens`, which were sampled, and of
        conversations `observation_tokens`."""
        others = {"ended": ended} if lag is None else {"ended": ended, "lag": lag}
        self._log(GROUPS).write_each({"step": step}, "group", groups, others, tokens)

    def log_evaluation(self, step: int, rows: Iterable[Mapping[str, Any]], figures: Mapping[str, float]) -> None:
        """Write the results of an evaluation after `step`, and to the loggers its figures, if it has any: those that no
        row of metrics.jsonl has."""
        self._log(EVALUATIONS).write(*rows)
        if figures:
            self._opened_loggers().log(step, figures)

    def evaluations(self) -> list[dict[str, Any]]:
        return read_jsonl(self.path / EVALUATIONS)

    def write_best(self, best: Mapping[str, Any] | None) -> None:
        """Record which checkpoint is the best; None: none is."""
        if best is None:
            (self.path / BEST).unlink(missing_ok=True)
        else:
            with tolerating_full(self._note_full):  # a resume writes it again
                write_atomic(self.path / BEST, json.dumps(best, indent=2) + "\n")

    def log_spans(self, *spans: Iterable[Span]) -> None:
        """Add the spans of any cards to timeline.json."""
        with tolerating_full(self._note_full):
            if self._timeline is None:
                self._timeline = self._opened_timeline(self.path / "timeline.json")
            self._timeline.append(*spans)

    def _opened_timeline(self, path: Path) -> TimelineFile:
        try:
            return TimelineFile(path)
        except ValueError as error:
            aside = path.replace(path.with_name(f"{path.name}.damaged"))
            self.damage.append(f"{error}; it is kept as {aside.name}, and a new one begins")
            return TimelineFile(path)

    def rewind(
        self,
        step: int,
        seals: Mapping[str, Seal] = NO_SEALS,
        seal: Callable[[Mapping[str, Seal]], None] = lambda seals: None,
    ) -> int:
        """Forget what was written of steps after `step`, the one a resumed run starts from; return how many steps.
        Damaged rows are dropped, and listed in `damage`.

        Call it before the first `log` of the resumed run. The timeline keeps what happened: the time was spent.
        ``seals``: of the checkpoint that the run resumes from.
        ``seal``: called with the seals of what is left if rows were dropped, for the checkpoint: another resume from it
        finds no damage."""
        assert not self._logs, "rewind after writing"
        num_cut = 0
        for name in reversed(LOGS):
            num_cut, damage = rewind(self.path / name, step, seals.get(name))
            self.damage += [damage] if damage else []
        if self.damage:
            seal(self.seal(self.log_bytes()))
        return num_cut

    def close(self) -> None:
        """Close the files and release the lock. All files are readable without it."""
        for file in (*self._logs.values(), self._timeline, self._loggers):
            if file is not None:
                file.close()
        self._logs, self._timeline, self._loggers = {}, None, None
        self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _log(self, name: str) -> JsonLines:
        if name not in self._logs:
            self._logs[name] = JsonLines(self.path / name, self._note_full)
        return self._logs[name]

    def _note_full(self, error: OSError) -> None:
        """Warn, once for each file, that the run continues without it."""
        if error.filename not in self._full:
            later = "the lines are written when there is space" if error.filename.endswith(".jsonl") else "it has a gap"
            self._full[error.filename] = f"{error}: the run continues, {later}"
            log.warning(self._full[error.filename])

    def _opened_loggers(self) -> LoggerGroup:
        if self._loggers is None:
            self.open_loggers(find_loggers(["tensorboard"]))
            assert self._loggers is not None
        return self._loggers

    def _made(self, name: str) -> Path:
        (self.path / name).mkdir(exist_ok=True)
        return self.path / name


def _figures(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures of a row of metrics.jsonl as they were logged."""
    values = {name: value for name, value in row.items() if name not in ("step", NOT_FINITE)}
    return {name: float(value) for name, value in (values | row.get(NOT_FINITE, {})).items()}


def _claim(root: Path, name: str, if_exists: IfExists) -> tuple[Path, str, bool]:
    """Create or reopen the folder; return its path, a sentence that states which, and whether it was reopened."""
    if if_exists not in ("suffix", "resume"):
        raise ValueError(f"if_exists={if_exists!r}: expected suffix or resume")
    root.mkdir(parents=True, exist_ok=True)
    path = root / name
    try:
        # mkdir claims the name: of two runs started at the same time only one succeeds.
        path.mkdir(mode=PRIVATE)
        return path, f"new run folder {path}", False
    except FileExistsError:
        if not path.is_dir():
            raise ValueError(f"{path} is a file: expected a free name or a run folder") from None
    if if_exists == "resume":
        return path, f"resuming in {path}", True
    number = 2
    while True:
        fresh = root / f"{name}-{number}"
        try:
            fresh.mkdir(mode=PRIVATE)
            return fresh, f"{path} exists, so this run writes to {fresh}", False
        except FileExistsError:
            number += 1


def _yaml(config: Any) -> str:
    import yaml

    is_instance = dataclasses.is_dataclass(config) and not isinstance(config, type)
    return yaml.safe_dump(finite(dataclasses.asdict(config) if is_instance else config), sort_keys=False)

"""Record in a run's folder why it failed: `run.log` for people, `error.json` for programs.

logs/controller.log   what the controller logs
logs/ray.log          what Ray writes while it starts
logs/ray/             Ray's own logs, only if it did not start or one of its processes has ended (`ray_folder.py`)
logs/rank-<n>.log     what the worker of a rank logs and prints, with its tracebacks; written as it runs
error.json            only if it failed: error, message, kind, rank, host, stage, step, traceback, time
run.log               only if it failed: the same as text, rank and stage first, then the end of every log

A run that resumes keeps the record of its earlier start as `error.start-<n>.json` and `run.start-<n>.log`, and appends
to the logs."""

import json
import os
import re
import socket
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fusion.npu.failures import FailureKind
from fusion.telemetry.files import write_atomic
from stalesync.process.failures import RunFailed
from stalesync.process.stopping import describe_stop

RUN_LOG = "run.log"
ERROR = "error.json"
LOGS = "logs"
MAX_LOG_BYTES, MAX_LOGS_BYTES = 256 << 10, 32 << 20
"""Maximum of the end of each process's log in `run.log`, and of all of them."""


def describe_failure(error: BaseException, progress: "Progress") -> dict[str, Any]:
    """Describe why a run ended, as plain JSON. Where a card failed, the stage is the card's."""
    own = "".join(traceback.format_exception(type(error), error, error.__traceback__)).strip()
    described: dict[str, Any] = {
        "error": type(error).__name__,
        "message": str(error),
        "kind": FailureKind.FAILED.value,
        "rank": None,
        "host": socket.gethostname(),
        "stage": progress.stage,
        "step": progress.step,
        "traceback": own,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    failure = error.failure if isinstance(error, RunFailed) else None
    if failure is None or not isinstance(error, RunFailed):
        return described
    reported = failure.kind not in (FailureKind.DIED, FailureKind.TIMED_OUT)  # by the card itself
    return described | {
        "error": failure.error or type(error).__name__,
        "message": failure.message if reported else str(error),
        "kind": failure.kind.value,
        "rank": failure.rank,
        "host": progress.hosts[failure.rank] if failure.rank < len(progress.hosts) else None,
        "stage": failure.stage,
        "traceback": error.trace or own,
    }


def headline(failure: Mapping[str, Any]) -> str:
    """Return the first line of `run.log`: rank and stage first."""
    rank = "controller" if failure["rank"] is None else f"rank {failure['rank']}"
    step = "" if failure["step"] is None else f", step {failure['step']}"
    reason = failure["message"].splitlines()
    return (
        f"{rank}, stage {failure['stage']!r}{step}, host {failure['host']}: {failure['error']}: {''.join(reason[:1])}"
    )


@dataclass
class Progress:
    """How far a run has come, for the record of its failure. ``stage``: what the controller does; ``hosts``: the
    machine of each rank."""

    stage: str = "start"
    hosts: Sequence[str] = ()
    current_step: Callable[[], int] | None = None

    @property
    def step(self) -> int | None:
        """The step in progress, from 1; None: no step has begun."""
        return None if self.current_step is None else self.current_step()


class RunLog:
    """The logs of a run's folder. ``begins``: the run starts, those of earlier runs are kept under other names."""

    def __init__(self, folder: Path, begins: bool = True) -> None:
        self._folder = folder
        if begins:
            self._keep_earlier()
            (folder / LOGS).mkdir(mode=0o700, exist_ok=True)

    @property
    def controller(self) -> Path:
        return self._folder / LOGS / "controller.log"

    @property
    def ray(self) -> Path:
        return self._folder / LOGS / "ray.log"

    def of_rank(self, rank: int) -> Path:
        return self._folder / LOGS / f"rank-{rank}.log"

    @contextmanager
    def recording(
        self, progress: Progress, report: dict[str, Any], *, world: int, settle: Callable[[], None] = lambda: None
    ) -> Iterator[None]:
        """State in ``report["outcome"]`` how the block ends, and call ``settle`` before: that is final. If it fails,
        writes why, with a note where to find it."""
        try:
            yield
            settle()
            report["outcome"] = "finished"
        except KeyboardInterrupt as stop:
            settle()
            report["outcome"] = describe_stop(stop)
            raise
        except Exception as error:
            settle()
            report["outcome"] = "failed"
            add_note(error, self.record(error, progress, world))
            raise

    def record(self, error: BaseException, progress: Progress, world: int) -> str:
        """Write why a run of ``world`` ranks fails; return a note that says where."""
        try:
            return f"every rank's log and the traceback: {self.write_failure(describe_failure(error, progress), world)}"
        except OSError as full:
            return f"{RUN_LOG} could not be written: {full}"

    def write_failure(self, failure: Mapping[str, Any], world: int) -> Path:
        """Write both files for a run of ``world`` ranks; return the path of `run.log`. Raise OSError if a file could
        not be written."""
        write_atomic(self._folder / ERROR, json.dumps(failure, indent=2) + "\n")
        path = self._folder / RUN_LOG
        write_atomic(path, encodable("\n".join(self._text(failure, world)) + "\n"))
        return path

    def _text(self, failure: Mapping[str, Any], world: int) -> Iterator[str]:
        yield headline(failure)
        yield f"{failure['time']}, kind {failure['kind']}; the same for programs: {ERROR}"
        yield ""
        yield failure["traceback"]
        ranks = sorted(range(world), key=lambda rank: rank != failure["rank"])
        logs = [(f"rank {rank}", self.of_rank(rank)) for rank in ranks]
        logs += [("controller", self.controller), ("start of Ray", self.ray)]
        for title, path in logs:
            yield f"\n==== {title}: {path.relative_to(self._folder)} ===="
            yield end_of(path, min(MAX_LOG_BYTES, MAX_LOGS_BYTES // len(logs)))

    def _keep_earlier(self) -> None:
        """Rename the record of an earlier start."""
        kept = (re.search(r"\.start-(\d+)\.", path.name) for path in self._folder.glob("*.start-*"))
        number = 1 + max((int(match[1]) for match in kept if match), default=0)
        for name in (ERROR, RUN_LOG):
            path = self._folder / name
            if path.exists():
                path.rename(path.with_name(f"{path.stem}.start-{number}{path.suffix}"))


def encodable(text: str) -> str:
    """Return a text that UTF-8 can encode: half a surrogate pair, as data and file names may have, as an escape."""
    return text.encode(errors="backslashreplace").decode()


def end_of(path: Path, max_bytes: int) -> str:
    """Return the last ``max_bytes`` of a log, from the beginning of a line."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - max_bytes))
            data = file.read()
    except OSError as error:
        return f"(no log: {error})"
    if size > max_bytes:
        data = data[data.find(b"\n") + 1 :]
        return f"(the last {len(data)} of {size} bytes)\n" + data.decode(errors="replace").rstrip()
    return data.decode(errors="replace").rstrip() or "(empty)"


def add_note(error: BaseException, note: str) -> None:
    """Add a note to an error, once, as `BaseException.add_note`, which Python 3.10 lacks."""
    notes = getattr(error, "__notes__", ())
    error.__notes__ = [*notes, *([] if note in notes else [note])]  # type: ignore[attr-defined]

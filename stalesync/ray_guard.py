"""End Ray's processes on this machine, and remove what its queue leaves, if the controller is killed.

    controller ── starts ──► guard ─► … ─► Ray
        │ killed (SIGKILL, out of memory)
        ▼
    the guard has another parent ─► GRACE_S for Ray's own clean-up ─► SIGKILL to what is left of that Ray
                                 ─► removes the folders of queues whose processes are dead

A process of Ray that ends can end the controller, too, from Ray's C++, which no exception reports; while the controller
connects to Ray, it holds the interpreter meanwhile, for as long as a minute. So the guard watches these processes, too,
reports the end of the controller that follows, and kills one that still starts `FROZEN_S` later.

The guard is started before Ray, which may be killed while it starts, too. Ray's processes inherit a mark in their
environment. A run that ends by itself does the same, and then ends the guard.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distqueue.payload.sweep import sweep
from stalesync.ray_processes import WATCH_S, RayProcesses, started_by

if TYPE_CHECKING:
    from stalesync.failures import RunFailed

POLL_S = 0.2
"""Interval at which the guard checks whether the controller lives"""

LOOK_S = 0.05
"""Interval at which it looks for processes that are left"""

GRACE_S = 3.0
"""Ray's daemons and workers end by themselves within this time"""

QUIET_S = 1.0
"""The processes of a killed controller's Ray have ended when none was seen for so long: one may have started another"""

MAX_S = 15.0
"""Maximum seconds of looking for them"""

FROZEN_S = 3.0
"""A controller that starts Ray reports the end of one of its processes within this time, or cannot"""

STARTED, LEAVING = b"s", b"l"
"""What the controller writes to the guard: Ray has started; from now on it reports by itself why it ends"""

MARK = "STALESYNC_GUARD"
"""The environment variable in which the processes of a Ray have the mark of their guard"""

BOOT = """import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options.pop("sys_path")
from stalesync.ray_guard import main
main(**options)"""


class Report(NamedTuple):
    """Where a failure is recorded for which no exception can be raised: the folder of a run of ``world`` ranks. Plain
    data, as the guard is another process."""

    folder: str
    world: int

    def __call__(self, error: RunFailed, stderr: int) -> None:
        """Records the error in the run's folder, and writes it to ``stderr``, a descriptor."""
        from stalesync.run_log import Progress, RunLog, report_failure

        logs = RunLog(Path(self.folder), begins=False)
        report_failure(error, stderr, logs=logs, progress=Progress("Ray"), world=self.world)


@dataclass(frozen=True)
class Guard:
    """The guard, seen from the controller. ``mark``: of the processes that it ends; ``pipe``: it reads."""

    mark: str
    pipe: int

    def send(self, news: bytes) -> None:
        """Sends `STARTED` or `LEAVING`."""
        with suppress(BrokenPipeError):  # somebody has killed the guard
            os.write(self.pipe, news)


@contextmanager
def guarded(roots: Sequence[Path | str] = (), report: Report | None = None) -> Iterator[Guard]:
    """Guards the Ray that is started inside the block, in `marking`; at the block's end, none of its processes is left.

    Args:
        roots: folders in which queues have folders: those of dead queues are removed (`distqueue.payload.sweep`).
        report: called by the guard, with its standard error, if a process of Ray has ended and the controller ends, or
            hangs, before it sends `LEAVING`.
    """
    mark, named = secrets.token_hex(16), [str(root) for root in roots]
    options = {
        "controller": os.getpid(),
        "mark": mark,
        "roots": named,
        "sys_path": _paths(),
        "before": sorted(started_by(os.getpid())),
        "report": report,
    }
    guard = subprocess.Popen(
        [sys.executable, "-I", "-c", BOOT, json.dumps(options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL if report is None else None,
        start_new_session=True,
    )
    assert guard.stdin is not None
    try:
        yield Guard(mark, guard.stdin.fileno())
    finally:
        try:
            end_session(mark, named)
        finally:
            guard.kill()
            guard.wait()
            guard.stdin.close()


@contextmanager
def marking(mark: str) -> Iterator[None]:
    """Marks the processes that are started in the block, and what they start."""
    os.environ[MARK] = mark
    try:
        yield
    finally:
        del os.environ[MARK]


def members_of(mark: str) -> list[int]:
    """Returns the ids of this user's processes that have the mark and have not ended."""
    wanted, members = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):  # it has ended, or is another user's
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    members.append(int(folder.name))
    return members


def end_session(mark: str, roots: Sequence[str], quiet_s: float = 0.0) -> None:
    """Waits until no process with the mark has been seen for ``quiet_s``, kills those that are left after GRACE_S, and
    removes the folders of dead queues."""
    start_s = seen_s = time.monotonic()
    while (now_s := time.monotonic()) - start_s < MAX_S:
        if members := members_of(mark):
            seen_s = now_s
        elif now_s - seen_s >= quiet_s:
            break
        if now_s - start_s >= GRACE_S:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    for root in roots:
        sweep(Path(root))


def main(controller: int, mark: str, roots: list[str], before: list[int], report: list[Any] | None) -> None:
    """Waits until the controller has ended, then ends what is left of its Ray."""
    if report is not None:
        if ended := ended_before(controller, before):
            from stalesync.failures import RayEnded

            Report(*report)(RayEnded(ended), 2)
            if os.getppid() == controller:
                os.kill(controller, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # who reads it waits for its end
    while os.getppid() == controller:
        time.sleep(POLL_S)
    end_session(mark, roots, QUIET_S)


def ended_before(controller: int, before: Collection[int]) -> str | None:
    """Waits until the controller has ended or leaves its Ray. Returns the name of a process of Ray that ended before
    the controller did, or that ended `FROZEN_S` ago while the controller starts Ray; None: the controller was the
    first, or reports by itself.

    Args:
        before: children of the controller that are none of this Ray's.
    """
    ended, ended_s, starting = None, 0.0, True
    with closing(RayProcesses(parent=controller, before=before)) as processes:
        while os.getppid() == controller:
            if starting:
                processes.add_started()
            watched = [0] if ended else [0, *processes.descriptors]
            ready, _, _ = select.select(watched, [], [], WATCH_S if starting else POLL_S)
            if 0 in ready:  # first, as Ray's processes end with the controller, which closes its files before
                if (news := os.read(0, 1)) != STARTED:
                    return None if news else ended
                starting = False
            elif ready:
                ended, ended_s = processes.ended(), time.monotonic()
                import_module("stalesync.run_log")  # which takes seconds, to report it in time
            if starting and ended and time.monotonic() - ended_s > FROZEN_S:
                return ended
    return ended


def _paths() -> list[str]:
    return [path or os.getcwd() for path in sys.path]

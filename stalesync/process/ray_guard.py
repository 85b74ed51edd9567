"""End Ray's processes on this machine, and remove what its queue leaves, if the controller is killed.

    controller ── starts ──► guard ─► … ─► Ray
        │ killed (SIGKILL, out of memory)
        ▼
    the guard has another parent ─► GRACE_S for Ray's own clean-up ─► SIGKILL to what is left of that Ray
                                 ─► removes Ray's folder, and those of queues whose processes are dead

A process of Ray that ends can end the controller, too, from Ray's C++, which no exception reports; while the controller
connects to Ray, it holds the interpreter meanwhile, for as long as a minute. So the guard watches these processes, too,
reports the end of the controller that follows, and kills one that still starts `FROZEN_S` later. Ray's processes end
with a controller that is killed, too: these are not reported (`process_ends.py`).

The guard is started before Ray, which may be killed while it starts, too. Ray's processes inherit a mark in their
environment. A run that ends by itself does the same, and then ends the guard."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from distqueue.payload.sweep import sweep
from stalesync.process.process_ends import EndWatch, ExitStatus, ProcessStat
from stalesync.process.ray_folder import ROOT_VARIABLE, ray_folder, remove
from stalesync.process.ray_processes import RAYLET, WATCH_S, RayProcesses, pending_stop, started_by
from stalesync.process.stopping import HOLD_S, describe_stop, exception_of

if TYPE_CHECKING:
    from stalesync.process.failures import RunFailed

POLL_S = 0.2
"""Interval at which the guard checks whether the controller lives"""
LOOK_S = 0.05
"""Interval at which it looks for processes that are left"""
GRACE_S = 3.0
"""Ray's daemons and workers end by themselves within this time"""
QUIET_S = 1.0
"""The processes of a killed controller's Ray have ended when none was seen for so long: one may have started another"""
LOOKS_S = 0.15
"""… and those of a Ray that was shut down, when three looks have found none: a process may start another and end
between the time when processes are listed and that when it is looked at"""
MAX_S = 15.0
"""Maximum seconds of looking for them"""
FROZEN_S = 3.0
"""A controller that starts Ray reports the end of one of its processes within this time, or cannot"""
FROZEN_STOP_S = HOLD_S + 2.0
"""… and ends by a signal within this time, or cannot"""
STARTED, LEAVING, GIVING_UP = b"s", b"l", b"g"
"""What the controller writes to the guard: Ray has started; from now on it reports by itself why it ends; it ends at
once, and nothing of Ray will end by itself"""
RAY_EXIT = 1
"""Status with which Ray's C++ ends a process at once; whatever else ends the controller so is announced to the guard"""
MAX_MESSAGE_BYTES = 64
"""More than the controller writes"""
MARK = "STALESYNC_GUARD"
"""The environment variable in which the processes of a Ray have the mark of their guard"""
KEEP_ENVIRONMENT = "SPT_NOENV"
"""Ray's agents write their title over their environment, and with it over the mark, unless this variable is set. Ray
sets it for its workers"""

BOOT = """import json, sys
options = json.loads(sys.argv[1])
sys.path[:] = options.pop("sys_path")
from stalesync.process.ray_guard import main
main(**options)"""


class Report(NamedTuple):
    """Where a failure is recorded for which no exception can be raised: the folder of a run of ``world`` ranks. Plain
    data, as the guard is another process."""

    folder: str
    world: int

    def __call__(self, error: "RunFailed", stderr: int) -> None:
        """Record the error in the run's folder, and write it to ``stderr``, a descriptor."""
        from stalesync.process.run_log import Progress, RunLog

        note = RunLog(Path(self.folder), begins=False).record(error, Progress("Ray"), self.world)
        os.write(stderr, f"error: {error}\n{note}\n".encode(errors="backslashreplace"))


class EndedProcess(NamedTuple):
    """A process of Ray that has ended. ``status``: as of `RayEnded`."""

    name: str
    status: int | None


@dataclass
class Guard:
    """The guard, seen from the controller. ``mark``: of the processes that it ends; ``pipe``: it reads; ``folder``:
    Ray's. ``ends_itself``: whether what is left of Ray may end by itself: it has started, and none of its processes has
    ended."""

    mark: str
    pipe: int
    folder: Path
    ends_itself: bool = False

    def send(self, message: bytes) -> None:
        self.ends_itself = message == STARTED or (self.ends_itself and message == LEAVING)
        with suppress(BrokenPipeError):  # somebody has killed the guard
            os.write(self.pipe, message)


@contextmanager
def guarded(roots: Sequence[Path | str] = (), report: Report | None = None) -> Iterator[Guard]:
    """Guard the Ray that is started inside the block, in `marking`; at the block's end, none of its processes is left,
    and its folder is removed. ``roots``: folders in which queues have folders: those of dead queues are removed
    (`distqueue.payload.sweep`); ``report``: called by the guard, with its standard error, if a process of Ray has ended
    and the controller ends, or hangs, before it sends `LEAVING`. Raise ValueError as `root_of`, RayNotStarted if Ray's
    folder cannot be created."""
    with ray_folder() as folder:
        yield from _guarded(folder, roots, report)


def _guarded(folder: Path, roots: Sequence[Path | str], report: Report | None) -> Iterator[Guard]:
    mark, named = secrets.token_hex(16), [str(root) for root in roots]
    options = {
        "controller": os.getpid(),
        "mark": mark,
        "roots": named,
        "folder": str(folder),
        "sys_path": [path or os.getcwd() for path in sys.path],
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
    seen = Guard(mark, guard.stdin.fileno(), folder)
    try:
        yield seen
    finally:
        end_session(mark, named, grace_s=GRACE_S if seen.ends_itself else 0.0)
        remove(folder, keep_logs_in=None if report is None or seen.ends_itself else Path(report.folder))
        guard.kill()  # unless that was interrupted: then it does the same when this process has ended
        guard.wait()
        guard.stdin.close()


@contextmanager
def marking(mark: str, folder: Path | None = None) -> Iterator[None]:
    """Mark the processes that are started in the block, and what they start; a Ray among them is in ``folder``."""
    marks = {MARK: mark, KEEP_ENVIRONMENT: "1"} | ({} if folder is None else {ROOT_VARIABLE: str(folder)})
    before = {name: os.environ.get(name) for name in marks}
    os.environ.update(marks)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Members:
    """The processes of a Ray: those with its mark, what these have started, and what has been one of them."""

    def __init__(self, mark: str) -> None:
        self._wanted = f"{MARK}={mark}".encode()
        self._known: dict[int, int] = {}
        """Start of each (clock ticks), by process id"""

    def look(self) -> list[int]:
        """Return the ids of those that have not ended."""
        running = {pid: stat for pid, stat in ProcessStat.of_all().items() if stat.state not in "ZX"}
        members = [pid for pid, stat in running.items() if self._known.get(pid) == stat.started or self._has_mark(pid)]
        added = members
        while added:
            added = [pid for pid, stat in running.items() if stat.parent in added and pid not in members]
            members = [*members, *added]
        self._known |= {pid: running[pid].started for pid in members}
        return members

    def _has_mark(self, pid: int) -> bool:
        try:
            return self._wanted in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            return False


def end_session(mark: str, roots: Sequence[str], quiet_s: float = LOOKS_S, grace_s: float = GRACE_S) -> None:
    """Wait until no process of the Ray with this mark has been seen for ``quiet_s``, kill those that are left after
    ``grace_s``, and remove the folders of dead queues."""
    start_s = seen_s = time.monotonic()
    processes = Members(mark)
    while (now_s := time.monotonic()) - start_s < MAX_S:
        if members := processes.look():
            seen_s = now_s
        elif now_s - seen_s >= quiet_s:
            break
        if now_s - start_s >= grace_s:
            for pid in members:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(LOOK_S)
    for root in roots:
        sweep(Path(root))


def main(
    controller: int, mark: str, roots: list[str], folder: str, before: list[int], report: list[Any] | None
) -> None:
    """Wait until the controller has ended, then end what is left of its Ray."""
    grace_s, failed_in = GRACE_S, None
    if report is not None:
        ended, ends_itself = ended_before(controller, before)
        grace_s = GRACE_S if ends_itself else 0.0
        failed_in = Path(report[0]) if ended or not ends_itself else None
        if isinstance(ended, KeyboardInterrupt):
            os.write(2, f"{describe_stop(ended)}\n".encode())
            os.kill(controller, signal.SIGKILL)
        elif ended:
            from stalesync.process.failures import RayEnded

            Report(*report)(RayEnded(*ended), 2)
            if os.getppid() == controller:
                os.kill(controller, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # who reads it waits for its end
    while os.getppid() == controller:
        time.sleep(POLL_S)
    end_session(mark, roots, QUIET_S, grace_s)
    remove(Path(folder), keep_logs_in=failed_in)


def ended_before(controller: int, before: Collection[int]) -> tuple[EndedProcess | KeyboardInterrupt | None, bool]:
    """Wait until the controller has ended or leaves its Ray. Return a process of Ray that ended before the controller
    did, or that ended `FROZEN_S` ago while the controller starts Ray (None: the controller was the first, or report by
    itself; a signal: the controller starts Ray and has not been able to end by it for `FROZEN_STOP_S`), and whether
    what is left of Ray may end by itself. ``before``: children of the controller that are none of this Ray's."""
    ended: EndedProcess | None = None
    ended_s, starting, stopped_s = 0.0, True, float("inf")
    with (
        closing(EndWatch()) as order,
        closing(ExitStatus(controller)) as status,
        closing(RayProcesses(parent=controller, before=before)) as processes,
    ):
        order.watch_input(0)
        if not (running := os.getppid() == controller):  # it ended before that was observed: nothing is known of Ray
            return None, False
        while running:
            running = os.getppid() == controller
            if starting:
                processes.add_started()
                order.watch(processes.descriptors)
            for fd in order.poll((WATCH_S if starting else POLL_S) if running else 0.0):
                if fd == order.thread:  # Ray's processes that end from now on do so with the controller
                    return ended or _named_by_exit(controller, status, processes), not starting
                if fd != 0:
                    name = processes.name_of(fd)
                    ended, ended_s = ended or EndedProcess(name, processes.status_of(name)), ended_s or time.monotonic()
                    continue
                message = os.read(0, MAX_MESSAGE_BYTES)
                starting = starting and STARTED not in message
                if leaving := message.replace(STARTED, b""):
                    return None, not starting and leaving[:1] != GIVING_UP
                if not message:
                    order.unwatch_input(0)  # its last thread is ending
            if starting and ended and time.monotonic() - ended_s > FROZEN_S:
                return ended, False
            number = pending_stop(controller) if starting else 0
            stopped_s = min(stopped_s, time.monotonic()) if number else float("inf")
            if time.monotonic() - stopped_s > FROZEN_STOP_S:
                return exception_of(number), False
        return ended or _named_by_exit(controller, status, processes), not starting


def _named_by_exit(controller: int, status: ExitStatus, processes: RayProcesses) -> EndedProcess | None:
    """Wait until the controller has ended. Return the raylet if Ray's C++ has ended it, as it does at once when the
    raylet closes its connection: what the raylet has left to do then may take longer than the end of the controller."""
    while os.getppid() == controller:
        time.sleep(LOOK_S)
    ended_by_ray = RAYLET in processes.names and status.read() == RAY_EXIT
    return EndedProcess(RAYLET, processes.status_of(RAYLET)) if ended_by_ray else None

"""Notice that a process of Ray has ended. Ray waits a minute for its GCS, and then ends the controller without cleanup.

Only for a Ray that this process has started: its processes are children of this one."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from stalesync.process.process_ends import ExitStatus, ProcessStat
from stalesync.process.stopping import SIGNALS

if TYPE_CHECKING:
    from stalesync.process.failures import RayEnded

RAYLET = "raylet"
NAMES = ("gcs_server", RAYLET)
"""Ray cannot do without these."""
WATCH_S = 0.1
"""Interval at which the processes are checked while Ray starts"""
GIVE_UP_S = 0.5
"""Time in which Ray may report by itself that one of them has ended, while it starts"""
NOTICE_S = 1.5
"""Time in which a run may notice by itself that one of them has ended, after that it is interrupted …"""
LEAVE_S = 3.0
"""… and time in which it must then have ended"""


class RayProcesses:
    """Watch the children of a process that have one of ``names``. ``parent``: None: this process; ``before``:
    children that are not watched, such as those of an earlier Ray; ``complete``: all of them have started: one that is
    not there has ended, and nothing is left of it."""

    def __init__(
        self,
        names: Collection[str] = NAMES,
        *,
        parent: int | None = None,
        before: Collection[int] = (),
        complete: bool = False,
    ) -> None:
        self._names, self._parent, self._seen = names, parent or os.getpid(), {*before}
        self._name_by_fd: dict[int, str] = {}
        self._statuses: dict[int, ExitStatus] = {}
        there = self.add_started()
        self._missing = next((name for name in names if complete and name not in there), None)

    @property
    def descriptors(self) -> list[int]:
        """Each is readable when its process has ended."""
        return list(self._name_by_fd)

    @property
    def names(self) -> set[str]:
        return {*self._name_by_fd.values()}

    def name_of(self, descriptor: int) -> str:
        return self._name_by_fd[descriptor]

    def add_started(self) -> set[str]:
        """Watch those that have started since, too, also one that has ended already. Return the names of all
        children that are not excluded."""
        started = started_by(self._parent)
        names = {name for pid, name in started.items() if pid not in self._seen}
        for pid, name in started.items():
            if name in self._names and pid not in self._seen:
                status = ExitStatus(pid)
                if (fd := status.descriptor) < 0:
                    continue
                self._name_by_fd[fd], self._statuses[fd] = name, status
                self._seen.add(pid)
        return names

    def ended(self) -> str | None:
        """Return the name of one that has ended; None: all of them run. Any thread."""
        if self._missing:
            return self._missing
        poll = select.poll()  # one object must not be polled by two threads at a time
        for fd in self._name_by_fd:
            poll.register(fd, select.POLLIN)
        return next((self._name_by_fd[fd] for fd, _ in poll.poll(0)), None)

    def status_of(self, name: str) -> int | None:
        """Return the exit status of one that has ended, as `ExitStatus.read`."""
        statuses = (self._statuses[fd].read() for fd, known in self._name_by_fd.items() if known == name)
        return next((status for status in statuses if status is not None), None)

    def check(self) -> None:
        """Raise RayEnded if one of them has ended. Any thread."""
        if name := self.ended():
            from stalesync.process.failures import RayEnded

            raise RayEnded(name, self.status_of(name))

    def close(self) -> None:
        for status in self._statuses.values():
            status.close()
        self._name_by_fd, self._statuses = {}, {}


@contextmanager
def watching_end(
    processes: RayProcesses, interrupt: Callable[[RayEnded], None], give_up: Callable[[RayEnded], None]
) -> Iterator[None]:
    """If one of the processes has ended and the block lasts another `NOTICE_S`, call ``interrupt`` from a thread, and
    after another `LEAVE_S` ``give_up``: a call of Ray may wait for much longer."""
    with _watching(processes, [(NOTICE_S, interrupt), (LEAVE_S, give_up)]):
        yield


@contextmanager
def watching_start(
    give_up: Callable[[RayEnded], None], names: Collection[str] = NAMES, poll: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Watch the children that have one of ``names`` and start inside the block. If one has ended and the block lasts
    another `GIVE_UP_S`, calls ``give_up`` from a thread: Ray would wait a minute, and may then end this process.
    ``poll``: called by that thread every `WATCH_S`, until one has ended."""
    with closing(RayProcesses(names, before=started_by(os.getpid()))) as processes:

        def look() -> None:
            poll()
            processes.add_started()

        with _watching(processes, [(GIVE_UP_S, give_up)], look):
            yield


@contextmanager
def _watching(
    processes: RayProcesses,
    acts: Sequence[tuple[float, Callable[[RayEnded], None]]],
    poll: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """If one of the processes has ended, call each of ``acts`` from a thread, unless the block ends within the seconds
    before it."""
    left, lock = threading.Event(), threading.Lock()

    def watch() -> None:
        while not left.wait(WATCH_S):
            poll()
            if name := processes.ended():
                from stalesync.process.failures import RayEnded

                error = RayEnded(name, processes.status_of(name))
                for after_s, act in acts:
                    left.wait(after_s)
                    with lock:
                        if not left.is_set():
                            act(error)
                return

    thread = threading.Thread(target=watch, name="watch Ray", daemon=True)
    thread.start()
    try:
        yield
    finally:
        with lock:
            left.set()
        thread.join()


def pending_stop(pid: int) -> int:
    """Return the number of the signal with which someone asks a process to end, and that all its threads block; 0."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    pending = int(next((line.split()[1] for line in lines if line.startswith("ShdPnd:")), "0"), 16)
    return next((int(number) for number in SIGNALS if pending >> (number - 1) & 1), 0)


def started_by(parent: int) -> dict[int, str]:
    """Return the names of a process's children, as the kernel has them (at most 15 bytes), by process id; also of those
    that have ended and of whose end the parent has not learnt."""
    return {pid: stat.name for pid, stat in ProcessStat.of_all().items() if stat.parent == parent}

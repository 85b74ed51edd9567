"""Processes that have imported what a run needs before it begins: importing costs more than most of these runs.

    launcher()             one process per test process; has imported torch, transformers and the product, but not Ray
      .start(command)      forks a run of its own: own Ray, own exit status, may be signalled and killed; also in a
                           mount namespace, whose servers of forks `open` has started
      .session()           forks a process with a Ray of its own that stays, for runs that go to their end one by one
        .run(command)      a run in it
      .forked_workers()    Ray that is started in this block, in the test process, forks its workers
    use_ray()              the Ray that tests of a process share, in it

What a run does is what `python scripts/train.py …` does, from that file's first line on; its standard output and error
go to files. The launcher ends with the test process, and its runs with it.

The servers of a namespace belong to it, not to the run: when a controller is killed, only Ray and the run's guard can
end its workers, as they would otherwise.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from tests.machine import Deadline, wait_for

ROOT = Path(__file__).resolve().parents[1]


def environment() -> dict[str, str]:
    """That of this process, without what takes effect only when an interpreter is started."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


class Launcher:
    """The process that forks, and what is asked of it, by any thread. ``library``: is loaded before all others by it,
    its runs and their workers (LD_PRELOAD)."""

    def __init__(self, library: str | None = None) -> None:
        self._requests, there = Pipe()
        code = f"from tests.harness.launches import *; serve(Connection({there.fileno()}))"
        variables = environment() | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=variables | ({"LD_PRELOAD": library} if library else {}),
            stdin=subprocess.DEVNULL,
            pass_fds=[there.fileno()],
        )
        there.close()
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="warm-"))
        self._started = 0
        self._session: Session | None = None

    def ask(self, **request: Any) -> Any:
        with self._lock:
            self._requests.send(request)
            return self._requests.recv()

    def open(self, namespace: str, folder: str) -> str:
        """Start the servers of a mount namespace, given by its file in /proc. Return the program that asks them for a
        fork where Ray would start Python. They end with the namespace's other processes."""
        return self.ask(do="open", namespace=namespace, folder=folder)

    def start(self, command: list[str], **options: Any) -> WarmRun:
        """Fork a run of ``command`` (without the interpreter).

        Args:
            options: ``namespace`` and ``program`` of `open`; ``environment``, instead of `environment`; ``out`` and
                ``err``, paths, instead of new files.
        """
        return WarmRun(self, self.fork("run", command, **options))

    def fork(self, kind: str, command: list[str] | None = None, **options: Any) -> dict[str, Any]:
        self._started += 1
        files = {name: str(self._folder / f"{self._started}.{name}") for name in ("out", "err", "in", "answers")}
        request = {"do": kind, "command": command, "environment": environment(), **files, **options}
        if kind == "session":
            os.mkfifo(files["in"])
            os.mkfifo(files["answers"])
        return request | {"pid": self.ask(**request)}

    def session(self) -> Session:
        """The one that runs, or a new one where there is none or its last run failed."""
        if self._session is None or self._session.spent:
            self.end_session()
            self._session = Session(self, self.fork("session"))
        return self._session

    @contextmanager
    def forked_workers(self) -> Iterator[None]:
        """Inside the block, a Ray that this process starts forks its workers, too."""
        executable, sys.executable = sys.executable, self.ask(do="serve")
        try:
            yield
        finally:
            sys.executable = executable

    def end_session(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            session.end()

    def end(self) -> None:
        self.end_session()
        self._requests.close()
        self._process.wait()


class WarmRun:
    """A forked run; looks like a `subprocess.Popen` of text with both outputs in pipes."""

    def __init__(self, launcher: Launcher, forked: dict[str, Any]) -> None:
        self._launcher, self._forked = launcher, forked
        self.pid: int = forked["pid"]
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._launcher.ask(do="poll", pid=self.pid)
        return self.returncode

    def wait(self) -> int:
        while (status := self.poll()) is None:
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Waits for the end of the run; returns what it wrote.

        Raises:
            subprocess.TimeoutExpired: after ``timeout`` seconds.
        """
        end_s = time.monotonic() + (timeout or float("inf"))
        while self.poll() is None:
            if time.monotonic() > end_s:
                raise subprocess.TimeoutExpired(str(self._forked["command"]), timeout or 0.0)
            time.sleep(0.02)
        return Path(self._forked["out"]).read_text(), Path(self._forked["err"]).read_text()


class Session:
    """A process in which runs go to their end one by one, on one Ray."""

    def __init__(self, launcher: Launcher, forked: dict[str, Any]) -> None:
        self._launcher, self._forked = launcher, forked
        self._requests = open(forked["in"], "w")
        self._answers = os.open(forked["answers"], os.O_RDONLY | os.O_NONBLOCK)
        self._runs = 0
        self.spent = False

    def run(self, command: list[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
        """Runs ``command`` (without the interpreter) to its end.

        Raises:
            subprocess.TimeoutExpired: after ``timeout_s`` seconds of the reference machine; the session has ended.
        """
        self._runs += 1
        out, err = (f"{self._forked[name]}.{self._runs}" for name in ("out", "err"))
        print(json.dumps({"command": command, "out": out, "err": err}), file=self._requests, flush=True)
        status = self._wait(command, timeout_s)
        self.spent = status not in (0, 1)  # 1: the run has reported an error of its own, and ended its processes
        return subprocess.CompletedProcess(command, status, Path(out).read_text(), Path(err).read_text())

    def _wait(self, command: list[str], timeout_s: float) -> int:
        deadline, run = Deadline(timeout_s), WarmRun(self._launcher, self._forked)
        while not (answer := self._answer()):
            if (status := run.poll()) is not None:
                self.spent = True
                raise RuntimeError(f"a session has ended with {status}: {run.communicate()}")
            if deadline.expired():
                self.spent = True
                raise subprocess.TimeoutExpired(command, timeout_s)
        return int(answer)

    def _answer(self) -> bytes:
        import select

        ready, _, _ = select.select([self._answers], [], [], 0.1)
        return os.read(self._answers, 64) if ready else b""

    def end(self) -> None:
        """Ends it and its Ray; kills both where that takes long."""
        run = WarmRun(self._launcher, self._forked)
        self._requests.close()
        os.close(self._answers)
        try:
            wait_for(lambda: run.poll() is not None, 0 if self.spent else 20)
        except TimeoutError:
            kill(run)


def descendants(pid: int) -> dict[int, str]:
    """Process ids below ``pid``, with their command lines."""
    below: dict[int, str] = {}
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
                parents[int(entry.name)] = int(status.rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
    frontier = [pid]
    while frontier:
        frontier = [child for child, parent in parents.items() if parent in frontier and child not in below]
        for child in frontier:
            try:
                below[child] = (Path("/proc") / str(child) / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    return below


def kill(run: WarmRun) -> None:
    """All of a run at once, as a power cut would."""
    for pid in (run.pid, *descendants(run.pid)):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    run.communicate()


def launcher() -> Launcher:
    """Return the launcher of the library that this process asks its children to load (LD_PRELOAD)."""
    return _launcher(os.environ.get("LD_PRELOAD"))


@cache
def _launcher(library: str | None) -> Launcher:
    made = Launcher(library)
    atexit.register(made.end)
    return made


def use_ray() -> None:
    """Starts Ray in this process, unless it runs; whoever needs another one shuts this one down first."""
    import ray

    from stalesync.process.ray_cluster import set_environment

    if not ray.is_initialized():
        set_environment(None)  # a test may have changed it since this Ray has read it
        with launcher().forked_workers():
            ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)

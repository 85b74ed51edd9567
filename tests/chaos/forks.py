"""Fork runs, and the Python processes of their Ray, from a process that has imported what they need.

    Forks ── JSON lines ──► zygote: has imported torch and the product, but not Ray
                               ├─ forks ─► the servers of a chain's namespace (`ray_forks.py`): fork its Ray's workers
                               └─ forks ─► a run: what `python scripts/train.py …` does, from that file's first line on

Importing takes most of the time in which a run starts. The servers belong to the chain, not to the run: when a
controller is killed, only Ray and the run's guard can end its workers, as they would otherwise.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNS = 0x00020000


class Forks:
    """The zygote, seen from the process that started it. Any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._zygote = subprocess.Popen(
            [sys.executable, "-c", "from tests.chaos.forks import serve; serve()"],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def open(self, namespace: str, folder: str) -> str:
        """Start the servers of a namespace, given by its file in /proc. Return the program that asks them for a fork
        where Ray would start Python. They end with the namespace's other processes (`Space.close`)."""
        return self._ask(do="open", namespace=namespace, folder=folder)

    def start(self, command: list[str], *, namespace: str, program: str, environment: dict[str, str], out: Path,
              err: Path) -> Forked:  # fmt: skip
        """Fork a run of a script and its arguments."""
        request = {"command": command, "namespace": namespace, "program": program, "environment": environment}
        return Forked(self, self._ask(do="run", out=str(out), err=str(err), **request))

    def poll(self, pid: int) -> int | None:
        """Return the exit status of a run, negative for a signal; None while it runs."""
        return self._ask(do="poll", pid=pid)

    def close(self) -> None:
        """End the zygote."""
        self._zygote.communicate()

    def _ask(self, **request: Any) -> Any:
        with self._lock:
            assert self._zygote.stdin is not None and self._zygote.stdout is not None
            print(json.dumps(request), file=self._zygote.stdin, flush=True)
            return json.loads(self._zygote.stdout.readline())


class Forked:
    """A forked run; has the methods of `subprocess.Popen` that are needed."""

    def __init__(self, forks: Forks, pid: int) -> None:
        self._forks, self.pid = forks, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forks.poll(self.pid)
        return self.returncode

    def wait(self) -> int:
        while self.poll() is None:
            time.sleep(0.02)
        assert self.returncode is not None
        return self.returncode


def serve() -> None:
    """Do what the lines of the standard input ask for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from tests.harness import preload  # noqa: F401

    statuses: dict[int, int | None] = {}
    for line in sys.stdin:
        request = json.loads(line)
        answer: Any
        if request["do"] == "open":
            answer = _open(request["namespace"], request["folder"])
        elif request["do"] == "poll":
            answer = _poll(request["pid"], statuses)
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the run handles one that comes meanwhile
            if not (answer := os.fork()):
                _become(request)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            statuses[answer] = None
        print(json.dumps(answer), flush=True)


def _open(namespace: str, folder: str) -> str:
    """Fork a process that starts the servers in a namespace and keeps them; return their program."""
    from tests.harness.ray_forks import ForkServer

    here, there = os.pipe()
    if not os.fork():
        os.environ["RAY_TMPDIR"] = folder
        enter(namespace)
        os.write(there, f"{ForkServer().executable}\n".encode())
        while True:
            signal.pause()
    os.close(there)
    with open(here) as answer:
        return answer.readline().strip()


def enter(namespace: str) -> None:
    """Enter a mount namespace, given by its file in /proc, with this process, which has one thread."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNS):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")
    os.close(fd)
    os.chdir(ROOT)


def _poll(pid: int, statuses: dict[int, int | None]) -> int | None:
    if statuses[pid] is None:
        found, status = os.waitpid(pid, os.WNOHANG)
        statuses[pid] = os.waitstatus_to_exitcode(status) if found else None
    return statuses[pid]


def _become(request: dict[str, Any]) -> NoReturn:
    """Become the run."""
    from tests.harness.ray_forks import end_process, run_script

    status = 1
    try:
        enter(request["namespace"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        sys.executable = request["program"]
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        status = run_script(request["command"])
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(status)

"""Fork runs and sessions for `tests/warm.py`, in a process that has imported torch and the product, but not Ray."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from tests.harness.ray_forks import ForkServer, end_process, run_script

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNS = 0x00020000

UNEXPECTED = 2
"""What a session reports of a run that ends with an exception which its script does not know"""


def serve(requests: Connection) -> None:
    """Fork what is asked for until nothing more is; what still runs then is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from tests.harness import preload  # noqa: F401

    statuses: dict[int, int | None] = {}
    server: ForkServer | None = None
    while True:
        try:
            request = requests.recv()
        except EOFError:
            break
        answer: Any
        if request["do"] == "poll":
            answer = _poll(request["pid"], statuses)
        elif request["do"] == "serve":
            answer = (server := server or ForkServer()).executable
        elif request["do"] == "open":
            answer = _open(request["namespace"], request["folder"], requests)
        else:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the run handles one that comes meanwhile
            if not (answer := os.fork()):
                requests.close()
                _become(request)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
            statuses[answer] = None
        requests.send(answer)
    for pid in [pid for pid in statuses if _poll(pid, statuses) is None]:
        os.kill(pid, signal.SIGKILL)


def _poll(pid: int, statuses: dict[int, int | None]) -> int | None:
    """The exit status of a process that was forked here; None while it runs."""
    if statuses[pid] is None:
        found, status = os.waitpid(pid, os.WNOHANG)
        statuses[pid] = os.waitstatus_to_exitcode(status) if found else None
    return statuses[pid]


def _open(namespace: str, folder: str, requests: Connection) -> str:
    """Fork a process that starts the servers in a namespace and keeps them; return their program."""
    here, there = os.pipe()
    if not os.fork():
        requests.close()
        _enter(namespace)
        os.environ["RAY_TMPDIR"] = folder
        os.write(there, f"{ForkServer().executable}\n".encode())
        while True:
            signal.pause()
    os.close(there)
    with open(here) as answer:
        return answer.readline().strip()


def _enter(namespace: str) -> None:
    """Enter a mount namespace, given by its file in /proc, with this process, which has one thread."""
    fd = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    if ctypes.CDLL(None, use_errno=True).setns(fd, CLONE_NEWNS):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "setns")
    os.close(fd)
    os.chdir(ROOT)


def _become(request: Mapping[str, Any]) -> NoReturn:
    """A run or a session, in a process of its own."""
    status = 1
    try:
        if "namespace" in request:
            _enter(request["namespace"])
        os.environ.clear()
        os.environ.update(request["environment"])
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        _write_to(request["out"], request["err"])
        sys.executable = request.get("program") or ForkServer().executable
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        if request["do"] == "run":
            status = _train(request["command"], unexpected=1)
        else:
            status = _session(request["in"], request["answers"])
    except BaseException:
        traceback.print_exc()
    finally:
        end_process(status)


def _session(requests: str, answers: str) -> int:
    from stalesync.process.ray_cluster import ray_cluster

    with open(requests) as lines, open(answers, "w") as told, ray_cluster(None):
        for line in lines:
            request = json.loads(line)
            _write_to(request["out"], request["err"])
            print(_train(request["command"], UNEXPECTED), file=told, flush=True)
    return 0


def _train(command: list[str], unexpected: int) -> int:
    """The exit status of a script, which is run as the interpreter would; that of an exception is ``unexpected``."""
    try:
        return run_script(command)
    except BaseException:
        traceback.print_exc()
        return unexpected
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _write_to(out: str, err: str) -> None:
    for number, path in ((1, out), (2, err)):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(opened, number)
        os.close(opened)

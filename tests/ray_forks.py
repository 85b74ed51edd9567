"""Forks Ray's workers from a process that has imported torch: importing it costs more than most tests compute.

    server = ForkServer()                    in a process that has imported what workers need, and not Ray
    sys.executable = server.executable       a Ray that is started now forks its workers from there

Ray starts its processes with ``sys.executable``. `ForkServer.executable` is a script that runs the interpreter, but for
a worker: then it asks the server for a fork, hands it its arguments, environment and standard streams, and waits.
Killed, it takes the fork with it; otherwise it ends with the fork's exit status. The fork does what Ray's own
`default_worker.py` does, from that file's first line on. The server is a child of the process that made it and ends
with it, and its forks with the server.

Ray itself must not be imported before the fork: it reads its settings from the environment when it is.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

EXECUTABLE = """#!/bin/sh
case "$1" in
  */setup_worker.py | */default_worker.py) exec "{python}" -ISE "{client}" "{socket}" "$@" ;;
  *) exec "{python}" "$@" ;;
esac
"""

CLIENT = """
import array, json, os, socket, sys
path, *arguments = sys.argv[1:]
server = socket.socket(socket.AF_UNIX)
try:
    server.connect(path)
    request = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
    streams = array.array("i", [0, 1, 2])
    server.sendmsg([len(request).to_bytes(4, "little")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    server.sendall(request)
except OSError as error:
    sys.exit(f"no server forks for {path}: {error}")
sys.exit(int(server.recv(4) or b"1"))
"""


class ForkServer:
    """The server, seen from the process that made it."""

    def __init__(self) -> None:
        assert "ray" not in sys.modules
        folder = Path(tempfile.mkdtemp(prefix="f", dir=os.environ["RAY_TMPDIR"]))  # removed by the process that set it
        path, client = folder / "socket", folder / "client.py"
        client.write_text(CLIENT)
        script = folder / "python"
        script.write_text(EXECUTABLE.format(python=sys.executable, client=client, socket=path))
        script.chmod(0o700)
        self.executable = str(script)
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(path))
        listener.listen(64)
        here, self._pipe = os.pipe()
        if not os.fork():
            os.close(self._pipe)
            _Server(listener, parent=here).run()
        os.close(here)
        listener.close()


class _Server:
    """Forks for every request; ends when ``parent``, a pipe, does, and its forks with it."""

    def __init__(self, listener: socket.socket, parent: int):
        self._listener, self._parent = listener, parent
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, socket.socket] = {}
        """by pid of the fork"""

    def run(self) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):  # those of the process that made it may be pipes that must end with it
            os.dup2(nothing, stream)
        self._selector.register(self._parent, selectors.EVENT_READ, (self._end, 0))
        self._selector.register(self._listener, selectors.EVENT_READ, (self._accept, 0))
        while True:
            for key, _ in self._selector.select():
                act, pid = key.data
                act(pid, key.fd)

    def _end(self, _: int, parent: int) -> NoReturn:
        for pid in self._clients:
            _kill(pid)
        os._exit(0)

    def _accept(self, _: int, listener: int) -> None:
        client, _address = self._listener.accept()
        head, ancillary, *_rest = client.recvmsg(4, socket.CMSG_SPACE(3 * 4))
        streams, request = array.array("i", ancillary[0][2]), b""
        while len(request) < int.from_bytes(head, "little"):
            request += client.recv(1 << 16)
        if not (pid := os.fork()):
            client.close()
            self._become(*json.loads(request), streams)
        for stream in streams:
            os.close(stream)
        self._clients[pid] = client
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (self._ended, pid))
        self._selector.register(client, selectors.EVENT_READ, (self._abandoned, pid))

    def _ended(self, pid: int, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        client = self._clients.pop(pid)
        if client in self._selector.get_map():
            self._selector.unregister(client)
            client.send(str(status % 256).encode(), socket.MSG_NOSIGNAL)
        client.close()

    def _abandoned(self, pid: int, client: int) -> None:
        self._selector.unregister(client)
        _kill(pid)

    def _become(
        self, arguments: list[str], environment: dict[str, str], folder: str, streams: Sequence[int]
    ) -> NoReturn:
        status = 1
        try:
            for handle in (self._selector, self._listener):
                handle.close()
            os.close(self._parent)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            at = next(index for index, argument in enumerate(arguments) if argument.endswith("/default_worker.py"))
            status = run_script(arguments[at:])
        except BaseException:
            traceback.print_exc()
        finally:
            end_process(status)


def run_script(command: list[str]) -> int:
    """Runs a script as the interpreter would; returns its exit status, and raises what it does not handle."""
    sys.argv = command
    sys.path[0] = str(Path(command[0]).resolve().parent)
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


def end_process(status: int) -> NoReturn:
    """Ends a fork as the interpreter ends: threads are joined, what was registered is called, what was printed is
    written."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)


def _kill(pid: Any) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass

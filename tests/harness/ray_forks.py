"""Fork Ray's processes from ones that have imported what they need: importing it costs more than most tests compute.

    server = ForkServer()                    in a process that has imported what workers need, and not Ray
    sys.executable = server.executable       a Ray that is started now forks its Python processes from there

Ray starts its processes with ``sys.executable``. `ForkServer.executable` is a script that runs the interpreter, except
for Ray's workers and services: for these it asks a server for a fork, passes its arguments, environment and standard
streams on, and waits. Killed, it takes the fork with it; otherwise it ends with the fork's exit status. A fork runs
Ray's own script, such as `default_worker.py`, from its first line. The servers are children of the process that made
them and end with it, and their forks with them.

Workers are forked from a process without Ray: when it is imported, Ray reads a worker's job from the environment.
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
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

EXECUTABLE = """#!/bin/sh
case "$1 $2" in
  */setup_worker.py\\ * | */default_worker.py\\ *) server=workers ;;
  */ray/dashboard/dashboard.py\\ * | -u\\ */ray/*.py) server=services ;;
  *) exec "{python}" "$@" ;;
esac
exec "{python}" -ISE "{folder}/client.py" "{folder}/$server" "$@"
"""

SERVICES = ("ray.autoscaler._private.monitor", "ray.dashboard.utils", "ray._private.log_monitor")
"""What Ray's own processes import"""

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
    """The servers, seen from the process that made them. One forks Ray's workers; the other has imported Ray and forks
    the services of a node (log monitor, agents, dashboard)."""

    def __init__(self) -> None:
        assert "ray" not in sys.modules
        folder = Path(tempfile.mkdtemp(prefix="f", dir=os.environ["RAY_TMPDIR"]))  # removed by the process that set it
        (folder / "client.py").write_text(CLIENT)
        script = folder / "python"
        script.write_text(EXECUTABLE.format(python=sys.executable, folder=folder))
        script.chmod(0o700)
        self.executable = str(script)
        self._pipes = [_start(folder / "workers", ()), _start(folder / "services", SERVICES)]


def _start(path: Path, imports: Sequence[str]) -> int:
    """Fork a server; it ends when the returned pipe is closed."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(64)
    here, there = os.pipe()
    if not os.fork():
        os.close(there)
        _Server(listener, parent=here, imports=imports).run()
    os.close(here)
    listener.close()
    return there


class _Server:
    """Forks for every request; ends when ``parent``, a pipe, does, and its forks with it."""

    def __init__(self, listener: socket.socket, *, parent: int, imports: Sequence[str]) -> None:
        self._listener, self._parent, self._imports = listener, parent, imports
        self._selector = selectors.DefaultSelector()
        self._clients: dict[int, socket.socket] = {}
        """by pid of the fork"""

    def run(self) -> NoReturn:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1):  # those of the process that made it may be pipes that must end with it
            os.dup2(nothing, stream)
        for name in self._imports:
            import_module(name)
        self._selector.register(self._parent, selectors.EVENT_READ, (self._end, 0))
        self._selector.register(self._listener, selectors.EVENT_READ, (self._accept, 0))
        try:
            while True:
                for key, _ in self._selector.select():
                    if self._selector.get_map().get(key.fd) == key:  # not the end of a client whose fork has ended
                        act, pid = key.data
                        act(pid, key.fd)
        except BaseException:
            traceback.print_exc()
            self._end(0, 0)  # no fork outlives it

    def _end(self, _: int, parent: int) -> NoReturn:
        for pid in self._clients:
            _kill(pid)
        os._exit(0)

    def _accept(self, _: int, listener: int) -> None:
        client, _address = self._listener.accept()
        try:
            request, streams = _receive(client)
        except EOFError:
            client.close()
            return
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
            with suppress(OSError):  # it was killed meanwhile
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
            status = run_script(_script_of(arguments))
        except BaseException:
            traceback.print_exc()
        finally:
            end_process(status)


def _receive(client: socket.socket) -> tuple[bytes, Sequence[int]]:
    """Returns a request and the streams that came with it. EOFError: the client was killed before it sent them."""
    streams, request = array.array("i"), b""
    try:
        head, ancillary, *_rest = client.recvmsg(4, socket.CMSG_SPACE(3 * 4))
        for _, _, data in ancillary:
            streams.frombytes(data)
        while len(head) == 4 and len(request) < int.from_bytes(head, "little"):
            if not (part := client.recv(1 << 16)):
                raise EOFError
            request += part
    except (OSError, EOFError):
        head = b""
    if len(head) == 4 and len(streams) == 3:
        return request, streams
    for stream in streams:
        os.close(stream)
    raise EOFError


def _script_of(arguments: list[str]) -> list[str]:
    """The script and its arguments. What `setup_worker.py` does is to execute the `default_worker.py` behind it."""
    if "ray" in sys.modules:
        from ray._raylet import Config

        Config.initialize("")  # reads the settings of this process's environment
    at = next((index for index, argument in enumerate(arguments) if argument.endswith("/default_worker.py")), 0)
    return arguments[at + (arguments[at] == "-u") :]


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

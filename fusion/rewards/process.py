"""Control one guarded child from the pool: start it, exchange frames, dump its stack, kill it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from typing import IO, Any

from fusion.rewards.config import RewardConfig
from fusion.rewards.wire import pack, take_frames

DUMP_WAIT_S = 0.2
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])["sys_path"]
from fusion.rewards.child import main
main(sys.argv[1])"""


class Child:
    """Holds a process and the indices of its unfinished samples. `pending[0]` is the sample being scored, and
    `deadline` (`time.monotonic`) its time limit."""

    def __init__(self, process: subprocess.Popen, connection: socket.socket, life_fd: int, trace: IO[bytes]) -> None:
        self.process = process
        self.connection = connection
        self.pending: deque[int] = deque()
        self.deadline = 0.0
        self.ready = False
        self._life_fd = life_fd
        self._trace = trace
        self._inbox = bytearray()
        self._outbox = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    def enqueue(self, samples: Sequence[tuple[int, Any]]) -> None:
        """Queue samples (index, picklable) for the child and send as much as the socket accepts."""
        self.pending.extend(index for index, _ in samples)
        for index, sample in samples:
            self._outbox += pack(index, sample)
        self.flush()

    def flush(self) -> None:
        """Send as much of the outbox as the socket accepts."""
        try:
            del self._outbox[: self.connection.send(self._outbox)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # The child has ended; `receive` reports that after the results that it still wrote.
            self._outbox.clear()

    def receive(self) -> tuple[list[tuple[int, Any]], bool]:
        """Return the frames that arrived and whether the connection is still open."""
        alive = True
        try:
            data = self.connection.recv(1 << 18)
            alive = bool(data)
            self._inbox += data
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            alive = False
        return list(take_frames(self._inbox)), alive

    def dump_stack(self) -> str:
        """Return the child's current stack as `faulthandler` writes it; empty if there is none in `DUMP_WAIT_S`."""
        self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + DUMP_WAIT_S
        text = self.written_trace()
        while time.monotonic() < until:
            time.sleep(0.01)
            before, text = text, self.written_trace()
            if text and text == before:
                break
        return text

    def written_trace(self) -> str:
        """Return what `faulthandler` has written so far."""
        self._trace.seek(0)
        return self._trace.read().decode(errors="replace")

    def end(self, grace_s: float = 0.0) -> int:
        """Kill the child's process group, after `grace_s` seconds to exit by itself; returns the child's exit status
        (negative: the signal)."""
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            pass
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1
        self.connection.close()
        self._trace.close()
        return self.process.returncode


def start_child(config: RewardConfig) -> Child:
    """Start a new interpreter (never a fork of this one, which may hold a device and threads) without waiting for
    it."""
    parent_end, child_end = socket.socketpair()
    life_read, life_write = os.pipe()
    trace = tempfile.TemporaryFile()
    options = {
        "sys_path": [path or os.getcwd() for path in sys.path],
        "kind": config.kind,
        "path": config.path,
        "socket_fd": child_end.fileno(),
        "life_fd": life_read,
        "trace_fd": trace.fileno(),
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            pass_fds=(child_end.fileno(), life_read, trace.fileno()),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    except BaseException:
        parent_end.close()
        os.close(life_write)
        trace.close()
        raise
    finally:
        child_end.close()
        os.close(life_read)
    parent_end.setblocking(False)
    return Child(process, parent_end, life_write, trace=trace)

"""One guarded child as its pool sees it: start, frames in and out, stack dump, end."""

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
    """A process and what it was given. `pending[0]` is the sample it is at; `deadline` (`time.monotonic`) is that
    sample's."""

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

    def hand(self, samples: Sequence[tuple[int, Any]]) -> None:
        """Queues samples (index, picklable) for the child; `flush` sends as much as fits."""
        self.pending.extend(index for index, _ in samples)
        for index, sample in samples:
            self._outbox += pack(index, sample)
        self.flush()

    def flush(self) -> None:
        try:
            del self._outbox[: self.connection.send(self._outbox)]
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            # It is gone; reading says so too, after the results it still managed to write.
            self._outbox.clear()

    def receive(self) -> tuple[list[tuple[int, Any]], bool]:
        """(frames that arrived, whether the child is still there)."""
        there = True
        try:
            data = self.connection.recv(1 << 18)
            there = bool(data)
            self._inbox += data
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            there = False
        return list(take_frames(self._inbox)), there

    def dump_stack(self) -> str:
        """Where the child is now, as `faulthandler` writes it; empty where it does not answer."""
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
        self._trace.seek(0)
        return self._trace.read().decode(errors="replace")

    def end(self, grace_s: float = 0.0) -> int:
        """Kills the child and whatever it started, after `grace_s` to end by itself; returns its exit status (negative:
        the signal)."""
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
    """Starts a fresh interpreter (never a fork of this one, which may hold a device and threads); returns without
    waiting."""
    ours, theirs = socket.socketpair()
    life_read, life_write = os.pipe()
    trace = tempfile.TemporaryFile()
    options = {
        "sys_path": [path or os.getcwd() for path in sys.path],
        "kind": config.kind,
        "path": config.path,
        "socket_fd": theirs.fileno(),
        "life_fd": life_read,
        "trace_fd": trace.fileno(),
    }
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", BOOT, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(), life_read, trace.fileno()),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
    except BaseException:
        ours.close()
        os.close(life_write)
        trace.close()
        raise
    finally:
        theirs.close()
        os.close(life_read)
    ours.setblocking(False)
    return Child(process, ours, life_write, trace)

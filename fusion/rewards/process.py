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

from fusion.rewards.config import RewardConfig, RewardSpec
from fusion.rewards.wire import Result, Started, pack_call, pack_samples, take_replies

RECEIVE_BYTES = 1 << 16
"""The allocator takes memory from the system, and gives it back, for more"""
DUMP_WAIT_S = 0.5
"""Maximum seconds to wait for a child's stack"""
FRAME = "\n  File "
"""Start of a frame in a stack of `faulthandler`"""
END_S = 5.0
"""Maximum seconds to wait until a keeper has ended its descendants and itself"""
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])["sys_path"]
from fusion.rewards.child import main
main(sys.argv[1])"""


class Child:
    """Holds a keeper's process, the connection to its child, and the indices of the child's unfinished samples.
    `pending[0]` is the sample being scored, of a batch all of `pending` are, and `deadline` (`time.monotonic`) is the
    time limit. `retired`: the child ends
    by itself, and scores none of them. `unreadable`: why its replies cannot be read any more, "" if they can."""

    def __init__(self, process: subprocess.Popen, connection: socket.socket, life_fd: int, trace: IO[bytes]) -> None:
        self.process = process
        self.connection = connection
        self.pending: deque[int] = deque()
        self.deadline = 0.0
        self.ready = False
        self.retired = False
        self.unreadable = ""
        self._life_fd = life_fd
        self._trace = trace
        self._inbox = bytearray()
        self._outbox = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    @property
    def is_idle(self) -> bool:
        """Whether it is ready for samples and has none."""
        return self.ready and not self.pending and not self.retired

    def enqueue(self, samples: Sequence[tuple[int, Any]], in_one_call: bool = False) -> None:
        """Queue samples (index, picklable) for the child and send as much as the socket accepts. ``in_one_call``: for a
        reward that scores a batch."""
        self.pending.extend(index for index, _ in samples)
        self._outbox += pack_call(samples) if in_one_call else pack_samples(samples)
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

    def receive(self) -> tuple[list[tuple[int, Started | Result]], bool]:
        """Return the replies that arrived, and whether more may; sets `unreadable` if something else arrived."""
        alive = True
        try:
            data = self.connection.recv(RECEIVE_BYTES)
            alive = bool(data)
            self._inbox += data
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            alive = False
        replies: list[tuple[int, Started | Result]] = []
        try:
            replies.extend(take_replies(self._inbox))
        except ValueError as error:
            self.unreadable, alive = f"was killed, as it had written to descriptors of others ({error})", False
        return replies, alive

    def dump_stack(self) -> str:
        """Return the child's current stack as `faulthandler` writes it; the part written so far after `DUMP_WAIT_S`."""
        self.process.send_signal(signal.SIGUSR1)
        until = time.monotonic() + DUMP_WAIT_S
        text = self.written_trace()
        while time.monotonic() < until:
            time.sleep(0.01)
            before, text = text, self.written_trace()
            # A busy machine may interrupt the child within a line, or after the headline.
            if text == before and FRAME in text and text.endswith("\n"):
                break
        return text

    def written_trace(self) -> str:
        """Return what `faulthandler` has written so far."""
        handle = self._trace.fileno()  # its position is the child's, too: it must not move
        return os.pread(handle, os.fstat(handle).st_size, 0).decode(errors="replace")

    @property
    def has_ended(self) -> bool:
        """Whether an idle child has ended. Its connection closes before the keeper has ended."""
        try:
            return self.process.poll() is not None or not self.connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def kill(self) -> None:
        """Make the keeper kill the child and all its descendants; `end` must follow. Any thread may call it."""
        self.process.terminate()

    def end(self, grace_s: float = 0.0) -> int:
        """Kill the child and all its descendants, after `grace_s` seconds to exit by itself; returns its exit status
        (negative: the signal)."""
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self._end_keeper()
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1
        self.connection.close()
        self._trace.close()
        return self.process.returncode

    def _end_keeper(self) -> None:
        self.kill()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:  # stopped by a signal; its child dies with it
            self.process.kill()
            self.process.wait()


def start_child(config: RewardConfig, spec: RewardSpec) -> Child:
    """Start a new interpreter (never a fork of this one, which may hold a device and threads) without waiting for
    it."""
    parent_end, child_end = socket.socketpair()
    life_read, life_write = os.pipe()
    trace = tempfile.TemporaryFile()
    options = {
        "sys_path": [path or os.getcwd() for path in sys.path],
        "kind": spec.kind,
        "target": spec.target,
        "label": spec.label,
        "memory_mib": config.memory_mib,
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

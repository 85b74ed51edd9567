"""Control guarded children from their pool: start them, exchange frames, dump a stack, kill them. `Child` scores
samples; environments have children of their own (`fusion/environments/pool.py`)."""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any, Generic, TypeVar

from fusion.rewards.config import RewardConfig, RewardSpec
from fusion.rewards.wire import Result, ScoringStarted, decode_reply, pack_call, pack_samples, take_frames

RECEIVE_BYTES = 1 << 16
"""The allocator takes memory from the system, and gives it back, for more"""
DUMP_WAIT_S = 2.0
"""Maximum seconds to wait for a child's stack"""
FRAME = "\n  File "
"""Start of a frame in a stack of `faulthandler`"""
END_S = 5.0
"""Maximum seconds to wait until a keeper has ended its descendants and itself"""
START_LIMIT_S = 60.0
"""Maximum seconds until a child is ready"""
BOOT = """import json, sys
sys.path[:] = json.loads(sys.argv[1])["sys_path"]
from {module} import main
main(sys.argv[1])"""

Reply = TypeVar("Reply")
AnyChild = TypeVar("AnyChild", bound="GuardedProcess")
Pool = TypeVar("Pool", bound="GuardedPool")


class GuardedProcess(Generic[Reply]):
    """Hold a keeper's process and the connection to its child. `deadline` (`time.monotonic`): when the child is to be
    ready, later that of its current work. `retired`: the child ends by itself and takes no more work. `unreadable`: why
    its replies cannot be read any more, "" if they can."""

    def __init__(self, module: str, options: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Start a new interpreter (never a fork of this one, which may hold a device and threads), which calls ``main``
        of the module with the options as JSON.
        ``fds``: further descriptors that the child keeps."""
        self.connection, child_end = socket.socketpair()
        life_read, self._life_fd = os.pipe()
        self._trace: IO[bytes] = tempfile.TemporaryFile()
        own = {"socket_fd": child_end.fileno(), "life_fd": life_read, "trace_fd": self._trace.fileno()}
        known = {"sys_path": [path or os.getcwd() for path in sys.path], **own, **options}
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", BOOT.format(module=module), json.dumps(known)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what this process writes to its standard output may be for a program
                pass_fds=(*own.values(), *fds),
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        except BaseException:
            self._close()
            raise
        finally:
            child_end.close()
            os.close(life_read)
        self.connection.setblocking(False)
        self.deadline = 0.0
        self.ready = False
        self.retired = False
        self.unreadable = ""
        self._inbox = bytearray()
        self._outbox = bytearray()

    def fileno(self) -> int:
        return self.connection.fileno()

    @property
    def wants_write(self) -> bool:
        return bool(self._outbox)

    @staticmethod
    def decode(index: int, payload: bytes) -> Reply:
        """Return a reply of the child; raises ValueError for what it never sends."""
        raise NotImplementedError

    def send(self, data: bytes) -> None:
        """Queue frames for the child and send as much as the socket accepts."""
        self._outbox += data
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

    def receive(self) -> tuple[list[tuple[int, Reply]], bool]:
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
        replies: list[tuple[int, Reply]] = []
        try:
            replies.extend(take_frames(self._inbox, self.decode))
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
        self._close()
        return self.process.returncode

    def _close(self) -> None:
        if self._life_fd >= 0:
            os.close(self._life_fd)
            self._life_fd = -1
        self.connection.close()
        self._trace.close()

    def _end_keeper(self) -> None:
        self.kill()
        try:
            self.process.wait(END_S)
        except subprocess.TimeoutExpired:  # stopped by a signal; its child dies with it
            self.process.kill()
            self.process.wait()


class Child(GuardedProcess[ScoringStarted | Result]):
    """A child that scores samples. `pending` are the indices of its unfinished ones: `pending[0]` is being scored, of
    a batch all of `pending` are, and `deadline` is their time limit."""

    decode = staticmethod(decode_reply)

    def __init__(self, config: RewardConfig, spec: RewardSpec) -> None:
        options = {"kind": spec.kind, "target": spec.target, "label": spec.label, "memory_mib": config.memory_mib}
        super().__init__("fusion.rewards.child", options)
        self.pending: deque[int] = deque()

    @property
    def is_idle(self) -> bool:
        return self.ready and not self.pending and not self.retired

    def enqueue(self, samples: Sequence[tuple[int, Any]], in_one_call: bool = False) -> None:
        """Queue samples (index, picklable) for the child. ``in_one_call``: for a reward that scores a batch."""
        self.pending.extend(index for index, _ in samples)
        self.send(pack_call(samples) if in_one_call else pack_samples(samples))


class GuardedPool(Generic[AnyChild]):
    """Keep ``workers`` children that ``start`` starts, and watch their sockets; ``label`` names what they run."""

    def __init__(self, start: Callable[[], AnyChild], *, workers: int, label: str) -> None:
        self._start_child, self._workers, self.label = start, workers, label
        self._selector = selectors.DefaultSelector()
        self._children: list[AnyChild] = []
        self._start_error = ""
        self._closed = False

    def __enter__(self: Pool) -> Pool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every child; idempotent."""
        raise NotImplementedError

    def _fill(self) -> None:
        """Start children until there are enough; none if the pool is closed."""
        while not self._closed and len(self._children) < self._workers:
            child = self._start_child()
            child.deadline = time.monotonic() + START_LIMIT_S
            self._children.append(child)
            self._selector.register(child, selectors.EVENT_READ, child)

    def _watch(self, child: AnyChild) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if child.wants_write else 0)
        self._selector.modify(child, events, child)

    def _drop(self, child: AnyChild, grace_s: float = 0.0) -> int:
        self._children.remove(child)
        self._selector.unregister(child)
        return child.end(grace_s)

    def _drop_ended(self, child: AnyChild) -> tuple[str, str]:
        """Drop a child that has ended; return how it ended, in words, and the stack that it has written."""
        trace = child.written_trace()
        # The socket closes before the keeper has ended the child's descendants and exits with its status.
        status = self._drop(child, grace_s=0.0 if child.unreadable else END_S)
        number = -status  # real-time signals have no name
        name = signal.Signals(number).name if number in {*signal.Signals} else f"signal {number}"
        return child.unreadable or (f"was killed by {name}" if status < 0 else f"exited with status {status}"), trace

    def _drop_late(self, child: AnyChild) -> str:
        """Drop a child that was not ready in time; return what to report."""
        trace = child.dump_stack()
        self._drop(child)
        return f"{self.label}: not ready after {START_LIMIT_S:.0f} s\n{trace}".rstrip()

    def _end_all(self) -> None:
        for child in self._children:
            child.kill()
        for child in list(self._children):
            self._drop(child)

"""Report which process ended first, and how: processes that are no children of this one.

Whether a process of Ray ended before the thread of the controller that started it:

    the thread ends ─► the kernel signals its children that asked for it (PR_SET_PDEATHSIG), all at once:
                         Ray's processes are killed by theirs; this process receives one, too
    epoll            ─► reports descriptors in the order in which they became ready: that of the signal, and pidfds

This process may be delayed so long that it finds both ended. But the kernel keeps the order meanwhile: it sends all
signals before any process that they kill can be reported as ended, so that a process that is ready before the signal
has ended by itself, and the end of the controller may be its consequence. The reverse is not certain: a process closes
its connections before it is reported as ended, and a peer that ends by that may be reported first."""

import ctypes
import fcntl
import os
import select
import signal
import struct
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

INFO = struct.Struct("=Q52xi")
"""`struct pidfd_info` of `linux/pidfd.h`: its mask, and the exit status"""
PIDFD_GET_INFO = 3 << 30 | INFO.size << 16 | 0xFF << 8 | 11
PIDFD_INFO_EXIT = 1 << 3


class ProcessStat(NamedTuple):
    """What the kernel says of a process: `/proc/PID/stat`. ``name``: at most 15 bytes; ``started``: clock ticks since
    the machine started; ``exit_status``: of a zombie, as `waitpid` returns it."""

    name: str
    state: str
    parent: int
    started: int
    exit_status: int

    @classmethod
    def of(cls, pid: int) -> "ProcessStat | None":
        """Read that of a process; None: it has ended."""
        try:
            before, after = Path(f"/proc/{pid}/stat").read_text(errors="replace").rsplit(")", 1)
        except OSError:
            return None
        fields = after.split()
        return cls(before.split("(", 1)[1], fields[0], int(fields[1]), int(fields[19]), int(fields[-1]))

    @classmethod
    def of_all(cls) -> "dict[int, ProcessStat]":
        stats = {int(name): cls.of(int(name)) for name in os.listdir("/proc") if name.isdigit()}
        return {pid: stat for pid, stat in stats.items() if stat is not None}


class ExitStatus:
    """Watch a process of the same user, whose exit status is known of a zombie, or from Linux 6.15 on of any that
    ended while it was watched. ``descriptor``: readable when it has ended; -1: there is none."""

    def __init__(self, pid: int) -> None:
        self._pid, self.descriptor = pid, -1
        with suppress(OSError, AttributeError):  # it has ended, or kernel or interpreter are older than Linux 5.3
            self.descriptor = os.pidfd_open(pid)

    def read(self) -> int | None:
        """Return the exit status, negative for a signal; None: it has not ended, or the kernel does not keep it."""
        status = self._of_reaped()
        if status is None:
            stat = ProcessStat.of(self._pid)
            if stat is not None and stat.state == "Z":
                status = stat.exit_status
            else:  # it may have been reaped in between
                status = self._of_reaped()
        return None if status is None else os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    def _of_reaped(self) -> int | None:
        if self.descriptor >= 0:
            with suppress(OSError):  # an older kernel
                mask, status = INFO.unpack(fcntl.ioctl(self.descriptor, PIDFD_GET_INFO, INFO.pack(PIDFD_INFO_EXIT, 0)))
                if mask & PIDFD_INFO_EXIT:
                    return int(status)
        return None


PR_SET_PDEATHSIG = 1
SIGNAL = signal.SIGUSR1
"""Signal by which the kernel reports the end of the thread; blocked, and read from a descriptor"""
SIGSET_WORDS = 16
"""Size of the C library's `sigset_t` in machine words: at least"""


class EndWatch:
    """Watch descriptors, and the thread that started this process. Only for a process of one thread, which checks its
    parent's id afterwards: the thread may have ended before."""

    def __init__(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [SIGNAL])
        mask = (ctypes.c_ulong * SIGSET_WORDS)(1 << (SIGNAL - 1))
        self.thread = _call("signalfd", -1, mask, os.O_CLOEXEC | os.O_NONBLOCK)
        """The descriptor that `poll` returns when the thread has ended"""
        self._epoll = select.epoll()
        self._watched: set[int] = set()
        self.watch([self.thread])
        _call("prctl", PR_SET_PDEATHSIG, ctypes.c_ulong(SIGNAL))

    def watch(self, descriptors: Collection[int]) -> None:
        """Add those that are not watched yet, each of which `poll` returns once: pidfds."""
        for fd in {*descriptors} - self._watched:
            self._epoll.register(fd, select.EPOLLIN | select.EPOLLONESHOT)
            self._watched.add(fd)

    def watch_input(self, fd: int) -> None:
        """Add a descriptor that `poll` returns whenever it can be read."""
        self._epoll.register(fd, select.EPOLLIN)

    def unwatch_input(self, fd: int) -> None:
        self._epoll.unregister(fd)

    def poll(self, timeout_s: float) -> list[int]:
        """Wait at most ``timeout_s`` for the first of the descriptors; return those that are ready, in the order in
        which they became ready."""
        return [fd for fd, _ in self._epoll.poll(timeout_s)]

    def close(self) -> None:
        """Stop watching. The signal stays blocked."""
        self._epoll.close()
        os.close(self.thread)


def _call(function: str, *args: object) -> int:
    result: int = getattr(ctypes.CDLL(None, use_errno=True), function)(*args)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), function)
    return result

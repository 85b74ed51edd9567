"""Report whether a process of Ray ended before the thread of the controller that started it.

    the thread ends ─► the kernel signals its children that asked for it (PR_SET_PDEATHSIG), all at once:
                         Ray's processes are killed by theirs; this process receives one, too
    epoll            ─► reports descriptors in the order in which they became ready: that of the signal, and pidfds

This process may be delayed so long that it finds both ended. But the kernel keeps the order meanwhile: it sends all
signals before any process that they kill can be reported as ended, so that a process that is ready before the signal
has ended by itself, and the end of the controller may be its consequence. The reverse is not certain: a process closes
its connections before it is reported as ended, and a peer that ends by that may be reported first."""

import ctypes
import os
import select
import signal
from collections.abc import Collection

PR_SET_PDEATHSIG = 1
SIGNAL = signal.SIGUSR1
"""By which the kernel reports the end of the thread; blocked, and read from a descriptor"""
SIGSET_WORDS = 16
"""Size of the C library's `sigset_t` in machine words: at least"""


class EndWatch:
    """Watches descriptors, and the thread that started this process. Only for a process of one thread, which checks its
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

"""End everything that a guarded child starts: a process above it that runs none of the user's code.

    pool ─ starts ─► keeper ─ forks ─► child: scores ─ starts ─► processes of the reward
             ▲          │ subreaper      │ subreaper
             └─ status ─┤                └─ after each sample, ends what that sample has started
                        └─ ends all descendants at the end of the child or of the pool's process, and at SIGTERM

A process whose parent ends becomes a child of the nearest subreaper above it, also in a session of its own. So the
parents of processes in /proc lead to every descendant, and a process without a child has no descendants."""

import ctypes
import fcntl
import os
import resource
import select
import signal
import time
from collections.abc import Collection, Iterable
from typing import NoReturn

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
WALL = 0x40000000
"""`__WALL` of wait(2): children of any kind"""
SIGNALS = (signal.SIGCHLD, signal.SIGIO, signal.SIGTERM, signal.SIGUSR1)
END_S = 2.0
"""Maximum seconds in which descendants are killed: some could fork faster than they are found"""


def run_kept(life_fd: int, child_fds: Iterable[int]) -> None:
    """Fork; return in the child only. This process becomes its keeper and exits as the child does.
    ``life_fd``: pipe whose other end is held only by the pool's process; when it closes, everything is killed.
    ``child_fds``: descriptors that only the child uses."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    keeper = os.getpid()
    unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    # The kernel sends SIGIO at the pipe's end. (A parent-death signal follows the *thread* that started the process.)
    fcntl.fcntl(life_fd, fcntl.F_SETOWN, keeper)
    fcntl.fcntl(life_fd, fcntl.F_SETFL, fcntl.fcntl(life_fd, fcntl.F_GETFL) | os.O_ASYNC)  # type: ignore[attr-defined]
    child = os.fork()
    if child:
        for fd in child_fds:
            os.close(fd)
        _exit_as(_watch(child, life_fd))
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # the keeper has one thread
    if os.getppid() != keeper:
        os._exit(1)
    os.setpgid(0, 0)  # a signal that the reward sends to its group does not reach the keeper
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)


def end_descendants(spared: Collection[int] = ()) -> None:
    """Kill and reap every descendant of this process, except the processes ``spared`` and theirs."""
    if not _has_child():
        return
    until = time.monotonic() + END_S
    while _has_child():
        pids = _descendants(os.getpid(), spared)
        if not pids:
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):  # has ended, or belongs to another user
                pass
        for pid in pids:
            try:
                os.waitpid(pid, os.WNOHANG | WALL)
            except ChildProcessError:  # not a child of this process until its parent has ended
                pass
        if time.monotonic() > until:
            return
        time.sleep(0.001)


def children() -> frozenset[int]:
    return frozenset(_children_by_parent().get(os.getpid(), ())) if _has_child() else frozenset()


def _watch(child: int, life_fd: int) -> int | None:
    """Wait for the child's end or an order to end it, then end all descendants; return its exit status if it ended by
    itself."""
    status = None
    life = select.poll()  # `select` takes no descriptor above 1,023, which a parent of many processes has
    life.register(life_fd, select.POLLIN)
    closed = life.poll(0)
    while status is None and not closed:
        number = signal.sigwait(SIGNALS)
        if number == signal.SIGUSR1:
            os.kill(child, number)  # it writes its stack
        elif number == signal.SIGCHLD:
            status = _reap(child)
        else:
            break
    end_descendants()
    return status


def _reap(child: int) -> int | None:
    """Reap all processes that have ended; return the child's status if it is one of them."""
    status = None
    while True:
        try:
            pid, ended_as = os.waitpid(-1, os.WNOHANG | WALL)
        except ChildProcessError:
            return status
        if not pid:
            return status
        if pid == child:
            status = ended_as


def _exit_as(status: int | None) -> NoReturn:
    """End this process with the wait status of another."""
    if status is None:
        os._exit(1)
    if not os.WIFSIGNALED(status):
        os._exit(os.WEXITSTATUS(status))
    number = os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os.kill(os.getpid(), number)
    os._exit(1)


def _has_child() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT | WALL)
    except ChildProcessError:
        return False
    return True


def _descendants(pid: int, spared: Collection[int]) -> list[int]:
    children = _children_by_parent()
    descendants: list[int] = []
    parents = [pid]
    while parents:
        new = [child for child in children.get(parents.pop(), ()) if child not in spared]
        descendants += new
        parents += new
    return descendants


def _children_by_parent() -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:  # it has ended meanwhile, or /proc hides what belongs to others
            continue
        children.setdefault(parent, []).append(int(name))
    return children


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), ctypes.c_ulong(0), ctypes.c_ulong(0), ctypes.c_ulong(0)):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "prctl")

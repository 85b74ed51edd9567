"""Lock a folder against a second process, by the kernel (flock), and name the holder in the error of the second.

The kernel releases the lock when its holder ends, however that happens, so a lock is never stale. The file stays; its
content is only read while the lock is held. A process that the holder forks does not keep the lock."""

import errno
import fcntl
import json
import logging
import os
import socket
import time
import weakref
from contextlib import suppress
from pathlib import Path

from fusion.telemetry.files import write_all

log = logging.getLogger(__name__)

NAME = "lock.json"


class FolderInUse(ValueError):
    """Another process holds the lock of ``folder``. ``holder``: `pid`, `host` and `since`, as far as it is known."""

    def __init__(self, folder: Path, holder: dict[str, str | int]):
        self.folder, self.holder = folder, holder
        who = "another process"
        if holder:
            who = f"process {holder['pid']} on {holder['host']}, since {holder['since']}"
        super().__init__(
            f"run.name={folder.name}: {folder} is in use by {who}; stop that run (or wait until it has ended), or "
            "choose another run.name"
        )


class FolderLock:
    """Hold the lock of a folder until `release`, or until the object or the process ends.
    FolderInUse: another `FolderLock`, of any process, holds it.
    Raise OSError: the lock file cannot be written, or is a symbolic link."""

    def __init__(self, folder: Path) -> None:
        fd = os.open(folder / NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                holder = _read(fd)
                self._close()
                raise FolderInUse(folder, holder) from None
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EINVAL):
                self._close()
                raise
            log.warning("%s: this file system has no locks (%s): two runs may write to one folder", folder, error)
        _held.add(self)
        holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S %Z")}
        os.ftruncate(fd, 0)
        write_all(fd, json.dumps(holder).encode(), 0)

    def release(self) -> None:
        """Release the lock. No error if it was released before."""
        self._close()
        _held.discard(self)


def is_held(folder: Path) -> bool:
    """Return whether a process of this machine holds the lock of a folder, without taking it. The holder's open files
    tell: a lock that is tried, however briefly, could refuse a run that starts."""
    path = folder.resolve() / NAME
    try:
        holder = json.loads(path.read_bytes()[:4096])
        if holder["host"] != socket.gethostname():
            return False
        files = _open_files(int(holder["pid"]))
    except (OSError, ValueError, KeyError, TypeError):  # no lock, none written yet, or its process has ended
        return False
    return str(path) in files


def _open_files(pid: int) -> set[str]:
    files = set()
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed since it was listed
            files.add(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
    return files


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _release_in_child() -> None:
    # A lock belongs to an open file, which a forked child shares: the copy of a child that outlives the holder would
    # keep the folder locked. Closing a copy does not unlock it.
    for lock in list(_held):
        lock.release()


os.register_at_fork(after_in_child=_release_in_child)


def _read(fd: int) -> dict[str, str | int]:
    """Return what the holder wrote; nothing, if it has not written it yet."""
    try:
        holder = json.loads(os.pread(fd, 4096, 0))
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) and {"pid", "host", "since"} <= holder.keys() else {}

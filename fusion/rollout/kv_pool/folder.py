"""Own one rank's part of a folder of the KV pool: create, open, take and remove files.

    ROOT/distqueue-kv-RUN-BOOT/files/NAME     what any rank of the host may open
    ROOT/distqueue-kv-RUN-BOOT/rank-R/        files that rank R is writing, and those whose memory it will use again
    ROOT/distqueue-kv-RUN-BOOT/rank-R.lock    locked by rank R's process, and naming it

The folder is one that `distqueue.payload.sweep` knows: once no lock is held, the next sweep removes it: that of the
guard of a killed run, or of the start of any other queue. The last rank that closes removes it itself.

Everything is readable by its owner only. A file is written completely under a private name, then moved to `files`,
where it is never changed. Its reader takes it out of there, and writes its own next file into the same memory: the
kernel needs several times longer to find new pages than to copy into old ones."""

import errno
import os
import shutil
import stat
from collections.abc import Sequence
from contextlib import suppress
from io import FileIO
from itertools import count
from pathlib import Path

from distqueue.errors import FULL
from distqueue.payload.sweep import LOCK, PREFIX, NodeProcess, own, remove, sweep
from fusion.telemetry.files import write_all

FILES = "files"
"""Part of a folder that any rank of the host may open"""


def folder_of(root: Path, run: str, boot: str) -> Path:
    """Return the folder of a run's pool on a host below ``root``."""
    return root / f"{PREFIX}kv-{run}-{boot[:8]}"


def open_file(path: Path) -> FileIO:
    """Open a file for reading, without a buffer and without following a link, which is an OSError."""
    return open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), "rb", buffering=0)


def is_private(about: os.stat_result) -> bool:
    """Whether something is a file of this user that no other user can open."""
    return stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o077


class PoolFolder:
    """One rank's part of a folder.
    ``path``: of the folder.
    ``min_free``: share of its file system that writing leaves free.
    ``max_idle_bytes``: bound on the files that are kept for their memory.
    Raise StorageFull: there is no space for the folder."""

    def __init__(self, path: Path, rank: int, *, min_free: float = 0.0, max_idle_bytes: int = 0):
        self.path, self._private, self._files = path, path / f"rank-{rank}", path / FILES
        self._min_free, self._max_idle_bytes = min_free, max_idle_bytes
        self._idle: list[tuple[Path, int]] = []
        """Files of this rank's own and their bytes, the one taken last at the end"""
        self._idle_bytes = 0
        self._numbers = count()
        sweep(path.parent, path)
        self.replaces = self._private.exists()
        """Whether this rank had a process in this run before, which has died"""
        self._lock = own(self._private, NodeProcess.of(os.getpid()))
        self._files.mkdir(mode=0o700, exist_ok=True)
        for leaving in self._private.iterdir():
            leaving.unlink()

    def names(self) -> list[str]:
        """Return the names of the files that any rank may open."""
        return os.listdir(self._files)

    def __contains__(self, name: str) -> bool:
        return (self._files / name).exists()

    def open(self, name: str) -> FileIO:
        """Open a file for reading, without a buffer. Raise OSError: among others, there is none, or it is a link."""
        return open_file(self._files / name)

    def write(self, name: str, parts: Sequence[memoryview], fresh: bool = False) -> None:
        """Write a file; one of that name is replaced. ``fresh``: into new memory, in any thread.
        Raise OSError: among others, there is no space (`distqueue.errors.FULL`); nothing was written."""
        nbytes = sum(part.nbytes for part in parts)
        path, held = (self._new_path(), 0) if fresh else self._take_idle()
        try:
            self._check_free(nbytes - held)
            self._write(path, parts)
        except OSError as error:
            path.unlink(missing_ok=True)
            if error.errno not in FULL or fresh or not self._idle:
                raise
            self._drop_idle()
            return self.write(name, parts)
        path.rename(self._files / name)

    def take(self, name: str) -> None:
        """Remove a file that this rank has read, or that no rank will; its memory is this rank's. Do nothing if there
        is none."""
        path = self._new_path()
        with suppress(FileNotFoundError):
            (self._files / name).rename(path)
            about = path.lstat()
            if is_private(about) and self._idle_bytes + about.st_size <= self._max_idle_bytes:
                self._idle.append((path, about.st_size))
                self._idle_bytes += about.st_size
            else:
                path.unlink()

    def remove(self, name: str) -> None:
        """Remove a file, which another rank may still be reading."""
        (self._files / name).unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """Return a file's content. Raise FileNotFoundError: another rank has taken it."""
        return (self._files / name).read_bytes()

    def close(self) -> None:
        """Remove this rank's part, and the folder if no other rank has a lock in it."""
        if not [other for other in self.path.glob(f"*{LOCK}") if other.name != self._private.name + LOCK]:
            shutil.rmtree(self.path, ignore_errors=True)
        remove(self._private)
        with suppress(OSError):  # another rank is in it
            self._files.rmdir()
            self.path.rmdir()
        os.close(self._lock)

    def _new_path(self) -> Path:
        return self._private / str(next(self._numbers))

    def _take_idle(self) -> tuple[Path, int]:
        """Return a file to write to, and the bytes that it has."""
        if not self._idle:
            return self._new_path(), 0
        path, nbytes = self._idle.pop()
        self._idle_bytes -= nbytes
        return path, nbytes

    def _drop_idle(self) -> None:
        for path, _ in self._idle:
            path.unlink(missing_ok=True)
        self._idle, self._idle_bytes = [], 0

    def _write(self, path: Path, parts: Sequence[memoryview]) -> None:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.fchmod(handle, 0o600)
            for part in parts:
                write_all(handle, part, path=path)
            os.ftruncate(handle, os.lseek(handle, 0, os.SEEK_CUR))
        finally:
            os.close(handle)

    def _check_free(self, nbytes: int) -> None:
        """Raise ENOSPC if the file system would have less free than it should."""
        about = os.statvfs(self.path)
        if about.f_bavail * about.f_frsize - nbytes < self._min_free * about.f_blocks * about.f_frsize:
            message = f"{nbytes:,} bytes would leave less than {self._min_free:.0%} of its space free"
            raise OSError(errno.ENOSPC, message, str(self.path))

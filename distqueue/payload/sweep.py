"""Own a queue's folder on a node, and remove the folders that dead queues left.

    ROOT/distqueue-EPOCH/SHARD         the segments of a shard; ROOT: shared memory, or a folder of spilled segments
    ROOT/distqueue-EPOCH/SHARD.lock    locked by the shard's process; names the node process that restarts it
    ROOT/distqueue-EPOCH/free          since when no lock has been held, by its time of modification

The kernel releases the lock however the process ends. A folder none of whose locks is held belongs to a dead queue, or
to one whose shard is being restarted. The latter is impossible if the node process (Ray's raylet) is dead, too:

    locks   node process   the folder is
    held                   in use
    free    dead           removed
    free    alive          removed once it has been free for ABANDONED_S: marked by one start of a queue, removed by
                           another, so no queue needs to live that long

Another folder of this kind (the engines' KV) is of no use to any other process, so its locks name the processes that
hold them, and it is removed once all of these are dead. Folders of other users, and on shared disks of other hosts, are
left alone. Everything here is readable by its owner only."""

import fcntl
import json
import logging
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, NamedTuple

from distqueue.errors import StorageFull, naming_full_storage

log = logging.getLogger(__name__)

PREFIX = "distqueue-"
LOCK = ".lock"
MARK = "free"

RAYLET = "RAY_RAYLET_PID"
"""The environment variable in which Ray's workers find the raylet of their node"""
LOCK_BYTES = 4096
"""What a lock takes on the file system"""
ABANDONED_S = 60.0
"""Restarting a shard takes less"""


class NodeProcess(NamedTuple):
    """Identify the process that restarts a shard. `boot`: of the host's kernel; `started`: clock ticks after that."""

    host: str
    boot: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls) -> "NodeProcess":
        """Ray's raylet, which starts its workers directly or through another program; outside Ray, the parent."""
        return cls.of(int(os.environ.get(RAYLET) or os.getppid()))

    @classmethod
    def of(cls, pid: int) -> "NodeProcess":
        """For a folder that is of no use once this process has ended, the process itself."""
        return cls(socket.gethostname(), _boot(), pid, _started(pid))

    def is_dead(self) -> bool | None:
        """None: it belongs to another host, and cannot be seen from here."""
        if self.boot == _boot():
            return _started(self.pid) != self.started
        return True if self.host == socket.gethostname() else None


def decide(owners_dead: Sequence[bool | None], free_s: float | None) -> Literal["keep", "mark", "remove"]:
    """Decide on a folder whose locks are free. `owners_dead`: of each lock's node process, whether it is dead, False if
    it is alive or not named (a shard is just starting), None if it cannot be seen; `free_s`: seconds since the
    folder was marked, None: it is not. Pure."""
    if None in owners_dead:
        return "keep"
    if owners_dead and all(owners_dead):
        return "remove"
    if free_s is None:
        return "mark"
    return "remove" if free_s >= ABANDONED_S else "keep"


def own(folder: Path, restarts: NodeProcess | None = None) -> int:
    """Create a shard's folder and lock it for this process. `restarts`: the process that may restart it; None: the
    node's. Return the handle, which must stay open. StorageFull: there is no space; what was created is removed."""
    created = not folder.exists()
    try:
        with naming_full_storage(folder, LOCK_BYTES):
            return _own(folder, restarts or NodeProcess.of_this_process())
    except StorageFull:
        if created:
            remove(folder)
        raise


def _own(folder: Path, restarts: NodeProcess) -> int:
    lock = folder.with_name(folder.name + LOCK)
    while True:
        for path in (folder.parent, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileNotFoundError):
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_SH)  # waits for one that is removing the folder
                if folder.is_dir() and os.path.samestat(os.fstat(handle), lock.stat()):
                    _name(handle, restarts)
                    (folder.parent / MARK).unlink(missing_ok=True)
                    return handle
            except BaseException:
                os.close(handle)
                raise
            os.close(handle)


def _name(handle: int, restarts: NodeProcess) -> None:
    """Write a node process to a lock. What an earlier one wrote is written over, which needs no space."""
    name = json.dumps(restarts).encode()
    os.pwrite(handle, name, 0)
    os.ftruncate(handle, len(name))


def remove(folder: Path) -> None:
    """Remove a shard's folder, its lock, and the queue's folder if no other shard's is in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.with_name(folder.name + LOCK).unlink(missing_ok=True)
    with suppress(OSError):
        folder.parent.rmdir()


def memory() -> Path:
    """Shared memory."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def sweep(root: Path, own_folder: Path | None = None) -> None:
    """Remove the folders of dead queues in `root`, except the folder of the calling queue, if it is one."""
    sweep_folders(folder for folder in root.glob(f"{PREFIX}*") if folder != own_folder)


def sweep_folders(folders: Iterable[Path]) -> None:
    """Remove those of the folders whose processes are dead."""
    for folder in folders:
        if folder.is_symlink() or not folder.is_dir():
            continue
        try:
            with ExitStack() as stack:
                if folder.stat().st_uid == os.getuid():
                    _sweep_one(folder, stack)
        except FileNotFoundError:  # another queue is sweeping, too
            pass
        except OSError as error:
            log.warning("cannot remove %s, if it is abandoned: %s", folder, error)


def _sweep_one(folder: Path, stack: ExitStack) -> None:
    owners_dead: list[bool | None] = []
    mark = folder / MARK
    for lock in folder.glob(f"*{LOCK}"):
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        stack.callback(os.close, handle)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            mark.unlink(missing_ok=True)
            return
        try:
            owners_dead.append(NodeProcess(*json.loads(os.pread(handle, 1 << 12, 0))).is_dead())
        except (ValueError, TypeError):  # not named yet
            owners_dead.append(False)
    free_s = time.time() - mark.stat().st_mtime if mark.exists() else None
    match decide(owners_dead, free_s):
        case "mark":
            mark.touch(mode=0o600)
        case "remove":
            log.warning("removing %s: its processes are dead", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _started(pid: int) -> int:
    """When a process was started; 0: there is none."""
    try:
        about = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    state, *fields = about.rpartition(")")[2].split()
    return 0 if state in "ZX" else int(fields[18])

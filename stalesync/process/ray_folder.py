"""Keep Ray's files where no other user of this machine can change them: in a folder for each run that only its user may
enter.

    ROOT/ray-XXXXXXXX/ray         Ray's temporary folder: Ray lets all users write to it, and follows links in it
    ROOT/ray-XXXXXXXX/ray.lock    locked by the controller

ROOT is RAY_TMPDIR, else TMPDIR, else /tmp. Nobody but its user and root can rename the folder, or anything above it:
the name is new, and each folder above belongs to this user or root and is writable by others only with a sticky bit, or
is below one that only its user may enter. The folder is removed when the run has ended; that of a run all of whose
processes were killed, when the next one has."""

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from distqueue.errors import StorageFull
from distqueue.payload.sweep import LOCK, NodeProcess, own, sweep_folders

ROOT_VARIABLE = "RAY_TMPDIR"
"""The environment variable in which Ray finds the parent of its temporary folder"""
PREFIX, RAY = "ray-", "ray"
SOCKET_BYTES = 107
"""Maximum length of the path of a Unix socket"""
LONGEST_BELOW = f"{PREFIX}12345678/{RAY}/session_2000-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Path of the socket with the longest one, below ROOT"""
EXPOSED = (
    "cluster.address: other users of %s can change the files and sockets of its Ray: %s. Start it again in a folder of "
    "your own: mkdir -m 700 /tmp/ray-NAME and export RAY_TMPDIR=/tmp/ray-NAME, on every host"
)
LOGS = "logs/ray"
"""Folder within the run's in which the logs of a Ray that failed are kept"""


def root_of(environment: Mapping[str, str]) -> Path:
    """Return the folder in which that of a run is created. TMPDIR is not used where it is unsuitable. Raise ValueError
    where RAY_TMPDIR, or /tmp, is too long for sockets, or other users can replace what is in it."""
    if not (path := environment.get(ROOT_VARIABLE)):
        path = environment.get("TMPDIR")
        path = path if path and not _unsuitable(Path(path)) else "/tmp"
    if refused := _unsuitable(Path(path)):
        raise ValueError(f"RAY_TMPDIR={path}: {refused}; set RAY_TMPDIR to a short path that only you may write to")
    return Path(path).resolve()


def _unsuitable(folder: Path) -> str:
    longest = SOCKET_BYTES - len(LONGEST_BELOW) - 1
    if len(os.fsencode(folder.resolve())) > longest:
        return f"longer than the {longest} bytes that the paths of Ray's sockets leave"
    try:
        return exposed(folder)
    except OSError as error:
        return str(error.strerror)


def exposed(folder: Path) -> str:
    """Return how a user other than this one and root can replace a folder, or what is in it: through a link on the way
    to it, or a folder that they may write to, unless one above it keeps them out. "": in no way. Raise OSError if it
    does not exist."""
    stated, real = folder.absolute(), folder.resolve(strict=True)
    trusted = {0, os.getuid(), os.stat("/").st_uid}  # the owner of /: root, also where a namespace does not map it
    private = next((path for path in (real, *real.parents) if not path.stat().st_mode & 0o077), real)
    links = [path for path in (stated, *stated.parents) if path.is_symlink()]
    for path in (*links, private, *private.parents):
        about = path.lstat()
        if about.st_uid not in trusted:
            return f"{path} belongs to the user {about.st_uid}"
        if path not in links and about.st_mode & 0o022 and not about.st_mode & stat.S_ISVTX:
            return f"other users may write to {path} (mode {stat.S_IMODE(about.st_mode):04o})"
    return ""


@contextmanager
def ray_folder() -> Iterator[Path]:
    """Create the folder of a run; at the block's end it is removed, if it is still there. Raise ValueError as
    `root_of`, RayNotStarted if it cannot be created."""
    root = root_of(os.environ)
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        lock = own(folder / RAY, NodeProcess.of(os.getpid()))
    except (OSError, StorageFull) as error:
        from stalesync.process.failures import RayNotStarted

        raise RayNotStarted(None, error) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove(folder: Path, keep_logs_in: Path | None = None) -> None:
    """Remove the folder of a run whose Ray has ended, and those of runs all of whose processes were killed.
    ``keep_logs_in``: a run's folder, to which Ray's logs are copied before."""
    if keep_logs_in is not None:
        with suppress(OSError):  # no space: what is reported comes first
            (kept := keep_logs_in / LOGS).mkdir(mode=0o700, parents=True, exist_ok=True)
            for log in folder.glob(f"{RAY}/session_2*/logs/*"):
                if log.is_file() and not log.is_symlink():
                    shutil.copyfile(log, kept / log.name)
    shutil.rmtree(folder, ignore_errors=True)
    sweep_folders(lock.parent for lock in folder.parent.glob(f"{PREFIX}*/{RAY}{LOCK}"))

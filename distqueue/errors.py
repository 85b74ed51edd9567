"""Errors of a queue: its end, payload that is damaged or lost, and storage that is full."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

LOST = "lost:"
"""Samples whose payload is gone end with a reason that begins so"""
DAMAGED = "damaged"
"""… and continues so if a checksum differs"""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, no quota, or a limit on the size of files"""


class Damage(NamedTuple):
    """Samples of a column whose bytes differ from their checksum. `ids`: those that share a checksum; `column`: "" is
    the file's table of columns."""

    queue: str
    ids: tuple[str, ...]
    column: str
    path: str

    def __str__(self) -> str:
        queue = f"queue {self.queue!r}" if self.queue else "a queue without a name"
        samples = ", ".join(map(repr, self.ids[:3])) + (f" and {len(self.ids) - 3} others" if len(self.ids) > 3 else "")
        what = f"column {self.column!r}" if self.column else "the table of columns"
        noun = "sample" if len(self.ids) == 1 else "samples"
        return f"{queue}, {noun} {samples}: {what} in {self.path} is damaged: its checksum differs"


class LostSample(NamedTuple):
    """A sample whose payload is gone. `group`: "" without one; `reason`: how it ended, `lost:…`."""

    id: str
    group: str
    reason: str


class SamplesLost(ValueError):
    """Samples that were asked for by id have ended because their payload is damaged or gone. `ids`: all of them."""

    def __init__(self, ids: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.ids = tuple(ids)

    def __reduce__(self) -> "tuple[type[SamplesLost], tuple[tuple[str, ...], str]]":
        return SamplesLost, (self.ids, str(self))


class NoRoomForRows(LookupError):
    """A put to a granted file has to wait, as the queue holds too many samples; it may be repeated."""


class StorageFull(RuntimeError):
    """There is no space for a file of the queue; the message names the file, the bytes, and what to change."""


class PutTooLarge(ValueError):
    """A put has more bytes than a shard may ever hold; the message names the key to change."""


class QueueClosed(RuntimeError):
    """The queue was closed, or a process that held it has died for good."""


class JournalFull(QueueClosed, StorageFull):
    """The queue was closed, as there was no space for its journal."""


class QueueDrained(QueueClosed):
    """The queue is sealed and this task has received everything."""


@contextmanager
def naming_full_storage(path: str | Path, nbytes: int) -> Iterator[None]:
    """Convert the errors of a full disk into StorageFull. `nbytes`: that are asked for at `path`."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise StorageFull(_full(Path(path), nbytes, error)) from error


def _full(path: Path, nbytes: int, error: OSError) -> str:
    if error.errno == errno.EFBIG:
        return f"{path}: {nbytes:,} bytes exceed this process's limit on the size of files (ulimit -f)"
    where = path if path.is_dir() else path.parent
    while not where.is_dir():
        where = where.parent
    about = os.statvfs(where)
    asked = f"{nbytes:,} bytes were asked for, {about.f_bavail * about.f_frsize:,} are free"
    if path.is_relative_to("/dev/shm"):
        advice = "lower queue.max_bytes, set queue.spill, or enlarge it (docker run --shm-size)"
        return f"shared memory is full: {path}: {asked}; free space in /dev/shm, {advice}"
    advice = "choose another disk (run.dir, or queue.spill for what does not fit into memory)"
    return f"the disk is full: {path}: {asked}; free space there, or {advice}"

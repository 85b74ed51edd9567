"""A checkpoint: a queue as of one instant, in a folder from which a new queue can resume.

    FOLDER/journal           a journal (journal.py) with one snapshot
    FOLDER/segments/NUMBER   a copy of every segment that was live, synced by the shard that made it
    FOLDER/cut               the id of the call that wrote it

It is written to a sibling folder, synced, and renamed at the end: a folder of this name is complete. The instant is
that of the snapshot; segments are immutable, so they may be copied later, as long as they are pinned."""

import ctypes
import logging
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from distqueue.core.recovery import outline
from distqueue.durable import make_folder, sync
from distqueue.errors import naming_full_storage
from distqueue.journal import Journal, read_folder

log = logging.getLogger(__name__)

SEGMENTS = "segments"
CUT = "cut"


def segment_path(number: int) -> str:
    """Path of a segment, relative to the checkpoint's folder."""
    return f"{SEGMENTS}/{number}"


def release_freed() -> None:
    """Return the memory that a snapshot has used and freed to the system. glibc keeps it, in pieces between what lives
    on, so that a queue would grow with every checkpoint."""
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


class Unfinished:
    """A checkpoint being written in the block, by one process at a time; of one that is not finished there, nothing is
    left. `cut`: id of the call that writes it."""

    def __init__(self, folder: str, cut: str) -> None:
        """ValueError: the folder exists, or another call is writing it."""
        self.folder, self.cut = Path(folder), cut
        if self.folder.exists():
            raise ValueError(f"checkpoint={folder!r}: it exists already; expected a new folder")
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self._index = Journal(self.partial, bytes)  # its lock excludes other writers
        shutil.rmtree(self.partial / SEGMENTS, ignore_errors=True)  # of a call that did not finish
        make_folder(self.partial / SEGMENTS)

    def finish(self, snapshot: bytes, numbers: Iterable[int]) -> None:
        """Complete the checkpoint once its segments are copied; returns when it is in its place, on disk."""
        missing = [number for number in numbers if not (self.partial / segment_path(number)).is_file()]
        if missing:
            raise ValueError(f"checkpoint={str(self.folder)!r}: expected a folder that every node of the queue sees")
        self._index.begin(snapshot)
        with naming_full_storage(self.partial / CUT, len(self.cut)):
            (self.partial / CUT).write_text(self.cut)
        for name in (CUT, SEGMENTS, "."):
            sync(self.partial / name)
        os.rename(self.partial, self.folder)
        sync(self.folder.parent)

    def __enter__(self) -> "Unfinished":
        return self

    def __exit__(self, *_: object) -> None:
        self._index.close()
        shutil.rmtree(self.partial, ignore_errors=True)  # it is renamed if it is finished


def is_whole(folder: str, cut: str) -> bool:
    """Whether this call has written the checkpoint already: it is retried, as its answer was lost."""
    path = Path(folder) / CUT
    return path.is_file() and path.read_text() == cut


def check(folder: str, tasks: tuple[str, ...]) -> None:
    """ValueError: a queue with these tasks cannot resume this checkpoint, or files of it are missing."""
    stored, paths = outline(load(folder))
    if stored != tasks:
        raise ValueError(f"tasks={tasks}: checkpoint {folder} has tasks={stored}")
    missing = [path for path in paths if not (Path(folder) / path).is_file()]
    if missing:
        raise ValueError(f"checkpoint={folder!r}: {len(missing)} of its files are missing, such as {missing[0]}")


def load(folder: str) -> bytes:
    """Read the snapshot, whose segments are at `segment_path`. ValueError: not a checkpoint, or it is damaged."""
    stored = read_folder(folder) if (Path(folder) / CUT).is_file() else None
    if stored is None or stored.snapshot is None:
        raise ValueError(f"checkpoint={folder!r}: expected a folder written by DistQueue.checkpoint")
    for line in stored.damage:
        log.error("%s", line)
    return stored.snapshot

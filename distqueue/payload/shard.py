"""A shard: the segments of one node, as files in a folder of its shared memory or, with a journal, of its disk.

Writers and readers of the node map the files themselves and never ask the shard. What is left for it: samples that a
reader elsewhere asks for, gathered once, here; puts from elsewhere; files that come, go, and move to disk. It keeps no
state that is not in its folder, so one that was killed goes on where it was.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distqueue.durable import make_folder, sync
from distqueue.messages import Part, Place
from distqueue.payload.buffers import WarmBuffers
from distqueue.payload.gather import gather_columns
from distqueue.payload.mapped import Mapped
from distqueue.payload.segment_file import SegmentFile, SegmentGone, lay_out
from distqueue.payload.wire import Frames, from_wire, to_wire

log = logging.getLogger(__name__)

PREFIX = "distqueue-"
LOCK = "lock"
ABANDONED_S = 60.0
"""A folder in shared memory that nobody holds now and after this long is removed; to start a shard anew takes less"""


def memory_folder(queue: str, name: str) -> Path:
    """Where a shard of a queue without a journal keeps its files."""
    memory = Path("/dev/shm")
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"{PREFIX}{queue}" / name


class Shard:
    """Runs inside Ray on its node; calls come from the queue's actor and from clients of other nodes."""

    def __init__(self, folder: str, spill: str | None) -> None:
        self.folder, self.spill_folder = Path(folder), None if spill is None else Path(spill)
        for path in (self.folder, self.spill_folder):
            if path is not None:
                make_folder(path)
        self._lock = os.open(self.folder.parent / f"{self.folder.name}.{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._mapped = Mapped()
        self._buffers = WarmBuffers()
        if self.folder.parent.name.startswith(PREFIX) and (left := self._abandoned()):
            broom = threading.Timer(ABANDONED_S, self._sweep, (left,))
            broom.daemon = True
            broom.start()

    def space(self) -> int:
        """Bytes free where the files lie."""
        free = os.statvfs(self.folder)
        return free.f_bavail * free.f_frsize

    def read(self, places: Sequence[Place], parts: Sequence[Part]) -> list[tuple[bytes, Frames]]:
        """The columns of each part, gathered. SegmentGone where a segment does not lie there any more."""
        sources = [self._mapped.columns(place) for place in places]
        columns = [gather_columns([part], sources, self._buffers) for part in parts]
        self._mapped.check(places)
        return [to_wire(found) for found in columns]

    def write(self, number: int, path: str, size: int, durable: bool, header: bytes, *frames: np.ndarray) -> None:
        """A put from another node, into the file that was reserved for it."""
        stretches = from_wire(header, list(frames))
        file = self._mapped.writable(path, size)
        file.write(number, lay_out(stretches))
        if durable:
            file.sync()

    def export(self, number: int, path: str) -> np.ndarray:
        """A whole segment, for a shard that takes it over."""
        file = SegmentFile(path)
        file.check(number)
        return np.array(file.bytes)

    def take_over(self, path: str, contents: np.ndarray, durable: bool) -> None:
        """A segment that another shard exported, as a file here."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        file = SegmentFile(path, len(contents))
        file.copy_from(contents)
        if durable:
            file.sync()

    def spill(self, number: int, path: str, target: str) -> None:
        """Copies a segment to disk; its file in memory is left to whoever asked."""
        self.take_over(target, self.export(number, path), durable=False)

    def copy(self, segments: Sequence[tuple[int, str, str]]) -> list[int]:
        """Copies segments (number, path, target), on disk by the end. Returns the numbers of those not found there."""
        gone = [number for number, path, target in segments if not _copy(number, path, target)]
        for target in [target for number, _, target in segments if number not in gone]:
            sync(target)
        for folder in {os.path.dirname(target) for _, _, target in segments}:
            sync(folder)
        return gone

    def holds(self, number: int, path: str) -> bool:
        """Whether the segment lies there."""
        try:
            return SegmentFile(path).holds(number)
        except SegmentGone:
            return False

    def discard(self, paths: Sequence[str]) -> None:
        for path in paths:
            Path(path).unlink(missing_ok=True)

    def missing(self, paths: Sequence[str]) -> list[str]:
        """Those of `paths` at which there is no file."""
        return [path for path in paths if not os.path.exists(path)]

    def keep_only(self, paths: Sequence[str], shards: Sequence[str]) -> None:
        """Unlinks what no segment lies in: here, and in what folders lie beside this one but those of `shards`."""
        wanted = set(paths)
        strangers = [folder for folder in self.folder.parent.iterdir() if folder.is_dir() and folder.name not in shards]
        for folder in (self.folder, *strangers):
            for file in folder.iterdir():
                if str(file) not in wanted:
                    file.unlink(missing_ok=True)

    def end(self) -> None:
        """Removes the shard's folders."""
        for folder in (self.folder, self.spill_folder):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        (self.folder.parent / f"{self.folder.name}.{LOCK}").unlink(missing_ok=True)
        try:
            self.folder.parent.rmdir()
        except OSError:  # another shard's is there
            pass

    def _abandoned(self) -> set[Path]:
        """Folders that nobody holds: of queues whose every process was killed, or is being started anew."""
        folders = set(self.folder.parent.parent.glob(f"{PREFIX}*")) - {self.folder.parent}
        return {folder for folder in folders if all(_is_free(lock) for lock in folder.glob(f"*.{LOCK}"))}

    def _sweep(self, left: set[Path]) -> None:
        for folder in left & self._abandoned():
            log.warning("removing %s: the queue that left it is dead", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _copy(number: int, path: str, target: str) -> bool:
    """Whether the segment was there all the while."""
    try:
        file = SegmentFile(path)
        file.check(number)
        Path(target).write_bytes(file.bytes.data)
        file.check(number)
        return True
    except SegmentGone:
        return False


def _is_free(lock: Path) -> bool:
    try:
        handle = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(handle)

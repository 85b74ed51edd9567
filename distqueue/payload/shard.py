"""A shard: the segments of one node, as files in a folder of its shared memory or, with a journal, of its disk.

Writers and readers of the node map the files themselves, without the shard. It serves those of other nodes (samples
are gathered once, here) and creates, removes, moves and spills files. All its state is in its folder, so a restarted
shard resumes.
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
from distqueue.messages import File, Part, Place
from distqueue.payload.buffers import BufferPool
from distqueue.payload.gather import gather
from distqueue.payload.mapped import Mapped
from distqueue.payload.segment_file import SegmentFile, SegmentGone, lay_out
from distqueue.payload.wire import Frames, from_wire, to_wire

log = logging.getLogger(__name__)

PREFIX = "distqueue-"
LOCK = "lock"
ABANDONED_S = 60.0
"""A folder in shared memory that no process holds now and after this long is removed; restarting a shard takes less"""


def memory_folder(queue: str, name: str) -> Path:
    """The folder of a shard of a queue without a journal."""
    memory = Path("/dev/shm")
    return (memory if memory.is_dir() else Path(tempfile.gettempdir())) / f"{PREFIX}{queue}" / name


class Shard:
    """Runs inside Ray on its node; called by the queue's actor and by clients of other nodes."""

    def __init__(self, folder: str, spill: str | None) -> None:
        self.folder, self.spill_folder = Path(folder), None if spill is None else Path(spill)
        for path in (self.folder, self.spill_folder):
            if path is not None:
                make_folder(path)
        self._lock = os.open(self.folder.parent / f"{self.folder.name}.{LOCK}", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        self._mapped = Mapped()
        self._buffers = BufferPool()
        if self.folder.parent.name.startswith(PREFIX) and (abandoned := self._abandoned()):
            timer = threading.Timer(ABANDONED_S, self._remove_abandoned, (abandoned,))
            timer.daemon = True
            timer.start()

    def free_bytes(self) -> int:
        """Free bytes of the file system that holds the files."""
        free = os.statvfs(self.folder)
        return free.f_bavail * free.f_frsize

    def read(self, places: Sequence[Place], parts: Sequence[Part]) -> list[tuple[bytes, Frames]]:
        """Gather the columns of each part. SegmentGone: a segment has moved or ended."""
        sources = [self._mapped.columns(place) for place in places]
        gathered = [gather([part], sources, self._buffers) for part in parts]
        self._mapped.check(places)
        return [to_wire(columns) for columns in gathered]

    def write(self, file: File, header: bytes, *frames: np.ndarray) -> None:
        """Write a put from another node to the file reserved for it. `frames`: one argument each, so that Ray passes
        every buffer on its own, without copying it into a pickle."""
        mapped = self._mapped.writable(file.path, file.size)
        mapped.write(file.number, lay_out(from_wire(header, list(frames))))
        if file.durable:
            mapped.sync()

    def export_segment(self, number: int, path: str) -> np.ndarray:
        """Read a whole segment, for another shard to import."""
        file = SegmentFile(path)
        file.check(number)
        return np.array(file.bytes)

    def import_segment(self, path: str, contents: np.ndarray, durable: bool) -> None:
        """Write a segment that another shard exported."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        file = SegmentFile(path, len(contents))
        file.copy_from(contents)
        if durable:
            file.sync()

    def spill(self, number: int, path: str, target: str) -> None:
        """Copy a segment to disk; the caller discards its file in memory."""
        self.import_segment(target, self.export_segment(number, path), durable=False)

    def copy(self, segments: Sequence[tuple[int, str, str]]) -> list[int]:
        """Copy segments (number, path, target) durably. Returns the numbers of those not found."""
        missing = [number for number, path, target in segments if not _copy(number, path, target)]
        for target in [target for number, _, target in segments if number not in missing]:
            sync(target)
        for folder in {os.path.dirname(target) for _, _, target in segments}:
            sync(folder)
        return missing

    def holds(self, number: int, path: str) -> bool:
        """Whether the file holds the segment."""
        try:
            return SegmentFile(path).holds(number)
        except SegmentGone:
            return False

    def discard(self, paths: Sequence[str]) -> None:
        """Unlink files."""
        for path in paths:
            Path(path).unlink(missing_ok=True)

    def missing(self, paths: Sequence[str]) -> list[str]:
        """The `paths` at which no file exists."""
        return [path for path in paths if not os.path.exists(path)]

    def keep_only(self, paths: Sequence[str], shards: Sequence[str]) -> None:
        """Unlink all files except `paths`: in this folder, and in sibling folders of shards that no longer exist."""
        kept = set(paths)
        orphans = [folder for folder in self.folder.parent.iterdir() if folder.is_dir() and folder.name not in shards]
        for folder in (self.folder, *orphans):
            for file in folder.iterdir():
                if str(file) not in kept:
                    file.unlink(missing_ok=True)

    def end(self) -> None:
        """Remove the shard's folders."""
        for folder in (self.folder, self.spill_folder):
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)
        (self.folder.parent / f"{self.folder.name}.{LOCK}").unlink(missing_ok=True)
        try:
            self.folder.parent.rmdir()
        except OSError:  # another shard's folder is in it
            pass

    def _abandoned(self) -> set[Path]:
        """Find folders that no process holds: their queues' processes were all killed, or are restarting."""
        folders = set(self.folder.parent.parent.glob(f"{PREFIX}*")) - {self.folder.parent}
        return {folder for folder in folders if all(_is_free(lock) for lock in folder.glob(f"*.{LOCK}"))}

    def _remove_abandoned(self, candidates: set[Path]) -> None:
        for folder in candidates & self._abandoned():
            log.warning("removing %s: abandoned by a queue whose processes are dead", folder)
            shutil.rmtree(folder, ignore_errors=True)


def _copy(number: int, path: str, target: str) -> bool:
    """Copy a segment's file. Returns whether it held the segment throughout."""
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

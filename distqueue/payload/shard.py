"""A shard: the segments of one node, as files in a folder of its shared memory or, with a journal, of its disk.

Writers and readers of the node map the files themselves, without the shard. It serves those of other nodes (samples
are gathered once, here) and creates, removes, moves and spills files. All its state is in its folder, so a restarted
shard resumes."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from distqueue.durable import make_folder, sync
from distqueue.errors import StorageFull, naming_full_storage
from distqueue.messages import DeliveryPart, File, SegmentPlace
from distqueue.payload.buffers import BufferPool
from distqueue.payload.gather import SourcesDamaged, gather
from distqueue.payload.segment_file import DamagedRows, Mapped, SegmentDamaged, SegmentFile, SegmentGone, lay_out
from distqueue.payload.sweep import LOCK_BYTES, PREFIX, memory, own, remove, sweep
from distqueue.payload.wire import Frames, from_wire, to_wire


def folder_in(root: Path, queue: str, name: str) -> Path:
    """The folder of a shard in shared memory or for spilled segments."""
    return root / f"{PREFIX}{queue}" / name


class Shard:
    """Run inside Ray on its node; called by the queue's actor and by clients of other nodes."""

    def __init__(self, folder: str, spill: str | None) -> None:
        self.folder, self.spill_folder = Path(folder), None if spill is None else Path(spill)
        self._folders = [path for path in (self.folder, self.spill_folder) if path is not None]
        self._full: StorageFull | None = None
        """Why it has no folders"""
        self._locks: list[int] = []
        try:
            self._own_folders()
        except StorageFull as error:  # not raised here: Ray would report the end of the actor, not its reason
            self._full = error
        self._mapped = Mapped()
        self._buffers = BufferPool()
        for root in {memory(), *(path.parent.parent for path in self._folders if path.parent.name.startswith(PREFIX))}:
            sweep(root, self.folder.parent)

    def _own_folders(self) -> None:
        with naming_full_storage(self.folder, LOCK_BYTES):
            for path in self._folders:
                make_folder(path.parent)
        for path in self._folders:
            self._locks.append(own(path))
        for path in self._folders:
            sync(path.parent)

    def free_bytes(self) -> int:
        """Free bytes of the file system that holds the files. StorageFull: there was no space for its folders."""
        if self._full is not None:
            raise self._full
        free = os.statvfs(self.folder)
        return free.f_bavail * free.f_frsize

    def read(self, places: Sequence[SegmentPlace], parts: Sequence[DeliveryPart]) -> list[tuple[bytes, Frames]]:
        """Gather the columns of each part. SegmentGone: a segment has moved or ended. SegmentDamaged: a checksum
        differs."""
        sources = [self._mapped.columns(place) for place in places]
        try:
            gathered = [gather([part], sources, self._buffers) for part in parts]
        except SourcesDamaged as error:
            self._mapped.check(places)  # overwritten, not damaged
            raise SegmentDamaged([places[source].number for source in error.sources]) from None
        self._mapped.check(places)
        return [to_wire(columns) for columns in gathered]

    def write(self, file: File, header: bytes, *frames: np.ndarray) -> None:
        """Write a put from another node to the file reserved for it. `frames`: one argument each, so that Ray passes
        every buffer on its own, without copying it into a pickle. DamagedInTransit: it is to be sent again."""
        self._mapped.write(file, lay_out(from_wire(header, list(frames))))

    def export_segment(self, number: int, path: str) -> np.ndarray:
        """Read a whole segment, for another shard to import."""
        file = SegmentFile(path)
        file.check(number)
        return np.array(file.bytes)

    def import_segment(self, path: str, contents: np.ndarray, durable: bool) -> None:
        """Write a segment that another shard exported."""
        target = Path(path)
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file = SegmentFile(path, len(contents))
        file.copy_from(contents)
        if durable:
            file.sync()

    def spill(self, number: int, path: str, target: str) -> None:
        """Copy a segment to disk; the caller discards its file in memory."""
        self.import_segment(target, self.export_segment(number, path), durable=False)

    def copy(self, segments: Sequence[tuple[int, str, str]]) -> list[int]:
        """Copy segments (number, path, target) durably. Return the numbers of those not found."""
        missing = [number for number, path, target in segments if not _copy(number, path, target)]
        for target in [target for number, _, target in segments if number not in missing]:
            sync(target)
        for folder in {os.path.dirname(target) for _, _, target in segments}:
            sync(folder)
        return missing

    def holds(self, number: int, path: str) -> bool:
        try:
            return SegmentFile(path).holds(number)
        except SegmentGone:
            return False

    def damaged(self, number: int, path: str) -> list[DamagedRows] | None:
        """Verify a segment: the rows that are damaged. None: the file does not hold it."""
        try:
            return SegmentFile(path).damaged(number)
        except SegmentGone:
            return None

    def discard(self, paths: Sequence[str]) -> None:
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
        for folder in self._folders:
            remove(folder)


def _copy(number: int, path: str, target: str) -> bool:
    """Copy a segment's file. Return whether it held the segment throughout."""
    try:
        file = SegmentFile(path)
        file.check(number)
        handle = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        with naming_full_storage(target, file.size), open(handle, "wb") as copy:
            copy.write(file.bytes.data)
        file.check(number)
        return True
    except SegmentGone:
        return False

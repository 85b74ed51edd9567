"""Segment files mapped into a process: a shard, or a client that reads and writes the files of its own node."""

import threading
from collections.abc import Iterable

from distqueue.messages import File, SegmentPlace
from distqueue.payload.segment_file import Contents, SegmentFile, Stretch

MAX_MAPPED = 256
"""Files a process keeps mapped"""


class Mapped:
    """The MAX_MAPPED most recently used segment files of a process. Thread-safe."""

    def __init__(self) -> None:
        self._files: dict[str, SegmentFile] = {}
        self._lock = threading.Lock()

    def columns(self, place: SegmentPlace) -> dict[str, Stretch]:
        """Views of a segment's columns. SegmentGone: the file holds another segment now, or does not exist."""
        return self._file(place).columns(place.number)

    def check(self, places: Iterable[SegmentPlace]) -> None:
        """SegmentGone: one of the segments was overwritten since it was mapped."""
        for place in places:
            self._file(place).check(place.number)

    def write(self, file: File, contents: Contents) -> None:
        """Write a put to its file, which is created if it does not exist; if that is durable, until it is on disk."""
        mapped = self._files.get(file.path)
        if mapped is None or not mapped.writable or mapped.size < file.size:
            mapped = SegmentFile(file.path, file.size)
        self._keep(mapped).write(file.number, contents)
        if file.durable:
            mapped.sync()

    def _file(self, place: SegmentPlace) -> SegmentFile:
        file = self._files.get(place.path)
        if file is None or not file.holds(place.number):  # not mapped yet, or mapped when it was smaller
            file = SegmentFile(place.path)
        return self._keep(file)

    def _keep(self, file: SegmentFile) -> SegmentFile:
        with self._lock:
            self._files.pop(file.path, None)
            self._files[file.path] = file
            while len(self._files) > MAX_MAPPED:
                del self._files[next(iter(self._files))]
        return file

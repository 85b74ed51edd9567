"""A checkpoint: a queue as it was at one instant, in a folder of its own, for a queue that goes on from there.

    FOLDER/index.db          a journal's index (journal.py) that holds one snapshot
    FOLDER/segments/NUMBER   a copy of every segment that was live, synced by the shard that made it
    FOLDER/cut               which call wrote it

It is written beside its place, synced, and renamed at the end: a folder of this name is whole. The instant is that of
the snapshot; segments never change, so they may be copied later, as long as they are pinned.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from distqueue.core.history import outline
from distqueue.durable import make_folder, sync
from distqueue.journal import INDEX, Journal, read_folder

SEGMENTS = "segments"
CUT = "cut"


def segment_path(number: int) -> str:
    """In the folder of the checkpoint, wherever that is brought."""
    return f"{SEGMENTS}/{number}"


class Unfinished:
    """A checkpoint that is being written, by one process at a time. `cut`: the call that writes it."""

    def __init__(self, folder: str, cut: str) -> None:
        """ValueError: it is there already, or another call writes it."""
        self.folder, self.cut = Path(folder), cut
        if self.folder.exists():
            raise ValueError(f"checkpoint={folder!r}: it is there already; expected a new folder")
        self.partial = self.folder.with_name(self.folder.name + ".partial")
        self._index: Journal | None = Journal(self.partial, bytes)  # and nobody else has it
        shutil.rmtree(self.partial / SEGMENTS, ignore_errors=True)  # of a call that did not come to its end
        make_folder(self.partial / SEGMENTS)

    def finish(self, snapshot: bytes, numbers: Iterable[int]) -> None:
        """The segments are copied; returns when the checkpoint is in its place, and that on disk."""
        missing = [number for number in numbers if not (self.partial / segment_path(number)).is_file()]
        if missing:
            raise ValueError(f"checkpoint={str(self.folder)!r}: expected a folder that every node of the queue sees")
        assert self._index is not None
        self._index.begin(snapshot)
        self._close()
        with closing(sqlite3.connect(self.partial / INDEX)) as store:
            store.execute("pragma journal_mode=delete")  # one plain file, which needs no other to be read
        (self.partial / CUT).write_text(self.cut)
        for name in (CUT, SEGMENTS, "."):
            sync(self.partial / name)
        os.rename(self.partial, self.folder)
        sync(self.folder.parent)

    def give_up(self) -> None:
        self._close()
        shutil.rmtree(self.partial, ignore_errors=True)

    def _close(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None


def is_whole(folder: str, cut: str) -> bool:
    """Whether this very call has written the checkpoint: its answer was not heard, and it is asked again."""
    path = Path(folder) / CUT
    return path.is_file() and path.read_text() == cut


def check(folder: str, tasks: tuple[str, ...], group_size: int | None) -> None:
    """ValueError: no queue of these can go on from what is there."""
    *found, paths = outline(load(folder))
    for key, has, asked in zip(("tasks", "group_size"), found, (tasks, group_size), strict=True):
        if has != asked:
            raise ValueError(f"{key}={asked}: checkpoint {folder} has {key}={has}")
    missing = [path for path in paths if not (Path(folder) / path).is_file()]
    if missing:
        raise ValueError(f"checkpoint={folder!r}: {len(missing)} of its files are not there, such as {missing[0]}")


def load(folder: str) -> bytes:
    """The snapshot, whose segments lie at `segment_path`. ValueError: there is none."""
    snapshot = read_folder(folder)[0] if (Path(folder) / CUT).is_file() else None
    if snapshot is None:
        raise ValueError(f"checkpoint={folder!r}: expected a folder that DistQueue.checkpoint has written")
    return snapshot

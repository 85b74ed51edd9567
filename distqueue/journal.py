"""The journal of a queue: every change of state, in order, on disk before it is acknowledged. A file of records.

    FOLDER/journal   | snapshot | snapshot again | event | event | the same events again | event | …
    a record         | marker | number | kind | bytes | checksum of the body | checksum of these | body |

A snapshot is the state before the events that follow it; once they outgrow it, a new file with a new snapshot replaces
the old one. Concurrent changes are written together: while some are, the next ones are collected (group commit).
Payload is not in the journal; segments are files beside it, synced before the put that names them is recorded.

Every record is written twice, because a damaged one would otherwise be lost, and with it samples nobody could name: a
put's record is all that is known of them. Records are numbered without gaps, so that a missing one is noticed. A reader
finds the next record behind damage by its marker. What a crash cut off at the end was never acknowledged.

Invariants (tests/distqueue/test_journal.py): an acknowledged record that is intact in one copy is read; a record that
is damaged in both is reported by number; damage in either is reported."""

import asyncio
import fcntl
import logging
import mmap
import os
import struct
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_64_intdigest as checksum

from distqueue.durable import make_folder, sync
from distqueue.errors import naming_full_storage

log = logging.getLogger(__name__)

MIN_COMPACTED_BYTES = 16 << 20
"""Bytes of events below which the journal is not compacted into a new snapshot"""
INDEX = "journal"
"""Name of the file in the folder of a journal or checkpoint"""
LOCK = "lock"

OLD_INDEX = "index.db"
"""Name of the file that versions before checksums wrote, with SQLite"""
SNAPSHOT = "snapshot"
HEAD = struct.Struct("<8sQ8sQQQ")
MARKER = b"\xd1queue\x02\n"


class Record(NamedTuple):
    """`number`: counts records from the queue's first snapshot; `kind`: `snapshot`, or an event's."""

    number: int
    kind: str
    body: bytes

    def to_bytes(self) -> bytes:
        kind = self.kind.encode()
        assert len(kind) <= 8, f"kind {self.kind!r}: expected at most 8 bytes"
        head = HEAD.pack(MARKER, self.number, kind, len(self.body), checksum(self.body), 0)[:-8]
        return head + checksum(head).to_bytes(8, "little") + self.body


@dataclass
class JournalContents:
    snapshot: bytes | None = None
    """None: there is no journal"""
    events: list[tuple[str, bytes]] = field(default_factory=list)
    """(kind, body) of the events since, in order"""
    last: int = 0
    """Number of the last record"""
    damage: list[str] = field(default_factory=list)
    """A line for each part of the file that is damaged; their records may have been read from their other copies"""
    missing: list[int] = field(default_factory=list)
    """Numbers of records that are damaged in both copies"""


class Journal:
    """One process writes a journal at a time; ValueError names the folder where another has it open."""

    def __init__(self, folder: str | Path, snapshot: Callable[[], bytes]) -> None:
        """`snapshot` serializes the current state."""
        self.folder, self._snapshot = make_folder(folder), snapshot
        self.path = self.folder / INDEX
        _refuse_old(self.folder)
        self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(f"journal {self.folder}: another queue has it open") from None
        self._file: int | None = None
        self._end = 0
        """Bytes of the file that are on disk"""
        self._number = 0
        """Number of the last record"""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[Record] = []
        self._writing: asyncio.Task[None] | None = None
        self._event_bytes = self._snapshot_bytes = 0

    def read(self) -> JournalContents:
        """Return what the journal holds. ValueError: its snapshot is damaged."""
        contents = read_folder(self.folder)
        self._number = max(self._number, contents.last)
        return contents

    def begin(self, snapshot: bytes) -> None:
        """Write a new file with the state of this moment; events follow it."""
        self._replace(Record(self._number, SNAPSHOT, snapshot))
        self._event_bytes, self._snapshot_bytes = 0, len(snapshot)

    def append(self, kind: str, body: bytes) -> None:
        """Add an event to those written next; `flushed` waits until it is on disk."""
        self._number += 1
        self._pending.append(Record(self._number, kind, body))

    async def flushed(self) -> None:
        """Wait until every event appended before this call is on disk; raise the error that prevented it. Events that
        could not be written are retried with the next ones: a journal has no gaps."""
        if self._writing is not None and not self._writing.done():
            await asyncio.shield(self._writing)  # this write may have begun before the last append
        if self._pending and (self._writing is None or self._writing.done()):
            self._writing = asyncio.ensure_future(self._write())
        if self._writing is not None:
            await asyncio.shield(self._writing)

    def close(self) -> None:
        """Release the journal. Events that were not flushed were never acknowledged, and are not written."""
        self._writer.shutdown()
        if self._file is not None:
            os.close(self._file)
        os.close(self._lock)

    async def _write(self) -> None:
        batch, self._pending = self._pending, []
        self._event_bytes += sum(len(record.body) for record in batch)
        run = asyncio.get_running_loop().run_in_executor
        try:
            if self._event_bytes > max(MIN_COMPACTED_BYTES, 2 * self._snapshot_bytes):
                snapshot = self._snapshot()  # the state after the batch
                await run(self._writer, self._replace, Record(batch[-1].number, SNAPSHOT, snapshot))
                self._event_bytes, self._snapshot_bytes = 0, len(snapshot)
            else:
                await run(self._writer, self._commit, batch)
        except BaseException:
            self._pending = batch + self._pending
            raise

    def _commit(self, batch: Sequence[Record]) -> None:
        assert self._file is not None, "a journal begins with a snapshot"
        data = b"".join(record.to_bytes() for record in batch)
        try:
            _write_all(self.path, self._file, 2 * data, self._end)
        except BaseException:
            os.ftruncate(self._file, self._end)  # the next write must not follow half a record
            raise
        self._end += 2 * len(data)

    def _replace(self, snapshot: Record) -> None:
        new = self.folder / f"{INDEX}.new"
        handle = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        data = snapshot.to_bytes()
        try:
            _write_all(new, handle, 2 * data, 0)
            os.rename(new, self.path)
        except BaseException:
            os.close(handle)
            new.unlink(missing_ok=True)
            raise
        sync(self.folder)
        if self._file is not None:
            os.close(self._file)
        self._file, self._end = handle, 2 * len(data)


def is_journal(folder: str | Path) -> bool:
    """Whether a folder is that of a journal or checkpoint, of this version or an earlier one."""
    return any((Path(folder) / name).is_file() for name in (INDEX, LOCK, OLD_INDEX))


def read_folder(folder: str | Path) -> JournalContents:
    """Read a journal that may be open elsewhere; no snapshot: there is none. ValueError: its snapshot is damaged, or an
    earlier version wrote it."""
    path = Path(folder).absolute() / INDEX
    _refuse_old(path.parent)
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    except FileNotFoundError:
        return JournalContents()
    except ValueError:  # an empty file
        raise ValueError(f"journal {path}: it is empty; expected a snapshot") from None
    with data:
        return _contents(path, data)


def _contents(path: Path, data: mmap.mmap) -> JournalContents:
    contents = JournalContents()
    records = _scan(path, data, contents)
    first = next((number for number, record in sorted(records.items()) if record.kind == SNAPSHOT), None)
    if first is None:
        raise ValueError(f"journal {path}: its snapshot is damaged in both copies; nothing can be recovered from it")
    contents.snapshot = records[first].body
    for number in range(first + 1, contents.last + 1):
        if number in records:
            contents.events.append(records[number][1:])
        else:
            contents.missing.append(number)
    if contents.missing:
        numbers = ", ".join(map(str, contents.missing[:5])) + (", …" if len(contents.missing) > 5 else "")
        contents.damage.append(f"journal {path}: records {numbers} are damaged in both copies: their changes are lost")
    return contents


def _scan(path: Path, data: mmap.mmap, contents: JournalContents) -> dict[int, Record]:
    """Return the intact records by number; add what else there is to the damage of the contents."""

    def report(what: str) -> None:
        contents.damage.append(f"journal {path}: {what}")

    at, records = 0, dict[int, Record]()
    while at < len(data):
        head = _head(data, at)
        if head is None:
            start, at = at, data.find(MARKER, at + 1)
            while at >= 0 and _head(data, at) is None:
                at = data.find(MARKER, at + 1)
            if at < 0:
                report(_tail(start, len(data)))
                break
            report(f"the {at - start:,} bytes from byte {start:,} on are damaged")
            continue
        number, kind, nbytes, body_sum = head
        stop = at + HEAD.size + nbytes
        body = data[at + HEAD.size : stop]
        if len(body) < nbytes:
            report(_tail(at, len(data)))
            break
        contents.last = max(contents.last, number)
        if checksum(body) == body_sum:
            records.setdefault(number, Record(number, kind, body))
        else:
            report(f"record {number} ({kind}) at byte {at:,} is damaged: its checksum differs")
        at = stop
    return records


def _tail(start: int, end: int) -> str:
    which = f"the last {end - start:,} bytes, from byte {start:,} on"
    return f"{which}, are no whole record: cut off by a crash, or damaged"


def _head(data: mmap.mmap, at: int) -> tuple[int, str, int, int] | None:
    """Read (number, kind, bytes, checksum of the body) of the record at a position. None: it is damaged."""
    head = data[at : at + HEAD.size]
    if len(head) < HEAD.size:
        return None
    marker, number, kind, nbytes, body_sum, head_sum = HEAD.unpack(head)
    if marker != MARKER or head_sum != checksum(head[:-8]):
        return None
    return number, kind.rstrip(b"\0").decode(), nbytes, body_sum


def _write_all(path: Path, handle: int, data: bytes, at: int) -> None:
    """Write and sync. StorageFull: there is no space."""
    with naming_full_storage(path, len(data)):
        view = memoryview(data)
        while view:
            written = os.pwrite(handle, view, at)
            view, at = view[written:], at + written
        os.fsync(handle)


def _refuse_old(folder: Path) -> None:
    if (folder / OLD_INDEX).exists() and not (folder / INDEX).exists():
        raise ValueError(
            f"journal {folder}: its {OLD_INDEX} was written by a version without checksums, which this one does not "
            "read; finish that queue with the version that wrote it, or remove the folder"
        )

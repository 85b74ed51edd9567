"""The journal of a queue: every change of state, in order, on disk before it is acknowledged. Stored in SQLite.

    events    (seq, kind, body)   since the snapshot: the arguments of `QueueCore.record`
    snapshot  (body)              the state before these events; once they outgrow it, a new snapshot replaces both

Concurrent changes share a transaction: while one is written, the next ones are collected (group commit). Payload is not
in the journal; segments are files beside it, synced before the put that names them is recorded.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from distqueue.durable import make_folder, sync

MIN_COMPACTED_BYTES = 16 << 20
"""Bytes of events below which the journal is not compacted into a new snapshot"""

INDEX = "index.db"


class Journal:
    """One process writes a journal at a time; ValueError names the folder where another has it open."""

    def __init__(self, folder: str | Path, snapshot: Callable[[], bytes]) -> None:
        """`snapshot` serializes the current state."""
        self.folder, self._snapshot = make_folder(folder), snapshot
        self._lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise ValueError(f"journal {self.folder}: another queue has it open") from None
        self._store = sqlite3.connect(self.folder / INDEX, isolation_level=None, check_same_thread=False)
        self._store.execute("pragma journal_mode=wal")
        self._store.execute("pragma synchronous=full")
        with _transaction(self._store):
            self._store.execute("create table if not exists events (seq integer primary key, kind text, body blob)")
            self._store.execute("create table if not exists snapshot (body blob)")
        sync(self.folder)  # some builds of SQLite do not sync the folder of their files (SQLITE_DISABLE_DIRSYNC)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._pending: list[tuple[str, bytes]] = []
        self._writing: asyncio.Task[None] | None = None
        self._event_bytes = self._store.execute("select coalesce(sum(length(body)), 0) from events").fetchone()[0]
        self._snapshot_bytes = self._store.execute("select coalesce(sum(length(body)), 0) from snapshot").fetchone()[0]

    def read(self) -> tuple[bytes | None, Iterator[tuple[str, bytes]]]:
        """Return (snapshot or None, events since)."""
        return read(self._store)

    def begin(self, snapshot: bytes) -> None:
        """Write the first snapshot of a new journal."""
        self._replace(snapshot)

    def append(self, kind: str, body: bytes) -> None:
        """Add an event to the next transaction; `flushed` waits until it is on disk."""
        self._pending.append((kind, body))

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
        """Write the remaining events and release the journal."""
        self._writer.shutdown()
        self._commit(self._pending)
        self._store.close()
        os.close(self._lock)

    async def _write(self) -> None:
        batch, self._pending = self._pending, []
        self._event_bytes += sum(len(body) for _, body in batch)
        run = asyncio.get_running_loop().run_in_executor
        try:
            if self._event_bytes > max(MIN_COMPACTED_BYTES, 2 * self._snapshot_bytes):
                snapshot = self._snapshot()  # the state after the batch
                await run(self._writer, self._replace, snapshot)
                self._event_bytes, self._snapshot_bytes = 0, len(snapshot)
            else:
                await run(self._writer, self._commit, batch)
        except BaseException:
            self._pending = batch + self._pending
            raise

    def _commit(self, batch: list[tuple[str, bytes]]) -> None:
        with _transaction(self._store):
            self._store.executemany("insert into events (kind, body) values (?, ?)", batch)

    def _replace(self, body: bytes) -> None:
        with _transaction(self._store):
            self._store.execute("delete from events")
            self._store.execute("delete from snapshot")
            self._store.execute("insert into snapshot values (?)", (body,))


def read_folder(folder: str | Path) -> tuple[bytes | None, list[tuple[str, bytes]]]:
    """Read (snapshot, events) of a journal that may be open elsewhere; (None, []) if there is none."""
    index = Path(folder).absolute() / INDEX
    if not index.is_file():
        return None, []
    with closing(sqlite3.connect(f"{index.as_uri()}?mode=ro", uri=True, isolation_level=None)) as store:
        store.execute("begin")  # snapshot and events from one consistent state
        if not store.execute("select 1 from sqlite_schema where name = 'snapshot'").fetchone():
            return None, []
        snapshot, events = read(store)
        return snapshot, list(events)


def read(store: sqlite3.Connection) -> tuple[bytes | None, Iterator[tuple[str, bytes]]]:
    """Read (snapshot or None, events since) of an open store."""
    row = store.execute("select body from snapshot").fetchone()
    return (row[0] if row else None), store.execute("select kind, body from events order by seq")


@contextmanager
def _transaction(store: sqlite3.Connection) -> Iterator[None]:
    store.execute("begin immediate")
    try:
        yield
    except BaseException:
        if store.in_transaction:  # a full disk may have ended it already
            store.execute("rollback")
        raise
    store.execute("commit")

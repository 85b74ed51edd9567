"""The journal by itself: order, snapshots, and a disk that is full for a while."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from distqueue.journal import Journal, read_folder


def test_events_come_back_in_order_and_a_snapshot_takes_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distqueue.journal.MIN_COMPACTED_BYTES", 3000)
    told: list[bytes] = []
    journal = Journal(tmp_path, lambda: b"|".join(told))
    assert read_folder(tmp_path) == (None, [])

    async def tell() -> None:
        for n in range(100):
            told.append(b"%099d" % n)
            journal.append("n", told[-1])
            if n % 3 == 0:
                await journal.flushed()
        await journal.flushed()

    journal.begin(b"")
    asyncio.run(tell())
    snapshot, events = read_folder(tmp_path)
    assert snapshot and events and snapshot.split(b"|") + [body for _, body in events] == told
    with pytest.raises(ValueError, match="another queue has it open"):
        Journal(tmp_path, bytes)
    journal.close()


def test_what_could_not_be_written_is_written_with_the_next_and_leaves_no_hole(tmp_path: Path) -> None:
    journal = Journal(tmp_path, bytes)
    journal.begin(b"")

    async def main() -> None:
        journal._store.execute("pragma max_page_count=4")  # a full disk
        journal.append("large", bytes(1 << 16))
        for _ in range(2):
            with pytest.raises(sqlite3.OperationalError, match="full"):
                await journal.flushed()
        journal.append("small", b"")
        journal._store.execute("pragma max_page_count=1000000")
        await journal.flushed()

    asyncio.run(main())
    journal.close()
    assert [kind for kind, _ in read_folder(tmp_path)[1]] == ["large", "small"]

"""The journal by itself: order, snapshots, damage, and a disk that is full for a while."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distqueue import StorageFull
from distqueue.journal import HEAD, INDEX, Journal, Record, read_folder

EVENTS = [("put", b"samples" * 40), ("ack", b"a"), ("drop", b""), ("seal", b"{}")]
"""Written one after the other"""


def test_events_come_back_in_order_and_a_snapshot_takes_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("distqueue.journal.MIN_COMPACTED_BYTES", 3000)
    told: list[bytes] = []
    journal = Journal(tmp_path, lambda: b"|".join(told))
    assert read_folder(tmp_path).snapshot is None

    async def tell() -> None:
        for n in range(100):
            told.append(b"%099d" % n)
            journal.append("n", told[-1])
            if n % 3 == 0:
                await journal.flushed()
        await journal.flushed()

    journal.begin(b"")
    asyncio.run(tell())
    stored = read_folder(tmp_path)
    assert stored.snapshot and stored.events and not stored.damage and not stored.missing
    assert stored.snapshot.split(b"|") + [body for _, body in stored.events] == told
    with pytest.raises(ValueError, match="another queue has it open"):
        Journal(tmp_path, bytes)
    journal.close()


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_what_could_not_be_written_is_written_with_the_next_and_leaves_no_hole(tmp_path: Path) -> None:
    journal = Journal(tmp_path, bytes)
    journal.begin(b"")

    async def main() -> None:
        with files_of_at_most(1 << 14):  # as a full disk, half of it is written
            journal.append("large", bytes(1 << 16))
            for _ in range(2):
                with pytest.raises(StorageFull, match=f"^{tmp_path / INDEX}: .* bytes exceed"):
                    await journal.flushed()
        journal.append("small", b"")
        await journal.flushed()

    asyncio.run(main())
    journal.close()
    stored = read_folder(tmp_path)
    assert [kind for kind, _ in stored.events] == ["large", "small"] and not stored.damage


def test_a_snapshot_that_finds_no_space_leaves_the_journal_as_it_was(tmp_path: Path) -> None:
    journal = Journal(tmp_path, bytes)
    journal.begin(b"small")
    with files_of_at_most(1 << 14), pytest.raises(StorageFull):
        journal.begin(bytes(1 << 16))
    assert read_folder(tmp_path).snapshot == b"small" and sorted(os.listdir(tmp_path)) == [INDEX, "lock"]
    journal.close()


def write(folder: Path, events: Sequence[tuple[str, bytes]] = EVENTS) -> Path:
    journal = Journal(folder, bytes)
    journal.begin(b"the state before")

    async def tell() -> None:
        for kind, body in events:
            journal.append(kind, body)
            await journal.flushed()

    asyncio.run(tell())
    journal.close()
    return folder / INDEX


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("journal")).read_bytes()


@settings(max_examples=400)
@given(data=st.data())
def test_one_flip_anywhere_is_reported_and_costs_nothing(data: st.DataObject, whole: bytes, tmp_path_factory) -> None:
    at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
    folder = tmp_path_factory.mktemp("flipped")
    (folder / INDEX).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
    stored = read_folder(folder)
    assert (stored.snapshot, stored.events, stored.missing) == (b"the state before", EVENTS, [])
    (line,) = stored.damage
    assert line.startswith(f"journal {folder / INDEX}: ") and "damaged" in line


@settings(max_examples=400)
@given(flips=st.lists(st.integers(0, 1 << 30), min_size=2, max_size=12), seed=st.randoms(use_true_random=False))
def test_many_flips_never_pass_for_good_and_never_pass_in_silence(
    flips: list[int], seed, whole: bytes, tmp_path_factory
) -> None:
    damaged, folder = bytearray(whole), tmp_path_factory.mktemp("flipped")
    for flip in flips:
        damaged[flip % len(damaged)] ^= 1 << seed.randrange(8)
    (folder / INDEX).write_bytes(damaged)
    try:
        stored = read_folder(folder)
    except ValueError as error:
        assert "its snapshot is damaged in both copies" in str(error)
        return
    assert stored.snapshot == b"the state before"
    left = iter(EVENTS)
    assert all(event in left for event in stored.events), "in order, and each as it was written"
    assert stored.damage or damaged == whole
    if stored.events != EVENTS:
        lines = "".join(stored.damage)
        assert "their changes are lost" in lines or "cut off by a crash, or damaged" in lines


def test_a_record_that_is_damaged_twice_is_named_and_what_follows_is_read(tmp_path: Path) -> None:
    path = write(tmp_path)
    content = bytearray(path.read_bytes())
    first = content.index(EVENTS[0][1])
    for at in (first, content.index(EVENTS[0][1], first + 1)):
        content[at] ^= 4
    path.write_bytes(content)
    stored = read_folder(tmp_path)
    assert stored.events == EVENTS[1:] and stored.missing == [1]
    assert [line.removeprefix(f"journal {path}: ") for line in stored.damage] == [
        f"record 1 (put) at byte {first - HEAD.size:,} is damaged: its checksum differs",
        f"record 1 (put) at byte {first - HEAD.size + HEAD.size + 280:,} is damaged: its checksum differs",
        "records 1 are damaged in both copies: their changes are lost",
    ]


def test_what_a_crash_cut_off_is_left_out_at_any_byte(tmp_path: Path, whole: bytes) -> None:
    size = len(Record(4, *EVENTS[-1]).to_bytes())
    path = tmp_path / INDEX
    for cut in range(2 * size + 1):
        path.write_bytes(whole[: len(whole) - cut])
        stored = read_folder(tmp_path)
        assert stored.events == (EVENTS if cut <= size else EVENTS[:-1]) and not stored.missing
        assert len(stored.damage) == (cut not in (0, size, 2 * size)), "a line, if half a record is left"


def test_a_journal_of_an_earlier_version_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "index.db").touch()
    for read in (read_folder, lambda folder: Journal(folder, bytes)):
        with pytest.raises(ValueError, match=f"journal {tmp_path}: its index.db was written by a version without"):
            read(tmp_path)


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    write(tmp_path / "journal")
    assert tmp_path.joinpath("journal").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "journal").iterdir()} == {0o600}

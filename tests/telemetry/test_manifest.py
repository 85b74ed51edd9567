"""A manifest finds every change of every file, and names the file."""

import errno
import os
import tempfile
from pathlib import Path

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.telemetry.manifest import (
    FileRecord,
    FileWriter,
    find_damage,
    read_manifest,
    write_manifest,
    write_seals,
)
from fusion.telemetry.row_digests import Block, Seal


def folder_with(root, contents):
    for name, data in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


CONTENTS = {"controller.json": b"{}", "queue/segments/0": bytes(range(256)) * 20, "empty": b"", "trainer/a": b"abc"}


def test_a_folder_as_it_was_written_has_no_damage(tmp_path):
    folder = folder_with(tmp_path, CONTENTS)
    write_manifest(folder, {"trainer/a": FileRecord(3, xxhash.xxh3_128_hexdigest(b"abc"))})
    assert find_damage(folder) is None and read_manifest(folder).files.keys() == CONTENTS.keys()
    (folder / "later").write_text("what is added does not matter")
    assert find_damage(folder) is None and find_damage(folder, ["empty"]) is None


SEALS = {"metrics.jsonl": Seal((Block(9, 1, "a" * 32), Block(20, 2, "b" * 32)), before=Block(18, 2, "c" * 32))}


def test_seals_of_logs_are_part_of_the_manifest_and_can_be_replaced(tmp_path):
    folder = folder_with(tmp_path, CONTENTS)
    write_manifest(folder, {})
    assert read_manifest(folder).seals == {}, "as an earlier version wrote it"
    write_seals(folder, SEALS)
    assert (
        find_damage(folder) is None
        and read_manifest(folder).seals == SEALS
        and read_manifest(folder).files.keys() == CONTENTS.keys()
    )


def test_reading_a_small_file_takes_little_memory(tmp_path, monkeypatch):
    """Of a thread that has read, the memory stays with the process."""
    sizes = []
    monkeypatch.setattr("builtins.bytearray", lambda size: sizes.append(size) or bytes_array(size))
    FileRecord.of(folder_with(tmp_path, {"a": b"abc"}) / "a")
    assert sizes == [4]


bytes_array = bytearray


def test_a_file_that_the_disk_cannot_read_is_named():
    with pytest.raises(OSError, match="/proc/self/mem") as failed:
        FileRecord.of(Path("/proc/self/mem"))  # its first page is not mapped: EIO
    assert failed.value.errno == errno.EIO


@settings(max_examples=60)
@given(st.data())
def test_every_flipped_bit_is_found_in_every_file_and_in_the_manifest_itself(data):
    with tempfile.TemporaryDirectory() as root:
        folder = folder_with(Path(root), CONTENTS)
        write_manifest(folder, {}, data.draw(st.sampled_from([{}, SEALS])))
        name = data.draw(st.sampled_from([*(name for name in CONTENTS if CONTENTS[name]), "manifest.json"]))
        path = folder / name
        before = path.read_bytes()
        bit = data.draw(st.integers(0, 8 * len(before) - 1))
        flipped = bytearray(before)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        damage = find_damage(folder)
        assert damage is not None and damage.startswith(f"{name} "), damage
        path.write_bytes(before)
        assert find_damage(folder) is None


@pytest.mark.parametrize("name", CONTENTS)
def test_a_file_that_is_missing_shorter_longer_or_a_link_is_named(tmp_path, name):
    folder = folder_with(tmp_path, CONTENTS)
    write_manifest(folder, {})
    path = folder / name
    path.write_bytes(CONTENTS[name] + b"x")
    assert find_damage(folder) == f"{name} has {len(CONTENTS[name]) + 1} bytes instead of {len(CONTENTS[name])}"
    path.unlink()
    assert find_damage(folder).startswith(f"{name} is missing")
    path.symlink_to(folder / "nowhere")
    assert find_damage(folder).startswith(f"{name} ")


def test_what_is_written_is_hashed_in_memory_as_reading_it_would(tmp_path):
    writer = FileWriter(tmp_path / "file")
    pieces = [os.urandom(size) for size in (0, 1, 5000, 70000)]
    for piece in pieces:
        writer.write(memoryview(piece))
    record = writer.close()
    assert record == FileRecord.of(tmp_path / "file") == FileRecord(75001, xxhash.xxh3_128_hexdigest(b"".join(pieces)))
    with pytest.raises(FileExistsError):
        FileWriter(tmp_path / "file")

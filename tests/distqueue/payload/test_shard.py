"""A shard's folder: what it holds, and what is left over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distqueue import PackedBatch
from distqueue.messages import DeliveryPart, File, SegmentPlace, runs_of
from distqueue.payload import segment_file
from distqueue.payload.columns import stretches_of
from distqueue.payload.segment_file import Mapped, SegmentFile, SegmentGone, lay_out
from distqueue.payload.shard import Shard
from distqueue.payload.wire import from_wire, to_wire


def write(path: Path, number: int, *values: int) -> SegmentPlace:
    contents = lay_out(stretches_of(PackedBatch.from_samples([str(v) for v in values], {"n": torch.tensor(values)})))
    SegmentFile(path, contents.nbytes).write(number, contents)
    return SegmentPlace(number, "s", str(path))


def numbers(columns: dict) -> list[int]:
    return columns["n"].data.view("int64").tolist()


def test_rows_of_several_segments_are_gathered_for_a_reader_elsewhere(tmp_path: Path) -> None:
    home = Shard(str(tmp_path / "a"), None)
    places = [write(home.folder / "1", 1, 10, 11, 12), write(home.folder / "2", 2, 20, 21)]
    runs = runs_of(torch.tensor([1, 0, 0]).numpy(), torch.tensor([1, 0, 1]).numpy())
    (answer,) = home.read(places, [DeliveryPart(("n",), runs)])
    assert numbers(from_wire(*answer)) == [21, 10, 11]
    with pytest.raises(SegmentGone):
        home.read([SegmentPlace(9, "s", places[0].path)], [DeliveryPart(("n",), runs)])


def test_segments_come_from_elsewhere_go_to_disk_and_go(tmp_path: Path) -> None:
    home, other = Shard(str(tmp_path / "s" / "a"), str(tmp_path / "disk")), Shard(str(tmp_path / "s" / "b"), None)
    header, frames = to_wire(stretches_of(PackedBatch.from_samples(["x"], {"n": torch.tensor([7])})))
    path = str(home.folder / "3")
    file = File(number=3, path=path, size=4096, shard="a", node="", durable=True, lease_s=1.0)
    home.write(file, header, *frames)
    other.import_segment(str(other.folder / "moved"), home.export_segment(3, str(home.folder / "3")), durable=True)
    home.spill(3, str(home.folder / "3"), str(tmp_path / "disk" / "3"))
    assert home.copy([(3, str(home.folder / "3"), str(tmp_path / "copy"))]) == []
    for path in (other.folder / "moved", tmp_path / "disk" / "3", tmp_path / "copy"):
        assert numbers(Mapped().columns(SegmentPlace(3, "", str(path)))) == [7]
        assert path.stat().st_size == 4096, "a file that grows when it is reused has readers that see less of it"
    assert home.missing([str(home.folder / "3"), str(home.folder / "4")]) == [str(home.folder / "4")]
    home.keep_only([str(other.folder / "moved")], ["a", "b"])
    assert not (home.folder / "3").exists() and (tmp_path / "disk" / "3").exists()
    other.keep_only([], ["a"])
    assert not (other.folder / "moved").exists()
    home.discard([str(tmp_path / "disk" / "3"), "gone already"])
    assert not (tmp_path / "disk" / "3").exists()
    home.end()
    assert not home.folder.exists() and other.folder.exists()


def test_a_process_keeps_the_latest_files_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment_file, "MAX_MAPPED", 2)
    mapped, places = Mapped(), [write(tmp_path / str(n), n, n) for n in (1, 2, 3)]
    assert [numbers(mapped.columns(place)) for place in places] == [[1], [2], [3]]
    assert list(mapped._files) == [place.path for place in places[1:]]
    write(tmp_path / "3", 4, 40)
    with pytest.raises(SegmentGone):
        mapped.check(places[2:])
    assert numbers(mapped.columns(SegmentPlace(4, "s", places[2].path))) == [40]


def test_a_put_to_a_file_that_a_restarted_queue_removed_is_to_be_repeated(tmp_path: Path) -> None:
    """Between write and sync; `SegmentGone` is a LookupError, on which a client repeats its put."""
    home = Shard(str(tmp_path / "s" / "a"), None)
    write(home.folder / "1", 1, 10)
    file = SegmentFile(home.folder / "1", 4096)
    home.keep_only([], ["a"])
    with pytest.raises(SegmentGone):
        file.sync()

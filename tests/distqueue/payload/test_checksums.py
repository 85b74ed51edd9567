"""Damage to a segment's file, at any byte, is noticed by whoever reads what it hit, and named to the sample."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distqueue import PackedBatch
from distqueue.messages import DeliveryPart, runs_of
from distqueue.payload import checksums
from distqueue.payload.buffers import BufferPool
from distqueue.payload.checksums import Blocks
from distqueue.payload.columns import gather_columns, stretches_of
from distqueue.payload.gather import SourcesDamaged
from distqueue.payload.segment_file import ALIGN, HEAD, SegmentDamaged, SegmentFile, SegmentGone, lay_out
from distqueue.payload.wire import DamagedInTransit, from_wire, to_wire
from tests.distqueue.test_packed import same, samples

NUMBER = 5


@pytest.fixture(params=[16, 1 << 14], autouse=True, scope="module")
def stripe(request: pytest.FixtureRequest):
    """Small ones divide small samples into many blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checksums, "BLOCK_BYTES", request.param)
        yield request.param


@given(
    lengths=st.lists(st.integers(0, 90), min_size=1, max_size=30),
    width=st.sampled_from([1, 4, 12]),
    ragged=st.booleans(),
)
def test_blocks_are_whole_samples_that_begin_in_one_stripe(lengths, width, ragged, stripe: int) -> None:
    layout = stretches_of(
        PackedBatch.from_samples(["a"], {"x": torch.zeros(1, width // 4 if width > 1 else 1, dtype=torch.int32)})
    )["x"].layout
    width = layout.element_bytes
    offsets = np.concatenate([[0], np.cumsum(lengths)]) if ragged else None
    nbytes = int(offsets[-1] if offsets is not None else len(lengths)) * width
    blocks = Blocks.of(layout, nbytes, offsets)
    starts = np.arange(len(lengths) + 1) * width if offsets is None else offsets * width
    assert (blocks.rows[0], blocks.bytes[0], blocks.bytes[-1]) == (0, 0, nbytes)
    assert len(blocks) == 0 if not nbytes else blocks.rows[-1] == len(lengths)
    for first, last, start, stop in zip(blocks.rows, blocks.rows[1:], blocks.bytes, blocks.bytes[1:], strict=False):
        assert first < last and (start, stop) == (starts[first], starts[last])
        assert starts[first] // stripe == starts[last - 1] // stripe
        assert not first or starts[first - 1] // stripe < starts[first] // stripe


def write(batch: PackedBatch, path: Path) -> None:
    contents = lay_out(stretches_of(batch))
    SegmentFile(path, contents.nbytes).write(NUMBER, contents)


def flip(path: Path, at: int, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


def read(batch: PackedBatch, path: Path, rows: list[int]) -> dict:
    file = SegmentFile(path)
    part = DeliveryPart(tuple(batch.columns), runs_of(np.zeros(len(rows)), np.array(rows)))
    columns = gather_columns([part], [file.columns(NUMBER)], BufferPool())
    file.check(NUMBER)
    return columns


@settings(max_examples=300)
@given(made=samples(), data=st.data())
def test_a_flip_is_never_delivered_as_good_and_costs_the_samples_that_it_hit(
    made, data: st.DataObject, tmp_path_factory
) -> None:
    batch, _ = made
    path = tmp_path_factory.mktemp("segment") / "s"
    write(batch, path)
    rows = data.draw(st.permutations(range(len(batch))))[: data.draw(st.integers(1, len(batch)))]
    columns = SegmentFile(path).columns(NUMBER)
    assert not SegmentFile(path).damaged(NUMBER)
    at = data.draw(st.integers(0, path.stat().st_size - 1))
    end = table_end(path)
    flip(path, at, data.draw(st.integers(0, 7)))
    hit = set()
    for name, column in columns.items():
        begin = column.data.ctypes.data - column_start(columns)
        for first, last, start, stop in block_rows(column):
            if begin + start <= at < begin + stop:
                hit = {(name, row) for row in range(first, last)}
    try:
        got = read(batch, path, list(rows))
    except SegmentGone:
        assert at < 8, "another number"
        return
    except SegmentDamaged:
        (rows_damaged,) = SegmentFile(path).damaged(NUMBER)
        assert rows_damaged.column == "" and 8 <= at < end
        return
    except SourcesDamaged as error:
        assert error.sources == (0,)
        assert {row for _, row in hit} & set(rows), "only whoever reads it has to know"
    else:
        wanted = batch.select(rows)
        assert all(same(got[name][i], wanted[name][i]) for name in batch.columns for i in range(len(rows)))
        unread = {name for name in batch.columns if not wanted[name].buffer.nbytes}
        assert not {row for name, row in hit if name not in unread} & set(rows), "not noticed"
    named = {(one.column, row) for one in SegmentFile(path).damaged(NUMBER) for row in range(one.first, one.last)}
    assert named == hit


def column_start(columns: dict) -> int:
    """Address of the file's first byte: that of a mapping begins a page."""
    first = min(column.data.ctypes.data for column in columns.values() if column.data.nbytes)
    return first - first % 4096


def table_end(path: Path) -> int:
    return int(SegmentFile(path)._words[2]) if path.stat().st_size > HEAD else 0


def block_rows(column) -> zip:
    rows, edges = column.blocks.rows.tolist(), column.blocks.bytes.tolist()
    return zip(rows, rows[1:], edges, edges[1:], strict=False)


def test_a_file_that_was_cut_short_is_damaged(tmp_path: Path) -> None:
    batch = PackedBatch.from_samples(["a", "b"], {"tokens": torch.arange(2000).view(2, 1000)})
    write(batch, tmp_path / "s")
    size = (tmp_path / "s").stat().st_size
    for left in (size - 8, HEAD + ALIGN, HEAD):
        (tmp_path / "s").write_bytes((tmp_path / "s").read_bytes()[:left])
        with pytest.raises(SegmentDamaged):
            SegmentFile(tmp_path / "s").columns(NUMBER)
    (tmp_path / "s").write_bytes(b"")
    with pytest.raises(SegmentGone):
        SegmentFile(tmp_path / "s")


@given(made=samples(), data=st.data())
def test_a_flip_on_the_way_to_another_machine_is_noticed(made, data: st.DataObject) -> None:
    header, frames = to_wire(stretches_of(made[0]))
    frames = [frame.copy() for frame in frames]
    k = data.draw(st.sampled_from([k for k, frame in enumerate(frames) if frame.nbytes]))
    frames[k][data.draw(st.integers(0, frames[k].nbytes - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedInTransit, match=f"column '{list(made[0].columns)[k]}' arrived with another checksum"):
        from_wire(header, frames)
    damaged = bytearray(header)  # it has the lengths by which the bytes are divided into samples
    damaged[data.draw(st.integers(0, len(header) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(DamagedInTransit, match="lengths of columns arrived with another checksum"):
        from_wire(bytes(damaged), to_wire(stretches_of(made[0]))[1])

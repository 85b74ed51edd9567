"""From a batch to segments, to messages, across machines and back: whatever rows are asked for come out bitwise."""

from __future__ import annotations

import gc
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distqueue import PackedBatch
from distqueue.messages import (
    Delivery,
    DeliveryPart,
    Put,
    SegmentPlace,
    array_to_names,
    names_to_array,
    pack,
    runs_of,
    unpack,
)
from distqueue.payload import gather
from distqueue.payload.buffers import BufferPool
from distqueue.payload.columns import gather_columns, stretches_of
from distqueue.payload.segment_file import SegmentFile, SegmentGone, lay_out
from distqueue.payload.wire import SUM_BYTES, from_wire, to_wire, with_checksum
from tests.distqueue.test_packed import same_batch, samples
from tests.machine import patience

COPIES = {"by element": (1 << 30, 1 << 30), "by run": (1, 1 << 30), "by run, on threads": (1, 1)}
"""MIN_RUN_ELEMENTS and LONG_RUN_BYTES with which runs of any length are copied this way"""


@pytest.mark.parametrize("copied", COPIES)
@settings(max_examples=60)
@given(made=samples(), data=st.data(), way=st.sampled_from(["memory", "file", "wire"]))
def test_any_rows_in_any_order_are_gathered_from_where_they_lie(
    made, data: st.DataObject, way: str, copied: str
) -> None:
    batch, _ = made
    cuts = sorted(data.draw(st.lists(st.integers(0, len(batch)), max_size=3)))
    bounds = list(zip([0, *cuts], [*cuts, len(batch)], strict=True))
    pieces = [batch.select(range(*bound)) for bound in bounds if bound[0] < bound[1]]
    with tempfile.TemporaryDirectory() as folder:
        sources = [_elsewhere(piece, way, Path(folder) / str(i)) for i, piece in enumerate(pieces)]
        rows = data.draw(st.permutations(range(len(batch))))[: data.draw(st.integers(1, len(batch)))]
        home = np.array([(i, row) for i, piece in enumerate(pieces) for row in range(len(piece))]).reshape(-1, 2)[rows]
        part = DeliveryPart(tuple(batch.columns), runs_of(home[:, 0], home[:, 1]))
        wanted = batch.select(rows)
        with pytest.MonkeyPatch.context() as patch:
            for name, limit in zip(("MIN_RUN_ELEMENTS", "LONG_RUN_BYTES"), COPIES[copied], strict=True):
                patch.setattr(gather, name, limit)
            columns = gather_columns([part], sources, BufferPool())
        assert same_batch(PackedBatch(wanted.ids, columns, wanted.groups, wanted.versions), wanted)


def _elsewhere(batch: PackedBatch, way: str, path: Path) -> dict:
    columns = stretches_of(batch)
    if way == "wire":
        header, frames = to_wire(columns)
        assert sum(frame.nbytes for frame in frames) == sum(column.buffer.nbytes for column in batch.columns.values())
        return from_wire(header, [frame.copy() for frame in frames])
    if way == "file":
        contents = lay_out(columns)
        SegmentFile(path, contents.nbytes).write(5, contents)
        assert path.stat().st_size == contents.nbytes
        return SegmentFile(path).columns(5)
    return columns


@pytest.mark.parametrize("dtype", ["load", "float9"])
def test_a_column_of_an_unknown_dtype_is_refused_by_name(dtype: str) -> None:
    """Also the name of something else that torch has."""
    header, frames = to_wire(stretches_of(PackedBatch.from_samples(["a"], {"reward": torch.ones(1)})))
    fields, arrays = unpack(header[SUM_BYTES:])
    ((name, kind, _, *others),) = fields["columns"]
    fields["columns"] = [(name, kind, dtype, *others)]
    with pytest.raises(ValueError, match=f"column 'reward': dtype='{dtype}'; expected a dtype of torch "):
        from_wire(with_checksum(pack(fields, arrays)), frames)


@given(made=samples())
def test_a_put_and_a_delivery_survive_their_messages(made) -> None:
    batch, _ = made
    put, again = Put.of(batch), Put.from_bytes(Put.of(batch).to_bytes())
    assert (again.ids, again.groups) == (put.ids, put.groups) and again.columns.keys() == put.columns.keys()
    assert (again.versions is None) == (put.versions is None)
    assert put.versions is None or np.array_equal(again.versions, put.versions)
    for name, (layout, lengths, nbytes) in put.columns.items():
        found = again.columns[name]
        assert (found.layout, found.nbytes) == (layout, nbytes)
        assert found.lengths is None if lengths is None else np.array_equal(found.lengths, lengths)
    runs = runs_of(np.arange(len(batch)) // 3, np.arange(len(batch)) % 3)
    parts = (DeliveryPart(tuple(batch.columns), runs),)
    delivery = Delivery(batch.ids, batch.groups, batch.versions, (SegmentPlace(7, "s", "/p"),), parts)
    told = Delivery.from_bytes(delivery.to_bytes())
    assert np.array_equal(told.parts[0].runs, runs) and told.parts[0].columns == tuple(batch.columns)
    for field in ("ids", "groups", "versions", "places"):
        assert getattr(told, field) == getattr(delivery, field)


def test_messages_carry_names_of_any_text_but_not_a_nul() -> None:
    names = ("", "é", "a/b 1", "x" * 1000)
    assert array_to_names(names_to_array(names), len(names)) == names
    assert array_to_names(names_to_array(()), 0) == ()
    with pytest.raises(ValueError, match="expected a name without a NUL"):
        names_to_array(["fine", "a\0b"])
    fields, arrays = unpack(pack({"a": [1, "é"]}, {"x": np.arange(3, dtype=np.uint8), "y": np.eye(2)}))
    assert fields == {"a": [1, "é"]} and arrays["x"].tolist() == [0, 1, 2] and np.array_equal(arrays["y"], np.eye(2))


def test_a_reader_notices_a_file_that_was_written_again(tmp_path) -> None:
    first, second = (
        lay_out(stretches_of(PackedBatch.from_samples([id], {"text": [id * 9], "n": np.full(1, 1.0)}))) for id in "ab"
    )
    writer = SegmentFile(tmp_path / "s", max(first.nbytes, second.nbytes))
    writer.write(1, first)
    reader = SegmentFile(tmp_path / "s")
    assert bytes(reader.columns(1)["text"].data) == b"a" * 9
    reader.check(1)
    writer.write(2, second)
    for stale in (reader.check, reader.columns):
        with pytest.raises(SegmentGone):
            stale(1)
    assert bytes(reader.columns(2)["text"].data) == b"b" * 9
    with pytest.raises(SegmentGone):
        SegmentFile(tmp_path / "nowhere")


@pytest.fixture(scope="module")
def light() -> None:
    """Collections of garbage look at what is made from here on."""
    gc.collect()
    gc.freeze()


@pytest.mark.parametrize(
    "look",
    [
        lambda memory: memory[5:9],
        lambda memory: memory[64:].view("int64")[1:].reshape(1, -1)[:, 5:9],
        lambda memory: torch.from_numpy(memory[64:128]).view(torch.int64)[5:9],
        lambda memory: torch.from_numpy(memory).numpy()[5:9],
        lambda memory: memory.data[5:9],
    ],
)
def test_memory_that_nobody_looks_at_any_more_serves_the_next_batch(look, light) -> None:
    buffers = BufferPool()
    first = buffers.take(1 << 20)
    at, view = first.ctypes.data, look(first)
    second = buffers.take(1 << 20)
    assert second.ctypes.data != at, "what is looked at is not handed out again"
    del first
    gc.collect()
    third = buffers.take(1 << 20)
    assert third.ctypes.data != at, "a view keeps it, too"
    del view
    gc.collect()
    assert buffers.take(1 << 20).ctypes.data == at


def test_memory_that_a_garbage_collection_frees_while_other_is_taken_returns() -> None:
    class Cycle:
        def __init__(self, memory: np.ndarray) -> None:
            self.memory, self.itself = memory, self

    def take_while_collecting() -> None:
        buffers = BufferPool()
        for threshold in range(1, 40):  # of new objects: the collection begins earlier or later in `take`
            gc.disable()
            gc.collect(0)  # new objects count from 0
            gc.set_threshold(threshold)
            Cycle(buffers.take(1 << 16))
            gc.enable()
            buffers.take(1 << 16)

    thresholds = gc.get_threshold()
    taking = threading.Thread(target=take_while_collecting, daemon=True)
    try:
        taking.start()
        taking.join(patience(20))
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    assert not taking.is_alive(), "a deadlock"


@pytest.mark.parametrize("nbytes", [1, 1000, 1 << 20])
def test_memory_is_writable_and_aligned(nbytes: int) -> None:
    memory = BufferPool().take(nbytes)
    assert memory.shape == (nbytes,) and memory.ctypes.data % 64 == 0
    memory[:] = 7

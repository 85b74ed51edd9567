"""What goes into a packed batch comes out bitwise, with its layout, as views, without a byte of padding."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distqueue import Column, PackedBatch

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
]
LENGTHS = st.lists(st.integers(0, 7), min_size=1, max_size=9)
TRAILING = st.sampled_from([(), (1,), (3,), (2, 4), (0,)])


def noise(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random bits of any dtype: NaNs, infinities and denormals with the rest."""
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.bool)
    numel = torch.Size(shape).numel()
    return torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)


def same(a: object, b: object) -> bool:
    """Bitwise, with shape and dtype."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a == b
    bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(*bits)


def same_batch(a: PackedBatch, b: PackedBatch) -> bool:
    return (a.ids, a.groups, a.versions, list(a.columns)) == (b.ids, b.groups, b.versions, list(b.columns)) and all(
        a[name].layout == b[name].layout and all(same(x, y) for x, y in zip(a[name], b[name], strict=True))
        for name in a.columns
    )


@st.composite
def samples(draw: st.DrawFn) -> tuple[PackedBatch, dict[str, list]]:
    """A batch with every kind of column, and the values it was made of, per sample."""
    lengths = draw(LENGTHS)
    B, dtype, trailing = len(lengths), draw(st.sampled_from(DTYPES)), draw(TRAILING)
    values = {
        "ragged": [noise((length, *trailing), dtype) for length in lengths],
        "dense": noise((B, *trailing), dtype),
        "text": draw(st.lists(st.text(max_size=5), min_size=B, max_size=B)),
        "meta": [{"row": row, "tags": ["é", None]} for row in range(B)],
    }
    ids = [f"s{row}" for row in range(B)]
    batch = PackedBatch.from_samples(ids, values, groups=[id[:1] for id in ids], versions=[(0, B)] * B)
    return batch, {name: list(column) for name, column in values.items()}


@given(samples())
def test_samples_come_out_as_views_and_nothing_is_padded(made: tuple[PackedBatch, dict[str, list]]) -> None:
    batch, values = made
    for name, column in batch.columns.items():
        assert all(same(got, put) for got, put in zip(column, values[name], strict=True))
    for name in ("ragged", "dense"):
        column = batch[name]
        assert column.buffer.nbytes == sum(value.nbytes for value in values[name])
        assert all(
            sample.untyped_storage().data_ptr() == column.buffer.untyped_storage().data_ptr() for sample in column
        )
    assert batch["dense"].offsets is None and batch["ragged"].offsets is not None


@given(samples(), st.randoms(use_true_random=False))
def test_select_is_that_of_lists(made: tuple[PackedBatch, dict[str, list]], rng: random.Random) -> None:
    batch, values = made
    rows = rng.sample(range(len(batch)), rng.randint(0, len(batch)))
    chosen = batch.select(rows)
    assert chosen.ids == tuple(batch.ids[row] for row in rows)
    for name in batch.columns:
        assert chosen[name].layout == batch[name].layout
        assert all(same(got, values[name][row]) for got, row in zip(chosen[name], rows, strict=True))
    cut = rng.randint(0, len(batch))
    parts = [batch.select(range(cut)), batch.select(range(cut, len(batch)))]
    storages = {part["ragged"].buffer.untyped_storage().data_ptr() for part in parts}
    assert storages == {batch["ragged"].buffer.untyped_storage().data_ptr()}, "consecutive rows are views"


def test_layouts_are_kept() -> None:
    ids = ["a", "b"]
    batch = PackedBatch.from_samples(ids, {"B": torch.ones(2), "B1": torch.ones(2, 1), "one": [torch.ones(1)] * 2})
    shapes = {name: tuple(batch.select([1, 0])[name].buffer.shape) for name in batch.columns}
    assert shapes == {"B": (2,), "B1": (2, 1), "one": (2,)}
    assert batch["B"][0].shape == () and batch["one"][0].shape == (1,)
    empty = batch.select([])
    assert len(empty) == len(empty["one"]) == 0 and empty["B1"].buffer.shape == (0, 1)


@given(st.lists(st.lists(st.integers(-100, 100), max_size=5), min_size=1, max_size=6))
def test_lists_of_numbers_are_the_column_of_their_tensors(values: list[list[int]]) -> None:
    ids = [f"s{row}" for row in range(len(values))]
    for dtype in (torch.int32, torch.int64, torch.float32):
        numbers = [[value / 3 if dtype.is_floating_point else value for value in row] for row in values]
        tensors = Column.pack([torch.tensor(row, dtype=dtype) for row in numbers], ids, "numbers")
        column = Column.of_numbers(numbers, dtype, "numbers")
        assert same(column.buffer, tensors.buffer) and torch.equal(column.offsets, tensors.offsets)


def test_a_number_that_is_none_is_refused_by_column() -> None:
    with pytest.raises(ValueError, match="column 'logprobs': a None; expected numbers"):
        Column.of_numbers([[0.5], [None, 1.0]], torch.float32, "logprobs")  # type: ignore[list-item]
    assert Column.of_numbers([[float("nan")]], torch.float32, "logprobs").buffer.isnan().all()


def test_a_missing_column_names_sample_and_column() -> None:
    batch = PackedBatch.from_samples(["a"], {"tokens": [torch.arange(3)]})
    with pytest.raises(ValueError, match=r"column 'reward': sample 'a' lacks it; it has \['tokens'\]"):
        batch.select(columns=["reward"])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": [torch.ones(2), torch.ones(2).half()]}, r"column 'x': sample 'b' is torch.float16 \[L\], sample 'a' is"),
        (
            {"x": [torch.ones(2, 3), torch.ones(2, 4)]},
            r"sample 'b' is .* \[L, 4\], sample 'a' is .* \[L, 3\]; expected",
        ),
        ({"x": [torch.tensor(1.0)] * 2}, "sample 'a': a scalar; pass"),
        ({"x": [[1, 2], [3]]}, "sample 'a': list; expected a tensor"),
        ({"x": ["text", 3]}, "sample 'a': str; expected a tensor, or a str or dict per sample"),
        ({"x": [{"f": 1}, {"f": torch.ones(1)}]}, "sample 'b': metadata must be JSON"),
        ({"x": torch.ones(3)}, "column 'x': 3 samples for 2 ids"),
        ({"x": [torch.ones(1, device="meta")] * 2}, "a tensor on meta; expected one on the CPU"),
    ],
)
def test_what_does_not_fit_is_named(columns: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedBatch.from_samples(["a", "b"], columns)


def test_ids_groups_and_versions_fit_the_samples() -> None:
    with pytest.raises(ValueError, match="repeated: a"):
        PackedBatch.from_samples(["a", "b", "a"], {})
    with pytest.raises(ValueError, match="groups: 1 samples for 2 ids"):
        PackedBatch.from_samples(["a", "b"], {}, groups=["g"])
    with pytest.raises(ValueError, match=r"sample 'a': versions \(3, 2\)"):
        PackedBatch.from_samples(["a"], {}).labelled(versions=[(3, 2)])


def test_the_texts_of_a_column_are_read_at_once():
    texts = ["", "ü", "plain", "", "日本"]
    column = PackedBatch.from_samples(list("abcde"), {"text": texts})["text"]
    assert column.texts() == texts == [column[row] for row in range(len(column))]
    assert column.rows(1, 3).texts() == ["ü", "plain"] and column.rows(2, 2).texts() == []


def test_what_a_column_would_take_if_it_were_padded():
    ragged = Column.pack([torch.zeros(3, 2, dtype=torch.int16), torch.zeros(1, 2, dtype=torch.int16)], ["a", "b"], "x")
    assert (ragged.buffer.nbytes, ragged.padded_bytes) == (16, 24)
    dense = Column.pack(torch.zeros(4, 2), list("abcd"), "x")
    assert dense.padded_bytes == dense.buffer.nbytes
    assert Column.pack([torch.zeros(0), torch.zeros(0)], ["a", "b"], "x").padded_bytes == 0

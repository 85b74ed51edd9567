"""The table of element types agrees with torch's, and a type that is not in it is refused by name."""

from __future__ import annotations

import re

import pytest
import torch

from distqueue import LocalQueue, PackedBatch
from distqueue.column import DTYPES
from distqueue.layout import ITEM_BYTES, ColumnLayout


def test_the_table_holds_every_type_of_torch_with_its_size() -> None:
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert {str(dtype).removeprefix("torch."): dtype.itemsize for dtype in dtypes} == ITEM_BYTES
    assert set(DTYPES.values()) == dtypes


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float4_e2m1fn_x2", "uint16", "complex64", "complex128"])
def test_types_that_numpy_lacks_or_that_are_rare_travel_bitwise(name: str) -> None:
    rows = torch.arange(4 * 16 * 5, dtype=torch.uint8).reshape(4, -1).view(DTYPES[name])
    queue = LocalQueue(["train"])
    queue.put(PackedBatch.from_samples(["a", "b"], {"dense": rows[:2], "ragged": [rows[1:2], rows[1:]]}))
    batch = queue.get("train", ["dense", "ragged"], 2)
    assert batch["dense"].buffer.dtype == batch["ragged"].buffer.dtype == rows.dtype
    assert torch.equal(batch["dense"].buffer.view(torch.uint8), rows[:2].view(torch.uint8))
    assert torch.equal(batch["ragged"][1].view(torch.uint8), rows[1:].view(torch.uint8))


def test_the_type_of_a_later_torch_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="^dtype='float9'; expected a dtype of torch that distqueue/layout.py lists"):
        ColumnLayout("tensor", dtype="float9", trailing=(), ragged=True)


def test_a_column_whose_type_this_torch_lacks_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = LocalQueue(["train"])
    queue.put(PackedBatch.from_samples(["a"], {"scale": torch.ones(1, dtype=torch.float8_e8m0fnu)}))
    monkeypatch.delitem(DTYPES, "float8_e8m0fnu")
    expected = f"column 'scale': dtype='float8_e8m0fnu': expected a dtype of torch {torch.__version__}"
    with pytest.raises(ValueError, match=re.escape(expected)):
        queue.get("train", ["scale"], 1)

"""A column: the samples of one field, concatenated in one buffer with a table of offsets. No padding, no pickle.

* ragged   a list of tensors (L_i, *trailing): buffer (sum L_i, *trailing) and offsets (B+1,) int64
* dense    a tensor (B, *row): the same tensor, no offsets, so (B,) stays (B,) and (B, 1) stays (B, 1)
* text, metadata   a list of `str` or of JSON-able `dict`: their UTF-8 bytes, ragged uint8

Invariants: every buffer is a contiguous CPU tensor; a sample read from a column is a view of its buffer (text and
metadata are decoded); packing and selecting preserve values bitwise, layouts, and empty sequences."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from distqueue.layout import ITEM_BYTES, ColumnLayout
from distqueue.messages import runs_of

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES if hasattr(torch, name)}
"""Element types of columns by name; an older torch lacks some"""


def torch_dtype(column: str, layout: ColumnLayout) -> torch.dtype:
    """Return the element type of a column. ValueError: this version of torch lacks it, whereas the writer's has it."""
    try:
        return DTYPES[layout.dtype]
    except KeyError:
        raise ValueError(
            f"column {column!r}: dtype={layout.dtype!r}: expected a dtype of torch {torch.__version__}, which this "
            "process uses; the column was written with another version"
        ) from None


@dataclass(frozen=True, eq=False)
class Column:
    """One column of B samples. `column[i]` is sample i: a view (L_i, *trailing) if ragged, a view (*row) if dense,
    a `str` if kind is "text", a `dict` if kind is "json"."""

    buffer: Tensor
    """(sum of lengths, *trailing) if ragged, (B, *row) if dense; contiguous, on the CPU"""
    offsets: Tensor | None = None
    """(B + 1,) int64: sample i is buffer[offsets[i]:offsets[i + 1]]; None: dense"""
    kind: str = "tensor"
    """tensor, text or json"""

    @property
    def padded_bytes(self) -> int:
        """Bytes of the column if every sample were padded to the longest one."""
        if self.offsets is None or not len(self.buffer):
            return self.buffer.nbytes
        return int(self.lengths().max()) * len(self) * self.buffer[0].nbytes

    def __post_init__(self) -> None:
        assert self.buffer.device.type == "cpu" and self.buffer.is_contiguous() and self.buffer.dim() > 0
        if self.offsets is not None:
            assert (
                self.offsets.dtype == torch.int64
                and self.offsets[0].item() == 0
                and self.offsets[-1].item() == len(self.buffer)
            )

    @classmethod
    def pack(cls, values: Column | Tensor | Sequence[Any], ids: Sequence[str], name: str) -> Column:
        """Pack a dense tensor (B, *row) or a list of B ragged tensors, strings or dicts.

        ValueError names the column and, where it applies, the sample."""
        if len(values) != len(ids):
            raise ValueError(f"column {name!r}: {len(values)} samples for {len(ids)} ids")
        if isinstance(values, Column):
            return values
        if isinstance(values, np.ndarray | Tensor):
            return cls(_cpu_tensor(values, name).contiguous())
        if not len(values):
            raise ValueError(f"column {name!r}: an empty list has no dtype; pass a Column or a tensor of 0 rows")
        if all(isinstance(value, str) for value in values):
            return cls._of_bytes([value.encode() for value in values], "text")
        if all(isinstance(value, dict) for value in values):
            return cls._of_bytes([_json_bytes(value, name, id) for value, id in zip(values, ids, strict=True)], "json")
        tensors = [_cpu_tensor(value, name, id) for value, id in zip(values, ids, strict=True)]
        first = tensors[0]
        for tensor, id in zip(tensors, ids, strict=True):
            if tensor.dim() == 0:
                raise ValueError(
                    f"column {name!r}, sample {id!r}: a scalar; pass the scalars of a column as one tensor (B,)"
                )
            if (tensor.dtype, tensor.shape[1:]) != (first.dtype, first.shape[1:]):
                raise ValueError(
                    f"column {name!r}: sample {id!r} is {_describe(tensor)}, sample {ids[0]!r} is {_describe(first)}; "
                    "expected one dtype, and one shape except for the length L"
                )
        return cls(torch.cat(tensors), _offsets([len(tensor) for tensor in tensors]))

    @classmethod
    def of_numbers(cls, values: Sequence[Sequence[float]], dtype: torch.dtype, name: str) -> Column:
        """Pack B lists of numbers as a ragged column (sum L_i,), of a ``dtype`` that numpy has: faster than `pack` with
        a tensor for each. ValueError names the column: a None."""
        offsets = _offsets([len(value) for value in values])
        # numpy reads a number in a quarter of the time of torch.tensor.
        numbers = np.fromiter(chain.from_iterable(values), torch.empty(0, dtype=dtype).numpy().dtype, int(offsets[-1]))
        if np.isnan(numbers).any() and any(None in value for value in values):  # numpy reads it as NaN
            raise ValueError(f"column {name!r}: a None; expected numbers")
        return cls(torch.from_numpy(numbers), offsets)

    @classmethod
    def _of_bytes(cls, values: list[bytes], kind: str) -> Column:
        data = np.frombuffer(b"".join(values), dtype=np.uint8).copy()
        return cls(torch.from_numpy(data), _offsets([len(value) for value in values]), kind)

    @cached_property
    def layout(self) -> ColumnLayout:
        return ColumnLayout(
            self.kind,
            dtype=str(self.buffer.dtype).removeprefix("torch."),
            trailing=tuple(self.buffer.shape[1:]),
            ragged=self.offsets is not None,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of payload and offsets."""
        return self.buffer.nbytes + (0 if self.offsets is None else self.offsets.nbytes)

    def lengths(self) -> Tensor:
        """Lengths of the samples, (B,) int64: positions along the sequence; 1 if dense; bytes if text or metadata."""
        if self.offsets is None:
            return torch.ones(len(self), dtype=torch.int64)
        return self.offsets.diff()

    def __len__(self) -> int:
        return len(self.buffer) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, row: int) -> Any:
        if not -len(self) <= row < len(self):
            raise IndexError(f"sample {row} of a column of {len(self)}")
        if self.offsets is None:
            return self.buffer[row]
        start, stop = self.offsets[row % len(self)].item(), self.offsets[row % len(self) + 1].item()
        sample = self.buffer[start:stop]
        if self.kind == "tensor":
            return sample
        text = sample.numpy().tobytes().decode()
        return text if self.kind == "text" else json.loads(text)

    def texts(self) -> list[str]:
        """Return the samples of a text column."""
        assert self.kind == "text" and self.offsets is not None, f"a column of {self.kind}"
        data, ends = self.buffer.numpy().tobytes(), self.offsets.tolist()
        return [data[start:stop].decode() for start, stop in zip(ends, ends[1:], strict=False)]

    def rows(self, start: int, stop: int) -> Column:
        """Return samples start to stop - 1 as a view."""
        if self.offsets is None:
            return replace(self, buffer=self.buffer[start:stop])
        offsets = self.offsets[start : stop + 1]
        return replace(self, buffer=self.buffer[offsets[0] : offsets[-1]], offsets=offsets - offsets[0])

    def take(self, rows: Sequence[int]) -> Column:
        """Select samples in this order: a view if they are consecutive, else one copy."""
        runs = runs_of(np.zeros(len(rows)), np.asarray(rows))[:, 1:].tolist() or [(0, 0)]
        views = [self.rows(start, stop) for start, stop in runs]
        if len(views) == 1:
            return views[0]
        buffer = torch.cat([view.buffer for view in views])
        if self.offsets is None:
            return replace(self, buffer=buffer)
        return replace(self, buffer=buffer, offsets=_offsets(torch.cat([view.lengths() for view in views])))


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} [{', '.join(['L', *map(str, tensor.shape[1:])])}]"


def _offsets(lengths: Tensor | list[int]) -> Tensor:
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _cpu_tensor(value: Any, name: str, id: str | None = None) -> Tensor:
    where = f"column {name!r}" + ("" if id is None else f", sample {id!r}")
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(value)
    if not isinstance(value, Tensor):
        raise ValueError(f"{where}: {type(value).__name__}; expected a tensor, or a str or dict per sample")
    if value.device.type != "cpu":
        raise ValueError(f"{where}: a tensor on {value.device}; expected one on the CPU")
    if value.dim() == 0 and id is None:
        raise ValueError(f"{where}: a scalar; expected (B, *row)")
    return value.detach()


def _json_bytes(value: dict[str, Any], name: str, id: str) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError as error:
        raise ValueError(f"column {name!r}, sample {id!r}: metadata must be JSON-serializable; {error}") from error

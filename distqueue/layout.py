"""The layout of a column: what all its samples have in common.

Its element type is held by name, with its size in bytes in one table: the queue's own processes handle bytes and
metadata only, and do without torch, which would cost each of them 2 s of CPU and 190 MB."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from math import prod
from typing import Any

_NAMES = {
    1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7 "
    "bits8 bits1x8 bits2x4 bits4x2 qint8 quint8 quint2x4 quint4x2",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 complex32 qint32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}

ITEM_BYTES = {name: size for size, names in _NAMES.items() for name in names.split()}
"""Bytes of an element by the name of its type, which is torch's"""


@dataclass(frozen=True)
class ColumnLayout:
    """The properties all samples of a column share; columns of equal layouts can be concatenated.

    ValueError names an element type that is not in `ITEM_BYTES`."""

    kind: str
    """tensor, text or json"""
    _: KW_ONLY
    dtype: str
    """name of the element type: a key of `ITEM_BYTES`"""
    trailing: tuple[int, ...]
    """shape of one position (ragged) or of one row (dense)"""
    ragged: bool

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype={self.dtype!r}; expected a dtype of torch that distqueue/layout.py lists")

    @classmethod
    def from_fields(cls, column: str, fields: Sequence[Any]) -> "ColumnLayout":
        """Restore the layout of a column that `fields` serialized. ValueError names the column and its element type."""
        kind, dtype, trailing, ragged = fields
        try:
            return cls(kind, dtype=dtype, trailing=tuple(trailing), ragged=ragged)
        except ValueError as error:
            raise ValueError(f"column {column!r}: {error}") from None

    @property
    def fields(self) -> tuple[str, str, tuple[int, ...], bool]:
        """The layout as JSON-able fields."""
        return self.kind, self.dtype, self.trailing, self.ragged

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]

    @property
    def element_bytes(self) -> int:
        """Bytes of one position (ragged) or of one row (dense)."""
        return self.item_bytes * prod(self.trailing)

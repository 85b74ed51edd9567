"""The format of metadata on the wire and in the journal: a JSON header and bare arrays in one `bytes`. No pickle.

    | bytes of the header, uint32 | header | array | array | …     each array at a multiple of 8

`Put` describes a batch that a writer stores, without its payload; `Delivery` tells a reader which samples it receives
and where their payload lies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distqueue.layout import ColumnLayout

if TYPE_CHECKING:  # these load torch, which the queue's own processes do without
    from distqueue.packed import PackedBatch

ALIGN = 8

_ENCODER = json.JSONEncoder(separators=(",", ":"))


def to_json(value: Any) -> bytes:
    """Serialize as JSON without spaces."""
    return _ENCODER.encode(value).encode()


def pack(fields: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> bytes:
    """Serialize JSON-able fields and arrays of plain numpy dtypes."""
    described = {name: (array.dtype.str, array.shape) for name, array in arrays.items()}
    header = to_json({"fields": fields, "arrays": described})
    pieces = [len(header).to_bytes(4, "little"), header]
    size = 4 + len(header)
    for array in arrays.values():
        pieces += [bytes(-size % ALIGN), np.ascontiguousarray(array).tobytes()]
        size += -size % ALIGN + array.nbytes
    return b"".join(pieces)


def unpack(message: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Parse what `pack` serialized; the arrays are read-only views of the message."""
    length = int.from_bytes(message[:4], "little")
    header = json.loads(message[4 : 4 + length])
    at, arrays = 4 + length, {}
    for name, (dtype, shape) in header["arrays"].items():
        at += -at % ALIGN
        count = int(np.prod(shape))
        arrays[name] = np.frombuffer(message, dtype=dtype, count=count, offset=at).reshape(shape)
        at += arrays[name].nbytes
    return header["fields"], arrays


def names_to_array(names: Sequence[str]) -> np.ndarray:
    """Encode names as (bytes,) uint8: UTF-8, separated by NULs. ValueError: a name that contains a NUL."""
    joined = "\0".join(names)
    if joined.count("\0") != max(len(names) - 1, 0):
        wrong = next(name for name in names if "\0" in name)
        raise ValueError(f"{wrong!r}: expected a name without a NUL character")
    return np.frombuffer(joined.encode(), dtype=np.uint8)


def array_to_names(array: np.ndarray, count: int) -> tuple[str, ...]:
    """Decode `names_to_array`; `count` distinguishes no name from one empty name."""
    return tuple(array.tobytes().decode().split("\0")) if count else ()


def smallest(values: np.ndarray) -> np.ndarray:
    """Cast non-negative integers to the smallest unsigned dtype that holds them."""
    largest = int(values.max()) if values.size else 0
    return values.astype(np.min_scalar_type(largest), copy=False)


def offsets_of(lengths: np.ndarray | Sequence[int]) -> np.ndarray:
    """Return the offsets of B samples that lie one after the other: (B + 1,) int64, from 0."""
    return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def runs_of(segments: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Merge neighbours: (K, 3) int64 rows (segment, start, stop), in the order given."""
    if not len(segments):
        return np.empty((0, 3), np.int64)
    breaks = np.flatnonzero((np.diff(segments) != 0) | (np.diff(positions) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    stops = np.concatenate([breaks, [len(segments)]])
    return np.stack([segments[starts], positions[starts], positions[stops - 1] + 1], axis=1).astype(np.int64)


class ColumnInfo(NamedTuple):
    """A column of a put: its layout, the length of each sample if it is ragged, its bytes without offsets."""

    layout: ColumnLayout
    lengths: np.ndarray | None
    nbytes: int


@dataclass(frozen=True)
class Put:
    """The metadata of a batch that is put."""

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    versions: np.ndarray | None
    """(B, 2) int32: policy versions of the oldest and the newest token; None: not given"""
    columns: dict[str, ColumnInfo]
    claim: str = ""
    """Task to which the samples are leased"""

    @classmethod
    def of(cls, batch: PackedBatch, claim: str = "") -> Put:
        columns = {}
        for name, column in batch.columns.items():
            lengths = None if column.offsets is None else np.diff(column.offsets.numpy())
            columns[name] = ColumnInfo(column.layout, lengths, column.buffer.nbytes)
        versions = np.broadcast_to(versions_of(batch.versions), (len(batch), 2)) if batch.versions else None
        return cls(ids=batch.ids, groups=batch.groups, versions=versions, columns=columns, claim=claim)

    @property
    def tokens(self) -> dict[str, np.ndarray | None]:
        """Tokens per sample by column; None: each sample counts as one (dense columns, text and metadata)."""
        return {
            name: info.lengths if info.lengths is not None and info.layout.kind == "tensor" else None
            for name, info in self.columns.items()
        }

    def to_bytes(self) -> bytes:
        """Serialize; lengths that several columns share are sent once."""
        distinct: list[np.ndarray] = []
        columns = []
        for name, (layout, lengths, nbytes) in self.columns.items():
            columns.append((name, *layout.fields, nbytes, index_of_lengths(lengths, distinct)))
        unique, group_of = labels(self.groups)
        fields = {"count": len(self.ids), "groups": unique, "columns": columns}
        if self.claim:
            fields["claim"] = self.claim
        arrays = {"ids": names_to_array(self.ids), "group_of": group_of}
        if self.versions is not None:
            uniform = len(self.versions) and (self.versions == self.versions[0]).all()
            arrays["versions"] = self.versions[:1] if uniform else self.versions
        arrays |= {f"lengths{i}": smallest(lengths) for i, lengths in enumerate(distinct)}
        return pack(fields, arrays)

    @classmethod
    def from_bytes(cls, message: bytes) -> Put:
        fields, arrays = unpack(message)
        count = fields["count"]
        columns = {}
        for name, *layout, nbytes, shared in fields["columns"]:
            lengths = None if shared is None else arrays[f"lengths{shared}"].astype(np.int64)
            columns[name] = ColumnInfo(ColumnLayout.from_fields(name, layout), lengths, nbytes)
        versions = np.broadcast_to(arrays["versions"], (count, 2)) if "versions" in arrays else None
        groups = labelled(fields["groups"], arrays["group_of"])
        ids, claim = array_to_names(arrays["ids"], count), fields.get("claim", "")
        return cls(ids=ids, groups=groups, versions=versions, columns=columns, claim=claim)


class File(NamedTuple):
    """A file reserved for or granted to a writer."""

    number: int
    path: str
    size: int
    shard: str
    node: str
    durable: bool
    """Whether it must be on disk before it is committed"""
    lease_s: float

    def fits(self, nbytes: int) -> bool:
        """Whether a put of `nbytes` fits and fills at least half of the file."""
        return nbytes <= self.size <= 2 * max(nbytes, 4096)


class SegmentPlace(NamedTuple):
    """The shard and file in which a segment lies."""

    number: int
    shard: str
    path: str


class DeliveryPart(NamedTuple):
    """Columns whose samples lie at the same positions: runs (K, 3) of (index into `Delivery.places`, start, stop)."""

    columns: tuple[str, ...]
    runs: np.ndarray

    @property
    def num_samples(self) -> int:
        """Samples of the batch that the part belongs to."""
        return int((self.runs[:, 2] - self.runs[:, 1]).sum())


@dataclass(frozen=True)
class Delivery:
    """Samples that a reader receives, and where their payload lies."""

    ids: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()
    places: tuple[SegmentPlace, ...] = ()
    parts: tuple[DeliveryPart, ...] = ()
    lengths: dict[str, np.ndarray] = field(default_factory=dict)
    """(B,) int64 by column: tokens of columns whose payload is not delivered"""

    def to_bytes(self) -> bytes:
        unique, group_of = labels(self.groups)
        fields = {
            "count": len(self.ids),
            "groups": unique,
            "places": self.places,
            "parts": [part.columns for part in self.parts],
            "lengths": list(self.lengths),
        }
        arrays = {"ids": names_to_array(self.ids), "group_of": group_of}
        if self.versions:
            arrays["versions"] = versions_of(self.versions)
        arrays |= {f"runs{i}": smallest(part.runs) for i, part in enumerate(self.parts)}
        arrays |= {f"lengths{i}": smallest(lengths_B) for i, lengths_B in enumerate(self.lengths.values())}
        return pack(fields, arrays)

    @classmethod
    def from_bytes(cls, message: bytes) -> Delivery:
        fields, arrays = unpack(message)
        count = fields["count"]
        return cls(
            ids=array_to_names(arrays["ids"], count),
            groups=labelled(fields["groups"], arrays["group_of"]),
            versions=spans_of(np.broadcast_to(arrays["versions"], (count, 2))) if "versions" in arrays else (),
            places=tuple(SegmentPlace(*place) for place in fields["places"]),
            parts=tuple(
                DeliveryPart(tuple(columns), arrays[f"runs{i}"].astype(np.int64))
                for i, columns in enumerate(fields["parts"])
            ),
            lengths={name: arrays[f"lengths{i}"].astype(np.int64) for i, name in enumerate(fields["lengths"])},
        )


def labels(names: Sequence[str]) -> tuple[list[str], np.ndarray]:
    """Deduplicate names: (distinct names in order of appearance, index of each name's)."""
    unique = list(dict.fromkeys(names))
    index = {name: i for i, name in enumerate(unique)}
    return unique, smallest(np.fromiter(map(index.__getitem__, names), np.int64, len(names)))


def labelled(unique: Sequence[str], indices: np.ndarray) -> tuple[str, ...]:
    return tuple(map(unique.__getitem__, indices.tolist()))


def versions_of(spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Convert (oldest, newest) policy versions of B > 0 samples: (B, 2) int32, or (1, 2) if all are equal."""
    distinct = spans[:1] if spans.count(spans[0]) == len(spans) else spans
    return np.fromiter(chain.from_iterable(distinct), np.int32, 2 * len(distinct)).reshape(-1, 2)


def spans_of(versions: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Convert (B, 2) policy versions to (oldest, newest) of each sample."""
    if len(versions) and (versions == versions[0]).all():
        oldest, newest = versions[0].tolist()
        return ((oldest, newest),) * len(versions)
    return tuple(zip(versions[:, 0].tolist(), versions[:, 1].tolist(), strict=True))


def index_of_lengths(lengths: np.ndarray | None, distinct: list[np.ndarray]) -> int | None:
    """Index of equal lengths in `distinct`, to which they are added if they are new; None: no lengths."""
    if lengths is None:
        return None
    for i, known in enumerate(distinct):
        if np.array_equal(known, lengths):
            return i
    distinct.append(lengths)
    return len(distinct) - 1

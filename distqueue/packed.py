"""Packed batches: samples by id, their fields packed into columns (see `column.py`)."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from distqueue.column import Column


@dataclass(frozen=True, eq=False)
class PackedBatch:
    """B samples and their columns; groups and versions where they are known."""

    ids: tuple[str, ...]
    columns: dict[str, Column]
    groups: tuple[str, ...] = ()
    """group id per sample; (): unknown"""
    versions: tuple[tuple[int, int], ...] = ()
    """policy versions of each sample's (oldest, newest) token; (): unknown"""
    lengths: dict[str, list[int]] = field(default_factory=dict)
    """tokens per sample of the columns that a get named in `lengths`, whose payload it does not return"""

    def __post_init__(self) -> None:
        for what, names in (("id", self.ids), ("group", self.groups), ("column", self.columns)):
            if not all(issubclass(kind, str) for kind in set(map(type, names))):
                name = next(name for name in names if not isinstance(name, str))
                raise ValueError(f"{what} {name!r}: {type(name).__name__}; expected a str")
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("ids of a batch must be distinct; repeated: " + Counter(self.ids).most_common(1)[0][0])
        counts = {f"column {name!r}": len(column) for name, column in self.columns.items()}
        counts |= {f"lengths of {name!r}": len(lengths) for name, lengths in self.lengths.items()}
        counts |= {"groups": len(self.groups) or len(self), "versions": len(self.versions) or len(self)}
        for what, count in counts.items():
            if count != len(self):
                raise ValueError(f"{what}: {count} samples for {len(self)} ids")

    @classmethod
    def from_samples(
        cls,
        ids: Iterable[str],
        columns: Mapping[str, Column | Tensor | Sequence[Any]],
        groups: Iterable[str] = (),
        versions: Iterable[tuple[int, int]] = (),
    ) -> "PackedBatch":
        """Pack per-sample values: `{"tokens": [ids_L, ...], "reward": reward_B, "answer": ["42", ...]}`.

        A tensor (B, *row) is a dense column, a list of tensors (L_i, *trailing) a ragged one, lists of `str` or `dict`
        are text and metadata (as JSON). ValueError names the column and the sample that are invalid."""
        ids = tuple(ids)
        packed = {name: Column.pack(values, ids, name) for name, values in columns.items()}
        return cls(ids, packed, groups=tuple(groups), versions=tuple(versions))

    def select(self, rows: Sequence[int] | None = None, columns: Sequence[str] | None = None) -> "PackedBatch":
        """Select samples by row and columns by name; None keeps all. Views if the rows are consecutive."""
        names = self.columns if columns is None else columns
        for name in names:
            self.require(name)
        if rows is None:
            return replace(self, columns={name: self[name] for name in names})
        rows = [range(len(self))[row] for row in rows]
        return PackedBatch(
            ids=tuple(self.ids[row] for row in rows),
            columns={name: self[name].take(rows) for name in names},
            groups=tuple(self.groups[row] for row in rows) if self.groups else (),
            versions=tuple(self.versions[row] for row in rows) if self.versions else (),
            lengths={name: [lengths[row] for row in rows] for name, lengths in self.lengths.items()},
        )

    def labelled(self, groups: Sequence[str] = (), versions: Sequence[int | tuple[int, int]] = ()) -> "PackedBatch":
        """Replace group ids and policy versions (one per sample, or those of its oldest and newest token) if given."""
        if not groups and not versions:
            return self
        spans = tuple((version, version) if isinstance(version, int) else version for version in versions)
        for id, (oldest, newest) in zip(self.ids, spans, strict=False):
            if oldest > newest:
                raise ValueError(f"sample {id!r}: versions ({oldest}, {newest}); expected (oldest, newest)")
        return replace(self, groups=tuple(groups) or self.groups, versions=spans or self.versions)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns, offsets included."""
        return sum(column.nbytes for column in self.columns.values())

    def require(self, name: str) -> None:
        """ValueError, naming sample and column: the batch lacks the column."""
        if name not in self.columns:
            sample = f"sample {self.ids[0]!r}" if self.ids else "the empty batch"
            raise ValueError(f"column {name!r}: {sample} lacks it; it has {sorted(self.columns)}")

    def __getitem__(self, name: str) -> Column:
        self.require(name)
        return self.columns[name]

    def __len__(self) -> int:
        return len(self.ids)

"""The plain data that enters and leaves the sample table: what a reader selects, what it takes, what a call ended."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field

import numpy as np

Span = tuple[int, int]
"""Policy versions of a sample's oldest and newest token"""


@dataclass(frozen=True)
class Selection:
    """Select the samples of one batch: for which task, with which columns, how many, and which of those ready."""

    task: str
    """the stage that reads; it acknowledges what it was handed"""
    columns: Sequence[str]
    """a sample is ready once it holds all of them"""
    count: int | None = None
    """samples of the batch; None: any number, with `partial`"""
    _: KW_ONLY
    lengths: Sequence[str] = ()
    """further columns that a sample must hold; only its tokens in each are returned, as `PackedBatch.lengths`"""
    partial: bool = False
    """take what is ready, at least one sample and at most `count`, instead of waiting for all"""

    def __post_init__(self) -> None:
        for name, names in (("columns", self.columns), ("lengths", self.lengths)):
            if isinstance(names, str):
                raise ValueError(f"{name}={names!r}: expected a list of names of columns")
        object.__setattr__(self, "columns", tuple(self.columns))
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if not self.columns:
            raise ValueError("columns=(): expected the columns to read")
        if self.count is None and not self.partial:
            raise ValueError("expected count, or partial=True")
        if self.count is not None and self.count < 1:
            raise ValueError(f"count={self.count}: expected a positive number")

    @property
    def required(self) -> tuple[str, ...]:
        """The columns that a sample must hold."""
        return *self.columns, *self.lengths


@dataclass(frozen=True, eq=False)
class Taken:
    """B samples; leased ones are the oldest first."""

    ids: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    """"" for a sample without a group"""
    versions: np.ndarray = field(default_factory=lambda: np.empty((0, 2), np.int32))
    """(B, 2) int32: policy versions of the oldest and the newest token; (-1, -1) unknown"""
    rows: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))
    """(B,) int64: row numbers; a sample keeps its number as long as it lives"""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Ended:
    """The samples a call ended, and the segments it freed."""

    ids: tuple[str, ...] = ()
    segments: tuple[int, ...] = ()
    """segments without a live row left; ascending"""
    groups: tuple[str, ...] = field(default=(), compare=False)
    """of the samples, "" without one; known of lost samples only"""

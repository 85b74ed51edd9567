"""What goes into the table and what comes out of it: what a reader wants, what it gets, and what a call ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Span = tuple[int, int]
"""Policy versions of the oldest and the newest token of a sample"""


@dataclass(frozen=True)
class Want:
    """What a reader asks for: `count` samples, or as many as fit `token_budget`, whichever is reached first."""

    task: str
    columns: tuple[str, ...]
    count: int | None = None
    token_budget: int | None = None
    whole_groups: bool = False
    min_version: int | None = None
    """passes over samples whose oldest token is of an earlier policy version, or of none that is known"""
    partial: bool = False
    """takes what is ready, up to count or budget, rather than wait for all of it"""

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("columns=(): expected the columns to read")
        if self.count is None and self.token_budget is None and not self.partial:
            raise ValueError("expected count or token_budget")
        for name, value in (("count", self.count), ("token_budget", self.token_budget)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive number")


@dataclass(frozen=True, eq=False)
class Taken:
    """B samples that were leased, oldest first; whole groups one after the other."""

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    """"" where a sample has none"""
    versions: np.ndarray
    """(B, 2) int32: policy versions of the oldest and the newest token; (-1, -1) unknown"""
    rows: np.ndarray
    """(B,) int64: row numbers, which stay the samples' own as long as they live"""
    tokens: np.ndarray
    """(B,) int64: of the longest column wanted"""
    too_old: tuple[str, ...]
    """samples that were ready but older than min_version and come before the last one taken, at most TOO_OLD of them"""

    def __len__(self) -> int:
        return len(self.ids)

    def select(self, samples: np.ndarray | Sequence[int]) -> Taken:
        """These of the samples, in this order; what was too old stays said."""
        inside = np.asarray(samples, np.int64)
        return Taken(
            ids=tuple([self.ids[i] for i in inside.tolist()]),
            groups=tuple([self.groups[i] for i in inside.tolist()]),
            versions=self.versions[inside],
            rows=self.rows[inside],
            tokens=self.tokens[inside],
            too_old=self.too_old,
        )


@dataclass(frozen=True)
class Ended:
    """What a call brought to an end."""

    ids: tuple[str, ...] = ()
    segments: tuple[int, ...] = ()
    """segments of which no live row is left; ascending"""

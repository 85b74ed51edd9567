"""Defines what a source of prompts provides: rows by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True)
class Row:
    """One problem. `fields` are the other columns; a generator's hold `solution`, the text of a right response."""

    prompt: str | list[dict[str, Any]]
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RowCounts:
    """What became of the rows of a file that is evaluated. ``bad``: rows that cannot be used; ``unused``: those behind
    the first `rows`; ``too_long``: prompts longer than `data.max_prompt_length`; all others are ``evaluated``."""

    read: int
    bad: int
    unused: int
    too_long: int
    evaluated: int

    def describe(self) -> str:
        """Return the counts in words, with the key that decides on rows that are left out."""
        reasons = {
            "cannot be used (data.bad_rows)": self.bad,
            "behind the first rows that are used (eval.files rows)": self.unused,
            "longer than data.max_prompt_length (data.long_prompts)": self.too_long,
        }
        left_out = "".join(f", {count:,} {reason}" for reason, count in reasons.items() if count)
        return f"{self.read:,} rows read{left_out}, {self.evaluated:,} evaluated"


class Rows(Protocol):
    """Rows by index. Invariant: a row depends only on its index and on the arguments the object was created with.

    ``fields``: names of the fields that every row has.
    """

    fields: frozenset[str]

    @property
    def indices(self) -> Sequence[int] | None:
        """The rows to train on; None where every natural number is a row."""
        ...

    def row(self, index: int) -> Row: ...

    def name(self, index: int) -> str:
        """Return the name of a row for error messages."""
        ...

    def evaluation(self, count: int) -> list[Row]:
        """Return up to `count` held-out rows, the same on every call."""
        ...

"""Define what a source of prompts provides: rows by index."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


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


class Rows:
    """Rows by index, of a file or a generator. Invariant: a row depends only on its index and on the arguments that the
    object was created with; those of a generator are the config group `data` and the seed.

    Attributes:
        fields: names of the fields that every row has.
        indices: the rows to train on; None: every natural number is a row.
        digest: of a file's content; None: it is a generator.
        num_bad: number of rows of a file that cannot be used.
        usable, lengths: of a file, the indices of the rows that can be used, and the number of tokens of their prompts.
    """

    fields: frozenset[str] = frozenset()
    indices: Sequence[int] | None = None
    digest: str | None = None
    num_bad = 0
    usable: Sequence[int] = ()
    lengths: Sequence[int] = ()

    def row(self, index: int) -> Row:
        raise NotImplementedError

    def name(self, index: int) -> str:
        """Return the name of a row for error messages."""
        raise NotImplementedError

    def evaluation(self, count: int) -> list[Row]:
        """Return up to `count` held-out rows, the same on every call."""
        raise NotImplementedError

    def longest(self) -> Sequence[tuple[str, Row]]:
        """Return rows of a generator, by name, such that no row has a longer prompt than all of them."""
        raise NotImplementedError

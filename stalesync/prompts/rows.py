"""What a source of prompts offers: rows by index."""

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


class Rows(Protocol):
    """A row depends on its index and on what the object was made from, on nothing else."""

    @property
    def indices(self) -> Sequence[int] | None:
        """The rows to train on; None where every natural number is one."""
        ...

    def row(self, index: int) -> Row: ...

    def name(self, index: int) -> str:
        """The row as an error message calls it."""
        ...

    def evaluation(self, count: int) -> list[Row]:
        """Up to `count` rows to measure by, the same on every call."""
        ...

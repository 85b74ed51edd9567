"""Define what a source of prompts provides: rows by index."""

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from stalesync.prompts.config import DataConfig

HELD_OUT_ONE_IN = 10
"""Share of held-out problems, as its inverse, of a generator that draws from many"""


@dataclass(frozen=True)
class Row:
    """One problem. `fields` are the other columns; a generator's hold `solution`, the text of a right response. Raise
    ValueError for a prompt or an answer of another type."""

    prompt: str | list[dict[str, Any]]
    answer: str
    fields: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.prompt, (str, list)) and isinstance(self.answer, str)):
            raise ValueError(f"expected a text or a chat as prompt, and a text as answer: {self!r:.200}")


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


class Rows(ABC):
    """Rows by index, of a file or a generator. Invariant: a row depends only on its index and on the arguments that the
    object was created with; those of a generator are the config group `data` and the seed. ``fields``: names of the
    fields that every row has; ``indices``: the rows to train on; None: every natural number is a row; ``digest``: of a
    file's content; None: it is a generator; ``num_bad``: number of rows of a file that cannot be used; ``usable``,
    ``lengths``: of a file, the indices of the rows that can be used, and the number of tokens of their prompts."""

    fields: frozenset[str] = frozenset()
    indices: Sequence[int] | None = None
    digest: str | None = None
    num_bad = 0
    usable: Sequence[int] = ()
    lengths: Sequence[int] = ()

    @abstractmethod
    def row(self, index: int) -> Row: ...

    @abstractmethod
    def name(self, index: int) -> str: ...

    @abstractmethod
    def evaluation(self, count: int) -> list[Row]:
        """Return up to `count` held-out rows, the same on every call."""

    @abstractmethod
    def longest(self) -> Sequence[tuple[str, Row]]:
        """Return rows of a generator, by name, such that no row has a longer prompt than all of them."""


class GeneratedRows(Rows):
    """Rows of the built-in generator ``source``. Unless `longest` says otherwise, all prompts have the same length."""

    source = ""
    fields = frozenset({"solution"})

    def __init__(self, config: DataConfig, seed: int) -> None:
        self._seed = seed

    def name(self, index: int) -> str:
        return f"data.source={self.source!r} problem {index}"

    def longest(self) -> list[tuple[str, Row]]:
        return [(self.name(0), self.row(0))]


class DrawnRows(GeneratedRows):
    """An endless source of problems. ``stream``: names their noise. Invariants: a problem depends only on seed, index
    and the settings; `row` and `evaluation` have none in common, as a hash of its text assigns each to one of them."""

    stream = ""

    @abstractmethod
    def problem(self, rng: random.Random) -> Row:
        """Draw a problem, whose prompt is a text."""

    def row(self, index: int) -> Row:
        return self._draw(f"{self._seed}-{self.stream}-{index}", held_out=False)

    def evaluation(self, count: int) -> list[Row]:
        keys = (f"{self._seed}-{self.stream}-evaluation-{index}" for index in range(count))
        return [self._draw(key, held_out=True) for key in keys]

    def _draw(self, key: str, held_out: bool) -> Row:
        rng = random.Random(key)
        while True:
            row = self.problem(rng)
            assert isinstance(row.prompt, str)
            if (zlib.crc32(row.prompt.encode()) % HELD_OUT_ONE_IN == 0) == held_out:
                return row

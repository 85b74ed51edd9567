"""The columns that each row holds, and the tokens of each.

Invariants: a column keeps its bit of `held`; only ragged columns have an array of tokens, and a sample of
any other column counts 1."""

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from distqueue.samples.pages import Field, Pages

MAX_COLUMNS = 64


class Columns:
    """Columns of the rows in `pages`, numbered in the order in which they were first put."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.names: list[str] = []
        self.held = pages.field(np.uint64)
        """bit c: the row holds column c"""
        self.tokens: dict[int, Field] = {}
        """uint32 per row, for every ragged column"""

    def check_room(self, names: Iterable[str]) -> None:
        """ValueError: more than MAX_COLUMNS columns."""
        known = len(self.names)
        for name in names:
            known += name not in self.names
            if known > MAX_COLUMNS:
                raise ValueError(f"column {name!r}: expected at most {MAX_COLUMNS} columns in a queue")

    def mask(self, names: Iterable[str]) -> np.uint64:
        """The bits of these columns, without those that were never put."""
        return np.uint64(sum(1 << self.names.index(name) for name in set(names) if name in self.names))

    def known(self, names: Iterable[str]) -> bool:
        return all(name in self.names for name in names)

    def of(self, mask: int) -> list[str]:
        """The names of a mask's columns, sorted."""
        return sorted(name for c, name in enumerate(self.names) if int(mask) >> c & 1)

    def holding(self, slots: np.ndarray | slice, mask: np.uint64) -> np.ndarray:
        """Whether each row holds all columns of the mask."""
        return self.held.values[slots] & mask == mask

    def fill(self, slots: np.ndarray, positions: np.ndarray, columns: Mapping[str, np.ndarray | None]) -> None:
        """Add columns to rows; sample positions[k] of each column belongs to slots[k]."""
        for name, tokens in columns.items():
            is_new = name not in self.names
            if is_new:
                self.names.append(name)
            c = self.names.index(name)
            if tokens is not None and c not in self.tokens:
                self.tokens[c] = self._pages.field(np.uint32)
                if not is_new:  # an earlier put brought it as a dense column
                    self.tokens[c].values[self.holding(slice(None), np.uint64(1 << c))] = 1
            if c in self.tokens:
                self.tokens[c].values[slots] = 1 if tokens is None else np.asarray(tokens)[positions]
        self.held.values[slots] |= self.mask(columns)

    def lengths(self, slots: np.ndarray, names: Iterable[str]) -> np.ndarray:
        """(columns, B) int64: tokens of columns in rows that hold them."""
        fields = [self.tokens.get(self.names.index(name)) for name in names]
        return np.array([np.ones(len(slots)) if field is None else field.values[slots] for field in fields], np.int64)

    def holders(self, slots: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
        """Yield (column, the rows that hold it) for every ragged column."""
        for c in sorted(self.tokens):
            yield c, slots[self.holding(slots, np.uint64(1 << c))]

    def load_tokens(self, c: int, slots: np.ndarray, tokens: np.ndarray) -> None:
        """Restore the tokens of the rows that hold column c."""
        self.tokens[c] = self._pages.field(np.uint32)
        self.tokens[c].values[slots[self.holding(slots, np.uint64(1 << c))]] = tokens

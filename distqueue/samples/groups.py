"""Groups of rows: which rows belong to each group, and how many of its members have been put.

Groups are numbered in the order of their first member's put, so the order of numbers is oldest first.

Invariants: with a group size, `members` of a live group are its live rows in the order of their first put; a group ends
with its last live row once all its members have been put (without a group size: with its last live row).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from distqueue.samples.names import Names
from distqueue.samples.pages import NONE, Pages


class Groups:
    """The groups of the rows in `rows`; `size`: members of every group, None: unknown."""

    def __init__(self, rows: Pages, size: int | None, page_rows: int) -> None:
        self.size = size
        self.pages = Pages(page_rows)
        self.names = Names()
        self.next = 0
        """number of the next new group"""
        self.put = self.pages.field(np.int32)
        """members put so far"""
        self.live = self.pages.field(np.int32)
        """members that are live"""
        self.members = self.pages.field(np.int32, (size or 0,))
        """slot + 1 of each live member; 0: not put yet, or ended"""
        self._of_row = rows.field(np.int32)
        """slot + 1 of the row's group; 0: none"""

    def of(self, rows: np.ndarray) -> np.ndarray:
        """Group slot of each row, NONE where it has none."""
        return self._of_row.values[rows].astype(np.int64) - 1

    def texts(self, rows: np.ndarray) -> tuple[str, ...]:
        """Group of each row; "" where it has none."""
        groups = self.of(rows)
        distinct, which = np.unique(groups, return_inverse=True)
        known = distinct[distinct != NONE]
        texts = ("",) * (len(distinct) - len(known)) + self.names.texts(known)
        return tuple([texts[k] for k in which.tolist()])

    def among(self, rows: np.ndarray) -> np.ndarray:
        """The distinct groups of these rows."""
        groups = np.unique(self._of_row.values[rows]).astype(np.int64) - 1
        return groups[groups != NONE]

    def open(self, names: Sequence[str], numbers: np.ndarray) -> np.ndarray:
        """Create groups without members. Returns their slots."""
        slots = self.pages.add(numbers)
        self.put.values[slots] = self.live.values[slots] = 0
        self.members.values[slots] = 0
        self.names.insert(names, slots)
        return slots

    def join(self, rows: np.ndarray, names: Sequence[str], *, slots: np.ndarray, of_row: np.ndarray) -> None:
        """Add new rows to the groups names[of_row] (NONE: no group). `slots` are those of the names; NONE: the group
        does not exist and is created."""
        self._of_row.values[rows] = 0
        rows, of_row = rows[of_row != NONE], of_row[of_row != NONE]
        if not len(rows):
            return
        wanted, first = np.unique(of_row, return_index=True)
        wanted = wanted[np.argsort(first)]
        slots, new = slots.copy(), wanted[slots[wanted] == NONE]
        slots[new] = self.open([names[k] for k in new.tolist()], np.arange(self.next, self.next + len(new)))
        self.next += len(new)
        self.add_members(rows, slots[of_row])

    def add_members(self, rows: np.ndarray, groups: np.ndarray) -> None:
        """Add row i to the live group groups[i]."""
        if self.size:
            order = np.argsort(groups, kind="stable")
            ranked = groups[order]
            starts = np.flatnonzero(np.diff(ranked, prepend=-1))
            rank = np.arange(len(ranked)) - np.repeat(starts, np.diff(starts, append=len(ranked)))
            self.members.values[ranked, self.put.values[ranked] + rank] = rows[order] + 1
        distinct, counts = np.unique(groups, return_counts=True)
        self.put.values[distinct] += counts.astype(np.int32)
        self.live.values[distinct] += counts.astype(np.int32)
        self._of_row.values[rows] = groups + 1

    def leave(self, rows: np.ndarray) -> None:
        """Remove ended rows from their groups, which continue without them until `end_empty`."""
        groups = self.of(rows)
        rows, groups = rows[groups != NONE], groups[groups != NONE]
        if self.size:
            place = (self.members.values[groups] == rows[:, None] + 1).argmax(1)
            self.members.values[groups, place] = 0
        distinct, counts = np.unique(groups, return_counts=True)
        self.live.values[distinct] -= counts.astype(np.int32)

    def end_empty(self, groups: np.ndarray) -> None:
        """End groups that have no live row and expect no further member."""
        is_whole = self.put.values[groups] == self.size if self.size else True
        ended = groups[(self.live.values[groups] == 0) & is_whole]
        if len(ended):
            self.names.remove(ended)
            self.pages.remove(ended)

    def num_incomplete(self) -> int:
        """Count live groups of which a member has not been put."""
        return int(np.count_nonzero(self.put.values[self.pages.live_slots()] < (self.size or 0)))

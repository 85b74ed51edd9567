"""Views: the rows that are ready for a task and a set of columns, updated at every event instead of searched for.

A view keeps a flag per row (and per group) and two sums of them: their count, and their count per page. So a comparison
decides whether a count can be served, and a search reads only pages that contain ready rows.

Invariants (the stateful test recounts them after every step): a row's flag is set exactly while it is live, open for
the task and holds all the columns; a group's, while all its members have been put, at least one of them is not
acknowledged by the task, and all of those are ready; the sums are those of the flags.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from distqueue.samples.claims import Claims
from distqueue.samples.columns import Columns
from distqueue.samples.groups import Groups
from distqueue.samples.pages import Pages

MAX_VIEWS = 64
"""Views kept; beyond this the least recently used one is dropped, and rebuilt if it is used again"""
MIN_CHUNK = 4096
"""Units that a search reads at a time after the first chunk, at least"""


class Ready:
    """Flags of the ready numbers of `pages`, and their sums."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.flags = pages.field(np.bool_)
        self.per_page = pages.page_field(np.int32)
        self.count = 0

    def close(self) -> None:
        """Free the flags."""
        self._pages.forget(self.flags, self.per_page)

    def update(self, slots: np.ndarray, flags: np.ndarray) -> None:
        """Set the flags of distinct slots."""
        steps = flags.astype(np.int8) - self.flags.values[slots]
        self.flags.values[slots] = flags
        self.per_page.values += self._pages.per_page(slots, steps)
        self.count += int(steps.sum(dtype=np.int64))

    def oldest(self, needed: int) -> Iterator[np.ndarray]:
        """Yield ready slots, oldest first, in chunks of at least `needed` as long as there are as many."""
        pages = self._pages.in_order()
        pages = pages[self.per_page.values[pages] > 0]
        ends, start, chunk = np.cumsum(self.per_page.values[pages]), 0, max(needed, 1)
        while start < len(pages):
            before = ends[start - 1] if start else 0
            stop = int(np.searchsorted(ends, before + chunk)) + 1
            yield self._pages.marked(self.flags, pages[start:stop])
            start, chunk = stop, max(chunk, MIN_CHUNK)


class View:
    """The rows and groups that are ready for `task` with the columns `names`. Slots passed in are distinct."""

    def __init__(
        self, task: int, names: Sequence[str], *, rows: Pages, columns: Columns, claims: Claims, groups: Groups
    ) -> None:
        self.task, self.mask = task, columns.mask(names)
        self.columns = tuple(sorted(columns.names.index(name) for name in set(names)))
        self._rows, self._held, self._claims, self._groups = rows, columns, claims, groups
        self.rows, self.groups = Ready(rows), Ready(groups.pages)
        self.refresh(rows.live_slots())
        if groups.size:
            self.refresh_groups(groups.pages.live_slots())

    def close(self) -> None:
        """Free the flags."""
        self.rows.close()
        self.groups.close()

    def refresh(self, rows: np.ndarray) -> None:
        """Update rows of which something has changed."""
        flags = (
            self._rows.live.values[rows] & self._claims.is_open(self.task, rows) & self._held.holding(rows, self.mask)
        )
        changed = flags != self.rows.flags.values[rows]
        self.rows.update(rows[changed], flags[changed])

    def refresh_groups(self, groups: np.ndarray) -> None:
        """Update groups of which a member has changed; the members' own flags are up to date."""
        members, counts = self.members(groups)
        ready = counts & self.rows.flags.values[members]
        flags = (self._groups.put.values[groups] == self._groups.size) & counts.any(1) & (ready == counts).all(1)
        self.groups.update(groups, flags)

    def members(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(rows (G, size) of the groups, which of them count: neither ended nor acknowledged by the task)."""
        members = self._groups.members.values[groups].astype(np.int64) - 1
        counts = members >= 0
        members = np.maximum(members, 0)
        return members, counts & ~self._claims.is_acked(self.task, members)

    def row_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Tokens of rows that hold the columns: of the longest one."""
        return self._held.longest(rows, self.columns)

    def group_tokens(self, groups: np.ndarray) -> np.ndarray:
        """Tokens of groups that are ready: of their members that count."""
        members, counts = self.members(groups)
        tokens = np.zeros(counts.shape, np.int64)
        tokens[counts] = self.row_tokens(members[counts])
        return tokens.sum(1)


class Views:
    """The views in use, by task and set of columns."""

    def __init__(self, rows: Pages, *, columns: Columns, claims: Claims, groups: Groups) -> None:
        self._rows, self._columns, self._claims, self._groups = rows, columns, claims, groups
        self._views: OrderedDict[tuple[int, tuple[str, ...]], View] = OrderedDict()

    def get(self, task: int, names: Sequence[str]) -> View | None:
        """The view of a task and columns; None: a column was never put, so nothing is ready."""
        key = task, tuple(names)
        if key not in self._views:
            if not self._columns.known(names):
                return None
            self._views[key] = View(
                task, names, rows=self._rows, columns=self._columns, claims=self._claims, groups=self._groups
            )
            if len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)[1].close()
        self._views.move_to_end(key)
        return self._views[key]

    def refresh(self, rows: np.ndarray, task: int | None = None, filled: np.uint64 | None = None) -> None:
        """Update rows in all views, or in those of one task, or in those that read one of the filled columns."""
        if not len(rows):
            return
        views = [view for view in self._views.values() if task is None or view.task == task]
        views = [view for view in views if filled is None or view.mask & filled]
        for view in views:
            view.refresh(rows)
        if self._groups.size and views:
            groups = self._groups.among(rows)
            for view in views:
                view.refresh_groups(groups)

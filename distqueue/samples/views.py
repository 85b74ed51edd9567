"""Views: the rows that are ready for a task and a set of columns, updated at every event instead of searched for.

A view keeps a flag per row and two sums of them: their count, and their count per page. So a comparison decides whether
a count can be served, and a search reads only pages that contain ready rows.

Invariants (the stateful test recounts them after every step): a row's flag is set exactly while it is live, open for
the task and holds all the columns; the sums are those of the flags."""

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from distqueue.samples.claims import Claims
from distqueue.samples.columns import Columns
from distqueue.samples.pages import Pages

MAX_VIEWS = 64
"""Views kept; beyond this the least recently used one is dropped, and rebuilt if it is used again"""


class View:
    """The rows that are ready for `task` with the columns `names`. Slots passed in are distinct."""

    def __init__(self, task: int, names: Sequence[str], *, rows: Pages, columns: Columns, claims: Claims) -> None:
        self.task, self.mask = task, columns.mask(names)
        self._rows, self._held, self._claims = rows, columns, claims
        self._flags, self._per_page = rows.field(np.bool_), rows.page_field(np.int32)
        self.count = 0
        """rows that are ready"""
        self.refresh(rows.live_slots())

    def close(self) -> None:
        self._rows.forget(self._flags, self._per_page)

    def refresh(self, rows: np.ndarray) -> None:
        """Update rows of which something has changed."""
        flags = (
            self._rows.live.values[rows] & self._claims.is_open(self.task, rows) & self._held.holding(rows, self.mask)
        )
        changed = flags != self._flags.values[rows]
        rows, flags = rows[changed], flags[changed]
        steps = np.where(flags, 1, -1)
        self._flags.values[rows] = flags
        self._per_page.values += self._rows.per_page(rows, steps)
        self.count += int(steps.sum())

    def oldest(self, count: int) -> np.ndarray:
        """The first `count` ready rows, oldest first, or all if there are fewer."""
        pages = self._rows.in_order()
        pages = pages[self._per_page.values[pages] > 0]
        enough = int(np.searchsorted(np.cumsum(self._per_page.values[pages]), count)) + 1
        return self._rows.marked(self._flags, pages[:enough])[:count]


class Views:
    """The views in use, by task and set of columns."""

    def __init__(self, rows: Pages, *, columns: Columns, claims: Claims) -> None:
        self._rows, self._columns, self._claims = rows, columns, claims
        self._views: OrderedDict[tuple[int, tuple[str, ...]], View] = OrderedDict()

    def get(self, task: int, names: Sequence[str]) -> View | None:
        """The view of a task and columns; None: a column was never put, so nothing is ready."""
        key = task, tuple(names)
        if key not in self._views:
            if not self._columns.known(names):
                return None
            self._views[key] = View(task, names, rows=self._rows, columns=self._columns, claims=self._claims)
            if len(self._views) > MAX_VIEWS:
                self._views.popitem(last=False)[1].close()
        self._views.move_to_end(key)
        return self._views[key]

    def refresh(self, rows: np.ndarray, task: int | None = None, filled: np.uint64 | None = None) -> None:
        """Update rows in all views, or in those of one task, or in those that read one of the filled columns."""
        if not len(rows):
            return
        for view in self._views.values():
            if (task is None or view.task == task) and (filled is None or view.mask & filled):
                view.refresh(rows)

"""What is ready for a task that reads certain columns, kept up to date at every event rather than searched for.

A view keeps a flag per row (and per group) and three sums of them: how many, how many tokens, and how many per page. So
whether a request can be served is two comparisons, and a search looks only into pages in which it will find something.

Invariants (the stateful test recounts them after every step): a row's flag is set exactly while it is live, open for
the task and holds all the columns; a group's, while all its members have been put, one of them is not acknowledged by
the task and all of those are ready; the sums are those of the flags.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from distqueue.samples.claims import Claims
from distqueue.samples.columns import Columns
from distqueue.samples.groups import Groups
from distqueue.samples.pages import Pages

MOST_VIEWS = 64
"""The view asked for longest ago is forgotten beyond this many, and built again if it is asked for"""
FEWEST_SEARCHED = 4096


class Ready:
    """Flags of what is ready among the numbers of `pages`, and their sums."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self.flags = pages.field(np.bool_)
        self.per_page = pages.page_field(np.int32)
        self.count = self.tokens = 0

    def close(self) -> None:
        self._pages.forget(self.flags, self.per_page)

    def update(self, slots: np.ndarray, flags: np.ndarray, more_tokens: int) -> None:
        """Sets the flags of distinct slots; the tokens of all that is ready are so many more by it."""
        steps = flags.astype(np.int8) - self.flags.values[slots]
        self.flags.values[slots] = flags
        self.per_page.values += self._pages.per_page(slots, steps)
        self.count += int(steps.sum(dtype=np.int64))
        self.tokens += more_tokens

    def oldest(self, needed: int) -> Iterator[np.ndarray]:
        """What is ready, oldest first, in chunks that each hold at least as much as is needed as long as there is."""
        pages = self._pages.in_order()
        pages = pages[self.per_page.values[pages] > 0]
        ends, start, chunk = np.cumsum(self.per_page.values[pages]), 0, max(needed, 1)
        while start < len(pages):
            before = ends[start - 1] if start else 0
            stop = int(np.searchsorted(ends, before + chunk)) + 1
            yield self._pages.marked(self.flags, pages[start:stop])
            start, chunk = stop, max(chunk, FEWEST_SEARCHED)


class View:
    """What of `columns` is ready for `task`. Slots given are distinct."""

    def __init__(
        self, task: int, names: Sequence[str], rows: Pages, columns: Columns, claims: Claims, groups: Groups
    ) -> None:
        self.task, self.mask = task, columns.mask(names)
        self.columns = tuple(sorted(columns.names.index(name) for name in set(names)))
        self._rows, self._held, self._claims, self._groups = rows, columns, claims, groups
        self.rows, self.groups = Ready(rows), Ready(groups.pages)
        self._group_tokens = groups.pages.field(np.int64)
        self.refresh(rows.live_slots())
        if groups.size:
            self.refresh_groups(groups.pages.live_slots())

    def close(self) -> None:
        self.rows.close()
        self.groups.close()
        self._groups.pages.forget(self._group_tokens)

    def refresh(self, rows: np.ndarray) -> None:
        """Looks again at rows of which something has changed."""
        flags = (
            self._rows.live.values[rows] & self._claims.is_open(self.task, rows) & self._held.holding(rows, self.mask)
        )
        changed = flags != self.rows.flags.values[rows]
        rows, flags = rows[changed], flags[changed]
        if len(rows):
            tokens = self.row_tokens(rows)
            self.rows.update(rows, flags, int(np.where(flags, tokens, -tokens).sum()))

    def refresh_groups(self, groups: np.ndarray) -> None:
        """Looks again at groups of which a member has changed; the members' own flags are right already."""
        members, counts = self.members(groups)
        ready = counts & self.rows.flags.values[members]
        flags = (self._groups.put.values[groups] == self._groups.size) & counts.any(1) & (ready == counts).all(1)
        tokens = np.zeros(len(groups), np.int64)
        tokens[flags] = np.where(
            counts[flags], self.row_tokens(members[flags].ravel()).reshape(-1, counts.shape[1]), 0
        ).sum(1)
        more = int((tokens - self._group_tokens.values[groups]).sum())
        self._group_tokens.values[groups] = tokens
        self.groups.update(groups, flags, more)

    def members(self, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows (G, size) of the groups, and which of them count: neither ended nor acknowledged by the task."""
        members = self._groups.members.values[groups].astype(np.int64) - 1
        counts = members >= 0
        members = np.maximum(members, 0)
        return members, counts & ~self._claims.is_acked(self.task, members)

    def row_tokens(self, rows: np.ndarray) -> np.ndarray:
        return self._held.longest(rows, self.columns)

    def group_tokens(self, groups: np.ndarray) -> np.ndarray:
        """Tokens of groups that are ready."""
        return self._group_tokens.values[groups]


class Views:
    """The view of every task and set of columns that was asked for."""

    def __init__(self, rows: Pages, columns: Columns, claims: Claims, groups: Groups) -> None:
        self._rows, self._columns, self._claims, self._groups = rows, columns, claims, groups
        self._views: OrderedDict[tuple[int, int], View] = OrderedDict()
        self._asked: dict[tuple[int, tuple[str, ...]], tuple[int, int]] = {}

    def __iter__(self) -> Iterator[View]:
        return iter(self._views.values())

    def get(self, task: int, names: tuple[str, ...]) -> View | None:
        """None where a column was never put: nothing is ready."""
        key = self._asked.get((task, names))
        if key is None:
            if not self._columns.known(names):
                return None
            key = (task, int(self._columns.mask(names)))
            self._asked[task, names] = key
        if key not in self._views:
            self._views[key] = View(task, names, self._rows, self._columns, self._claims, self._groups)
            if len(self._views) > MOST_VIEWS:
                self._forget_oldest()
        self._views.move_to_end(key)
        return self._views[key]

    def refresh(self, rows: np.ndarray, task: int | None = None, filled: np.uint64 | None = None) -> None:
        """Looks again at rows; for this task only, and for readers of a filled column only, where these are given."""
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

    def _forget_oldest(self) -> None:
        key, view = self._views.popitem(last=False)
        view.close()
        self._asked = {asked: known for asked, known in self._asked.items() if known != key}

"""All tables of a sample table, and the events that touch more than one of them.

Rows are numbered in the order of their first put, and a number is never given twice. A row lives in a slot of `pages`;
everything about it is in fields of that slot, kept by the table whose idea it is.
"""

from __future__ import annotations

import numpy as np

from distqueue.samples.claims import Claims
from distqueue.samples.columns import Columns
from distqueue.samples.endings import Endings
from distqueue.samples.face import Ended
from distqueue.samples.groups import Groups
from distqueue.samples.names import NameIndex, Names
from distqueue.samples.pages import Pages
from distqueue.samples.segments import Segments
from distqueue.samples.views import Views

UNKNOWN = -1
"""No policy version is known"""


class State:
    def __init__(self, tasks: int, lease_s: float, group_size: int | None, page_rows: int, remembered: int) -> None:
        self.page_rows = page_rows
        self.pages = Pages(page_rows)
        self.ids = NameIndex()
        self.next_row = 0
        self.born_s = self.pages.field(np.float64)
        self.versions = self.pages.field(np.int32, (2,))
        self.columns = Columns(self.pages)
        self.segments = Segments(self.pages, page_rows)
        self.claims = Claims(self.pages, tasks, lease_s)
        self.groups = Groups(self.pages, group_size, page_rows)
        self.endings = Endings(remembered)
        self.views = Views(self.pages, self.columns, self.claims, self.groups)

    @property
    def nbytes(self) -> int:
        parts = (self.pages, self.ids, self.segments.pages, self.groups, self.endings)
        return sum(part.nbytes for part in parts)

    def create(self, names: Names, numbers: np.ndarray, born_s: np.ndarray | float) -> np.ndarray:
        """New rows that hold nothing yet. Returns their slots."""
        slots = self.pages.add(numbers)
        self.born_s.values[slots] = born_s
        self.versions.values[slots] = UNKNOWN
        self.columns.held.values[slots] = 0
        self.segments.part_count.values[slots] = 0
        self.claims.start(slots)
        self.ids.insert(names, slots)
        return slots

    def widen_versions(self, slots: np.ndarray, versions: np.ndarray) -> None:
        """A row's versions span what they did and what came with a put; unknown ones say nothing."""
        oldest, newest = self.versions.values[slots].T
        came_first, came_last = np.asarray(versions, np.int32).T
        first = np.where(came_first == UNKNOWN, oldest, np.minimum(oldest, came_first))
        self.versions.values[slots, 0] = np.where(oldest == UNKNOWN, came_first, first)
        self.versions.values[slots, 1] = np.maximum(newest, came_last)

    def end(self, slots: np.ndarray, reason: str) -> Ended:
        """Ends distinct live rows under a name."""
        if not len(slots):
            return Ended()
        texts = self.ids.texts(slots)
        names = self.ids.names(texts)
        freed = self.segments.release(slots)
        self.claims.end(slots)
        self.pages.remove(slots)
        self.groups.leave(slots)
        self.views.refresh(slots)
        self.groups.end_empty(self.groups.among(slots))
        self.ids.remove(names, slots)
        self.endings.add(names, reason)
        return Ended(texts, freed)

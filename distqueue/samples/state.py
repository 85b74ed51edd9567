"""The state of a sample table: all its parts, and the events that change more than one of them.

Rows are numbered in the order of their first put, and numbers are never reused. A row occupies a slot of `pages`; its
data is in fields of that slot, each owned by the part it belongs to."""

from collections.abc import Iterable, Sequence
from itertools import repeat, tee

import numpy as np

from distqueue.samples.claims import Claims
from distqueue.samples.columns import Columns
from distqueue.samples.endings import Endings
from distqueue.samples.names import NameTable, Texts
from distqueue.samples.pages import Pages
from distqueue.samples.segments import Segments
from distqueue.samples.types import Ended
from distqueue.samples.views import Views

UNKNOWN = -1
"""The policy version is unknown"""


class State:
    def __init__(self, *, tasks: int, lease_s: float, page_rows: int, remembered: int) -> None:
        self.page_rows = page_rows
        self.pages = Pages(page_rows)
        self.ids = NameTable()
        self.next_row = 0
        self.born_s = self.pages.field(np.float64)
        self.versions = self.pages.field(np.int32, (2,))
        self.columns = Columns(self.pages)
        self.segments = Segments(self.pages, page_rows)
        self.claims = Claims(self.pages, tasks, lease_s)
        self.groups = Texts()
        self.endings = Endings(remembered)
        self.views = Views(self.pages, columns=self.columns, claims=self.claims)

    def create(
        self, ids: Sequence[str], numbers: np.ndarray, born_s: np.ndarray | float, groups: Iterable[str] = ()
    ) -> np.ndarray:
        """Create rows without columns. `groups`: of each, "" for none; (): they have none. Returns their slots."""
        slots = self.pages.add(numbers)
        self.born_s.values[slots] = born_s
        self.versions.values[slots] = UNKNOWN
        self.columns.held.values[slots] = 0
        self.segments.part_count.values[slots] = 0
        self.claims.start(slots)
        self.ids.insert(ids, slots)
        groups = groups or repeat("", len(ids))
        texts: dict[str, str] = {}  # equal ones are one object; `sys.intern` would grow a table that never shrinks
        self.groups.set(slots, map(texts.setdefault, *tee(groups)))
        return slots

    def widen_versions(self, slots: np.ndarray, versions: np.ndarray) -> None:
        """Extend the rows' spans of versions by those of a put; unknown versions change nothing."""
        oldest, newest = self.versions.values[slots].T
        put_oldest, put_newest = np.asarray(versions, np.int32).T
        merged = np.where(put_oldest == UNKNOWN, oldest, np.minimum(oldest, put_oldest))
        self.versions.values[slots, 0] = np.where(oldest == UNKNOWN, put_oldest, merged)
        self.versions.values[slots, 1] = np.maximum(newest, put_newest)

    def end(self, slots: np.ndarray, reason: str) -> Ended:
        """End distinct live rows for a reason."""
        if not len(slots):
            return Ended()
        freed = self.segments.release(slots)
        self.claims.end(slots)
        self.pages.remove(slots)
        self.groups.clear(slots)
        self.views.refresh(slots)
        ids = self.ids.remove(slots)
        self.endings.add(ids, reason)
        return Ended(ids, freed)

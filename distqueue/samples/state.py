"""The state of a sample table: all its parts, the events that change more than one of them, and the slots of ids.

Rows are numbered in the order of their first put, and numbers are never reused. A row occupies a slot of `pages`; its
data is in fields of that slot, each owned by the part it belongs to."""

from collections.abc import Iterable, Sequence
from itertools import repeat, tee

import numpy as np

from distqueue.errors import LOST, SamplesLost
from distqueue.samples.claims import Claims
from distqueue.samples.columns import Columns
from distqueue.samples.endings import Endings
from distqueue.samples.names import NameTable, Texts
from distqueue.samples.pages import NONE, Pages
from distqueue.samples.segments import RowSegments
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
        self.segments = RowSegments(self.pages, page_rows)
        self.claims = Claims(self.pages, tasks, lease_s)
        self.groups = Texts()
        self.endings = Endings(remembered)
        self.views = Views(self.pages, columns=self.columns, claims=self.claims)

    def create(
        self, ids: Sequence[str], numbers: np.ndarray, born_s: np.ndarray | float, groups: Iterable[str] = ()
    ) -> np.ndarray:
        """Create rows without columns. `groups`: of each, "" for none; (): they have none. Return their slots."""
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

    # ---- ids of a caller, whose errors name the sample

    def ever_put(self, ids: Iterable[str], task: tuple[int, str] | None = None) -> np.ndarray:
        """Distinct slots of the ids that are alive. ValueError: an id that is neither alive nor remembered, or that was
        never handed to the task (number, name)."""
        distinct = list(dict.fromkeys(ids))
        slots = self.ids.find(distinct)
        absent = [distinct[i] for i in np.flatnonzero(slots == NONE).tolist()]
        for id, ending in zip(absent, self.endings.find(absent).tolist(), strict=True):
            if ending == NONE:
                raise ValueError(f"sample {id!r}: never put, or ended long ago")
        if task is not None:
            never = (slots != NONE) & (self.claims.handed[task[0]].values[slots] == 0)
            if never.any():
                id = distinct[int(never.argmax())]
                raise ValueError(f"sample {id!r}: acknowledged by task {task[1]!r}, which never received it")
        return slots[slots != NONE]

    def live(self, ids: Sequence[str]) -> np.ndarray:
        """Slot per id. ValueError: a sample that is not alive, with how it ended; SamplesLost if all that are not alive
        were lost, with their ids."""
        slots = self.ids.find(ids)
        absent = [ids[i] for i in np.flatnonzero(slots == NONE).tolist()]
        if absent:
            endings = self.endings.find(absent).tolist()
            reasons = ["never put" if ending == NONE else self.endings.reason(ending) for ending in endings]
            others = [i for i, reason in enumerate(reasons) if not reason.startswith(LOST)]
            first = others[0] if others else 0
            message = f"sample {absent[first]!r}: {reasons[first]}"
            raise ValueError(message) if others else SamplesLost(absent, message)
        return slots

    def claimable(self, ids: Iterable[str], task: tuple[int, str]) -> np.ndarray:
        """Distinct slots of the ids. ValueError: a sample that is not alive, or that the task (number, name) holds or
        has acknowledged."""
        distinct = list(dict.fromkeys(ids))
        slots = self.live(distinct)
        taken = ~self.claims.is_open(task[0], slots)
        if taken.any():
            which = int(taken.argmax())
            acked = self.claims.is_acked(task[0], slots[[which]])[0]
            how = "acknowledged" if acked else "leased"
            raise ValueError(f"sample {distinct[which]!r}: task {task[1]!r} has {how} it already")
        return slots

    def holding(self, ids: Sequence[str], columns: Iterable[str]) -> np.ndarray:
        """Slot per id. ValueError, naming sample and column: one that is not alive, or lacks a column."""
        slots = self.live(ids)
        columns, held = tuple(columns), self.columns
        lacks = ~held.holding(slots, held.mask(columns)) | (not held.known(columns))
        if lacks.any():
            slot = slots[[lacks.argmax()]]
            has = held.of(held.held.values[slot[0]])
            name = next(name for name in columns if name not in has)
            raise ValueError(f"sample {self.ids.of(slot)[0]!r} lacks column {name!r}; it has {has}")
        return slots

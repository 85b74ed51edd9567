"""Puts: look up a batch's names once, then refuse or store the batch as a whole.

Invariants: `check` changes nothing, and `store` stores every batch that passes it; a sample that was dropped before is
late: it is not stored, while the others keep their positions in the segment."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from distqueue.messages import names_to_array
from distqueue.samples.endings import DONE
from distqueue.samples.pages import NONE
from distqueue.samples.segments import MAX_SEGMENT
from distqueue.samples.state import State


class PutBatch:
    """B samples of a put, looked up in the table."""

    def __init__(self, state: State, ids: Sequence[str], groups: Sequence[str]) -> None:
        """`groups`: of each sample, "" if the put names none; (): of all.

        ValueError: an id twice, or a name with a NUL; UnicodeEncodeError: one that UTF-8 cannot encode."""
        assert not groups or len(groups) == len(ids), f"{len(groups)} groups for {len(ids)} ids"
        if len(set(ids)) != len(ids):
            raise ValueError("ids of a batch must be distinct; repeated: " + Counter(ids).most_common(1)[0][0])
        names_to_array([*ids, *groups])  # checks that they can be sent and stored
        self._state, self.ids, self.groups = state, ids, groups
        self.slots = state.ids.find(ids)
        """(B,) int64; NONE: the sample is not alive"""
        is_absent = self.slots == NONE
        self.endings = np.full(len(ids), NONE, np.int32)
        """(B,) code of the reason for which the sample ended before; NONE: it did not"""
        self.endings[is_absent] = state.endings.find([ids[i] for i in np.flatnonzero(is_absent).tolist()])
        self.late = is_absent & (self.endings != NONE)
        self.new = is_absent & (self.endings == NONE)

    def check(self, columns: Sequence[str]) -> None:
        """ValueError: a column put twice or one too many, a sample that is already done, a group that changes."""
        state = self._state
        state.columns.check_room(columns)
        mask, alive = state.columns.mask(columns), np.flatnonzero(self.slots != NONE)
        slots = self.slots[alive]
        invalid = (self.endings == state.endings.code(DONE)) & self.late
        invalid[alive] |= state.columns.held.values[slots] & mask != 0
        if self.groups:
            known = zip([self.groups[i] for i in alive.tolist()], state.groups.of(slots), strict=True)
            changes = (group not in ("", earlier) for group, earlier in known)
            invalid[alive] |= np.fromiter(changes, np.bool_, len(alive))
        if invalid.any():
            raise self._invalid(int(invalid.argmax()), mask)

    def store(
        self, columns: Mapping[str, np.ndarray | None], *, segment: int, versions: np.ndarray | None, now_s: float
    ) -> tuple[str, ...]:
        """Create the new rows and add the columns to all rows but the late ones. Return the ids that are late."""
        state = self._state
        assert 0 <= segment <= MAX_SEGMENT and not state.segments.is_live(segment), f"segment={segment}: taken"
        new, slots = np.flatnonzero(self.new), self.slots.copy()
        if len(new):
            numbers = np.arange(state.next_row, state.next_row + len(new))
            ids, groups = ([names[i] for i in new.tolist()] if names else [] for names in (self.ids, self.groups))
            slots[new] = state.create(ids, numbers, now_s, groups)
            state.next_row += len(new)
        kept = np.flatnonzero(slots != NONE)
        slots = slots[kept]
        if versions is not None:
            state.widen_versions(slots, versions[kept])
        if columns and len(kept):
            state.columns.fill(slots, kept, columns)
            filled = state.columns.mask(columns)
            state.segments.open(np.array([segment]), np.array([filled]))
            state.segments.append(slots, np.full(len(slots), segment), kept)
            state.views.refresh(slots, filled=filled)
        return tuple(self.ids[i] for i in np.flatnonzero(self.late).tolist())

    def _invalid(self, i: int, mask: np.uint64) -> ValueError:
        id, columns = self.ids[i], self._state.columns
        if self.endings[i] != NONE:
            return ValueError(f"sample {id!r}: every task has acknowledged it; no column can be put to it any more")
        if twice := columns.of(columns.held.values[int(self.slots[i])] & mask):
            return ValueError(f"sample {id!r}: column {twice[0]!r} exists already")
        known = self._state.groups.of(self.slots[[i]])[0]
        return ValueError(f"sample {id!r}: group {self.groups[i]!r}, but it was put in group {known!r}")

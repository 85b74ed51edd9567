"""Puts: look up a batch's names once, then refuse or store the batch as a whole.

Invariants: `check` changes nothing, and `store` stores every batch that passes it; a sample that was dropped before is
late: it is not stored, while the others keep their positions in the segment."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from distqueue.messages import names_to_array
from distqueue.samples.endings import DONE
from distqueue.samples.pages import NONE
from distqueue.samples.segments import MAX_SEGMENT
from distqueue.samples.state import State


@dataclass(frozen=True, eq=False)
class PutBatch:
    """B samples of a put, looked up in the table."""

    ids: Sequence[str]
    slots: np.ndarray
    """(B,) int64; NONE: the sample is not alive"""
    endings: np.ndarray
    """(B,) code of the reason for which the sample ended before; NONE: it did not"""
    groups: Sequence[str]
    """the group of each sample, "" if the put names none; (): of all"""

    @cached_property
    def late(self) -> np.ndarray:
        return (self.slots == NONE) & (self.endings != NONE)

    @cached_property
    def new(self) -> np.ndarray:
        return (self.slots == NONE) & (self.endings == NONE)


def look_up(state: State, ids: Sequence[str], groups: Sequence[str]) -> PutBatch:
    """Look up samples and groups. ValueError: an id twice, or a name with a NUL; UnicodeEncodeError: one that UTF-8
    cannot encode."""
    assert not groups or len(groups) == len(ids), f"{len(groups)} groups for {len(ids)} ids"
    if len(set(ids)) != len(ids):
        raise ValueError("ids of a batch must be distinct; repeated: " + Counter(ids).most_common(1)[0][0])
    names_to_array([*ids, *groups])  # checks that they can be sent and stored
    slots = state.ids.find(ids)
    endings = np.full(len(ids), NONE, np.int32)
    absent = np.flatnonzero(slots == NONE)
    endings[absent] = state.endings.find([ids[i] for i in absent.tolist()])
    return PutBatch(ids, slots=slots, endings=endings, groups=groups)


def check(state: State, batch: PutBatch, columns: Sequence[str]) -> None:
    """ValueError: a column put twice or one too many, a sample that is already done, a group that changes."""
    state.columns.check_room(columns)
    mask, alive = state.columns.mask(columns), np.flatnonzero(batch.slots != NONE)
    slots = batch.slots[alive]
    invalid = (batch.endings == state.endings.code(DONE)) & batch.late
    invalid[alive] |= state.columns.held.values[slots] & mask != 0
    if batch.groups:
        known = zip([batch.groups[i] for i in alive.tolist()], state.groups.of(slots), strict=True)
        invalid[alive] |= np.fromiter((group not in ("", earlier) for group, earlier in known), np.bool_, len(alive))
    if invalid.any():
        raise _invalid(state, batch, i=int(invalid.argmax()), mask=mask)


def store(
    state: State,
    batch: PutBatch,
    columns: Mapping[str, np.ndarray | None],
    *,
    segment: int,
    versions: np.ndarray | None,
    now_s: float,
) -> tuple[str, ...]:
    """Create the new rows and add the columns to all rows but the late ones. Returns the ids that are late."""
    assert 0 <= segment <= MAX_SEGMENT and not state.segments.is_live(segment), f"segment={segment}: taken"
    new, slots = np.flatnonzero(batch.new), batch.slots.copy()
    if len(new):
        numbers = np.arange(state.next_row, state.next_row + len(new))
        ids, groups = ([names[i] for i in new.tolist()] if names else [] for names in (batch.ids, batch.groups))
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
    return tuple(batch.ids[i] for i in np.flatnonzero(batch.late).tolist())


def _invalid(state: State, batch: PutBatch, *, i: int, mask: np.uint64) -> ValueError:
    id, slot = batch.ids[i], int(batch.slots[i])
    if batch.endings[i] != NONE:
        return ValueError(f"sample {id!r}: every task has acknowledged it; no column can be put to it any more")
    if twice := state.columns.of(state.columns.held.values[slot] & mask):
        return ValueError(f"sample {id!r}: column {twice[0]!r} exists already")
    known = state.groups.of(batch.slots[[i]])[0]
    return ValueError(f"sample {id!r}: group {batch.groups[i]!r}, but it was put in group {known!r}")

"""Puts: look up a batch's names once, then refuse or store the batch as a whole.

Invariants: `check` changes nothing, and `store` stores every batch that passes it; a sample that was dropped before is
late: it is not stored, while the others keep their positions in the segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

import numpy as np

from distqueue.messages import names_to_array
from distqueue.samples.endings import DONE
from distqueue.samples.pages import NONE
from distqueue.samples.segments import MAX_SEGMENT
from distqueue.samples.state import State


@dataclass(frozen=True, eq=False)
class Batch:
    """B samples of a put, looked up in the table."""

    ids: Sequence[str]
    slots: np.ndarray
    """(B,) int64; NONE: the sample is not alive"""
    endings: np.ndarray
    """(B,) code of the reason for which the sample ended before; NONE: it did not"""
    groups: Sequence[str]
    """the G distinct groups of the samples"""
    group_slots: np.ndarray
    """(G,) int64; NONE: the group is not alive"""
    group_of: np.ndarray
    """(B,) position in `groups`; NONE: the put names no group for the sample"""

    @cached_property
    def late(self) -> np.ndarray:
        return (self.slots == NONE) & (self.endings != NONE)

    @cached_property
    def new(self) -> np.ndarray:
        return (self.slots == NONE) & (self.endings == NONE)


def look_up(state: State, ids: Sequence[str], groups: Sequence[str]) -> Batch:
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
    names_G = [group for group in dict.fromkeys(groups) if group]
    number_of = dict(zip(names_G, count()), **{"": NONE})
    group_of = np.fromiter(map(number_of.__getitem__, groups or [""] * len(ids)), np.int64, len(ids))
    return Batch(
        ids,
        slots=slots,
        endings=endings,
        groups=names_G,
        group_slots=state.groups.names.find(names_G),
        group_of=group_of,
    )


def check(state: State, batch: Batch, columns: Sequence[str]) -> None:
    """ValueError: a column put twice or one too many, a sample that is already done, a group that changes or outgrows
    group_size, a new sample without a group although group_size is set."""
    state.columns.check_room(columns)
    mask, size = state.columns.mask(columns), state.groups.size
    alive = batch.slots != NONE
    slots = np.where(alive, batch.slots, 0)
    groups = np.append(batch.group_slots, NONE)
    has_group = batch.group_of != NONE
    invalid = (batch.endings == state.endings.code(DONE)) & batch.late
    invalid |= alive & (state.columns.held.values[slots] & mask != 0)
    invalid |= alive & has_group & (state.groups.of(slots) != groups[batch.group_of])
    if size:
        invalid |= batch.new & ~has_group
    if invalid.any():
        raise _invalid(state, batch, i=int(invalid.argmax()), mask=mask)
    if size:
        counts = np.bincount(batch.group_of[batch.new], minlength=len(batch.groups))
        sizes = counts + np.where(groups[:-1] == NONE, 0, state.groups.put.values[groups[:-1]])
        for k in batch.group_of[batch.new & (sizes > size)[batch.group_of]][:1].tolist() if len(sizes) else ():
            group = batch.groups[k]
            raise ValueError(f"group {group!r}: {sizes[k]} samples, but the queue has group_size={size}")


def store(
    state: State,
    batch: Batch,
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
        slots[new] = state.create([batch.ids[i] for i in new.tolist()], numbers, now_s)
        state.next_row += len(new)
        state.groups.join(slots[new], batch.groups, slots=batch.group_slots, of_row=batch.group_of[new])
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


def _invalid(state: State, batch: Batch, *, i: int, mask: np.uint64) -> ValueError:
    """Return the error of sample i."""
    id, slot = batch.ids[i], int(batch.slots[i])
    group = "" if batch.group_of[i] == NONE else batch.groups[batch.group_of[i]]
    if batch.endings[i] != NONE:
        return ValueError(f"sample {id!r}: every task has acknowledged it; no column can be put to it any more")
    if slot == NONE:
        return ValueError(f"sample {id!r}: no group; with group_size={state.groups.size} a new sample needs one")
    if twice := state.columns.of(state.columns.held.values[slot] & mask):
        return ValueError(f"sample {id!r}: column {twice[0]!r} exists already")
    known = state.groups.texts(np.array([slot]))[0]
    return ValueError(f"sample {id!r}: group {group!r}, but it was put in group {known!r}")

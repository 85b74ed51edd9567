"""Putting: a batch's names are looked up once, the batch is refused as a whole or stored as a whole.

Invariants: `check` changes nothing, and what it lets pass `store` stores; a sample that was dropped before is late:
left out of what is stored, while the others keep their positions in the segment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from distqueue.samples.endings import DONE
from distqueue.samples.names import NONE, Names
from distqueue.samples.segments import MAX_SEGMENT
from distqueue.samples.state import State


@dataclass(frozen=True, eq=False)
class Batch:
    """B samples that are put, and what is known of them."""

    names: Names
    slots: np.ndarray
    """(B,) int64: NONE where the sample is not alive"""
    endings: np.ndarray
    """(B,) code of how the sample ended before; NONE: it did not"""
    groups: Names
    """the groups mentioned, each once"""
    group_of: np.ndarray
    """(B,) position in `groups`; NONE: the sample comes without a group"""

    @property
    def late(self) -> np.ndarray:
        return (self.slots == NONE) & (self.endings != NONE)

    @property
    def new(self) -> np.ndarray:
        return (self.slots == NONE) & (self.endings == NONE)


def look_up(state: State, ids: Sequence[str], groups: Sequence[str]) -> Batch:
    assert not groups or len(groups) == len(ids), f"{len(groups)} groups for {len(ids)} ids"
    if len(set(ids)) != len(ids):
        raise ValueError("ids of a batch must differ; twice here: " + Counter(ids).most_common(1)[0][0])
    names = state.ids.names(ids)
    slots = state.ids.find(names)
    endings = np.full(len(ids), NONE, np.int32)
    absent = np.flatnonzero(slots == NONE)
    if len(absent):
        endings[absent] = state.endings.find(names.take(absent))
    distinct = {group: k for k, group in enumerate(group for group in dict.fromkeys(groups) if group)}
    distinct[""] = NONE
    group_of = np.fromiter(map(distinct.__getitem__, groups or [""] * len(ids)), np.int64, len(ids))
    return Batch(names, slots, endings, state.groups.names.names(list(distinct)[:-1]), group_of)


def check(state: State, batch: Batch, columns: Sequence[str]) -> None:
    """ValueError: a column put twice or one too many, a sample that is already done, a group that changes or grows too
    large, a new sample without a group where there are groups."""
    state.columns.check_room(columns)
    mask, size = state.columns.mask(columns), state.groups.size
    alive = batch.slots != NONE
    slots = np.where(alive, batch.slots, 0)
    groups = np.append(state.groups.names.find(batch.groups), NONE)
    said = batch.group_of != NONE
    bad = (batch.endings == state.endings.code(DONE)) & batch.late
    bad |= alive & (state.columns.held.values[slots] & mask != 0)
    bad |= alive & said & (state.groups.of(slots) != groups[batch.group_of])
    if size:
        bad |= batch.new & ~said
    if bad.any():
        _refuse(state, batch, int(bad.argmax()), mask)
    if size:
        counts = np.bincount(batch.group_of[batch.new], minlength=len(batch.groups))
        sizes = counts + np.where(groups[:-1] == NONE, 0, state.groups.put.values[groups[:-1]])
        for k in batch.group_of[batch.new & (sizes > size)[batch.group_of]][:1].tolist() if len(sizes) else ():
            group = batch.groups.texts[k]
            raise ValueError(f"group {group!r}: {sizes[k]} samples, but the queue has group_size={size}")


def store(
    state: State,
    batch: Batch,
    columns: Mapping[str, np.ndarray | None],
    segment: int,
    versions: np.ndarray | None,
    now_s: float,
) -> tuple[str, ...]:
    """Creates the new rows and gives all but the late ones these columns. Returns the ids that are late."""
    assert 0 <= segment <= MAX_SEGMENT and not state.segments.is_live(segment), f"segment={segment}: taken"
    new, slots = np.flatnonzero(batch.new), batch.slots.copy()
    if len(new):
        numbers = np.arange(state.next_row, state.next_row + len(new))
        slots[new] = state.create(batch.names.take(new), numbers, now_s)
        state.next_row += len(new)
        state.groups.join(slots[new], batch.groups, batch.group_of[new])
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
    return tuple(batch.names.texts[i] for i in np.flatnonzero(batch.late).tolist())


def _refuse(state: State, batch: Batch, i: int, mask: np.uint64) -> None:
    """Says what is wrong with sample i."""
    id, slot = batch.names.texts[i], int(batch.slots[i])
    group = "" if batch.group_of[i] == NONE else batch.groups.texts[batch.group_of[i]]
    if batch.endings[i] != NONE:
        raise ValueError(f"sample {id!r}: every task has acknowledged it; nothing can be put to it any more")
    if slot == NONE:
        raise ValueError(f"sample {id!r}: no group; with group_size={state.groups.size} a new sample has one")
    if twice := state.columns.of(state.columns.held.values[slot] & mask):
        raise ValueError(f"sample {id!r}: column {twice[0]!r} is there already")
    known = state.groups.texts(np.array([slot]))[0]
    raise ValueError(f"sample {id!r}: group {group!r}, but it was put in group {known!r}")

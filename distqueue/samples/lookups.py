"""Translates a caller's ids to slots; the errors name the sample. Changes nothing."""

from collections.abc import Iterable, Sequence

import numpy as np

from distqueue.errors import LOST, SamplesLost
from distqueue.samples.pages import NONE
from distqueue.samples.state import State


def ever_put(state: State, ids: Iterable[str], task: tuple[int, str] | None = None) -> np.ndarray:
    """Distinct slots of the ids that are alive. ValueError: an id that is neither alive nor remembered, or that was
    never handed to the task (number, name)."""
    distinct = list(dict.fromkeys(ids))
    slots = state.ids.find(distinct)
    absent = [distinct[i] for i in np.flatnonzero(slots == NONE).tolist()]
    for id, ending in zip(absent, state.endings.find(absent).tolist(), strict=True):
        if ending == NONE:
            raise ValueError(f"sample {id!r}: never put, or ended long ago")
    if task is not None:
        never = (slots != NONE) & (state.claims.handed[task[0]].values[slots] == 0)
        if never.any():
            id = distinct[int(never.argmax())]
            raise ValueError(f"sample {id!r}: acknowledged by task {task[1]!r}, which never received it")
    return slots[slots != NONE]


def live(state: State, ids: Sequence[str]) -> np.ndarray:
    """Slot per id. ValueError: a sample that is not alive, with how it ended; SamplesLost if the samples that are not
    alive were lost, with the ids of all of them."""
    slots = state.ids.find(ids)
    absent = [ids[i] for i in np.flatnonzero(slots == NONE).tolist()]
    if absent:
        endings = state.endings.find(absent).tolist()
        reasons = ["never put" if ending == NONE else state.endings.reason(ending) for ending in endings]
        others = [i for i, reason in enumerate(reasons) if not reason.startswith(LOST)]
        first = others[0] if others else 0
        message = f"sample {absent[first]!r}: {reasons[first]}"
        raise ValueError(message) if others else SamplesLost(absent, message)
    return slots


def claimable(state: State, ids: Iterable[str], task: tuple[int, str]) -> np.ndarray:
    """Distinct slots of the ids. ValueError: a sample that is not alive, or that the task (number, name) holds or has
    acknowledged."""
    distinct = list(dict.fromkeys(ids))
    slots = live(state, distinct)
    taken = ~state.claims.is_open(task[0], slots)
    if taken.any():
        which = int(taken.argmax())
        acked = state.claims.is_acked(task[0], slots[[which]])[0]
        how = "acknowledged" if acked else "leased"
        raise ValueError(f"sample {distinct[which]!r}: task {task[1]!r} has {how} it already")
    return slots


def holding(state: State, ids: Sequence[str], columns: Iterable[str]) -> np.ndarray:
    """Slot per id. ValueError, naming sample and column: one that is not alive, or lacks a column."""
    slots = live(state, ids)
    columns, held = tuple(columns), state.columns
    lacks = ~held.holding(slots, held.mask(columns)) | (not held.known(columns))
    if lacks.any():
        slot = slots[[lacks.argmax()]]
        has = held.of(held.held.values[slot[0]])
        name = next(name for name in columns if name not in has)
        raise ValueError(f"sample {state.ids.of(slot)[0]!r} lacks column {name!r}; it has {has}")
    return slots

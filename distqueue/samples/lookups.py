"""Translates a caller's ids to slots; the errors name the sample. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distqueue.errors import LOST, SamplesLost
from distqueue.samples.names import NONE
from distqueue.samples.state import State


def for_ack(state: State, ids: Iterable[str], task: tuple[int, str] | None = None) -> np.ndarray:
    """Distinct slots of the ids that are alive. ValueError: an id that is neither alive nor remembered, or that was
    never handed to the task (number, name)."""
    names = state.ids.names(list(dict.fromkeys(ids)))
    slots = state.ids.find(names)
    absent = np.flatnonzero(slots == NONE)
    if len(absent):
        unknown = absent[state.endings.find(names.take(absent)) == NONE]
        if len(unknown):
            raise ValueError(f"sample {names.texts[unknown[0]]!r}: never put, or ended long ago")
    if task is not None:
        never = (slots != NONE) & (state.claims.handed[task[0]].values[slots] == 0)
        if never.any():
            id = names.texts[int(never.argmax())]
            raise ValueError(f"sample {id!r}: acknowledged by task {task[1]!r}, which never received it")
    return slots[slots != NONE]


def for_drop(state: State, ids: Iterable[str], reason: str) -> np.ndarray:
    """Distinct slots of the ids that are alive. ValueError: an id that is neither alive nor remembered; no reason."""
    if not reason:
        raise ValueError("drop: expected a reason; every sample ends with one")
    return for_ack(state, ids)


def live(state: State, ids: Sequence[str]) -> np.ndarray:
    """Slot per id. ValueError: a sample that is not alive, with how it ended; SamplesLost if the samples that are not
    alive were lost, with the ids of all of them."""
    names = state.ids.names(ids)
    slots = state.ids.find(names)
    absent = np.flatnonzero(slots == NONE)
    if len(absent):
        endings = state.endings.find(names.take(absent)).tolist()
        reasons = ["never put" if ending == NONE else state.endings.reason(ending) for ending in endings]
        others = [i for i, reason in enumerate(reasons) if not reason.startswith(LOST)]
        first = others[0] if others else 0
        message = f"sample {ids[absent[first]]!r}: {reasons[first]}"
        raise ValueError(message) if others else SamplesLost([ids[i] for i in absent.tolist()], message)
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


def live_numbers(state: State, rows: np.ndarray) -> np.ndarray:
    """Slot per row number. ValueError: one whose sample is not alive."""
    slots = state.pages.find(rows)
    if (slots == NONE).any():
        raise ValueError(f"row {rows[(slots == NONE).argmax()]}: expected the number of a live sample")
    return slots


def require_columns(state: State, slots: np.ndarray, columns: Iterable[str]) -> None:
    """ValueError, naming sample and column: a row lacks a column."""
    columns, held = tuple(columns), state.columns
    lacks = ~held.holding(slots, held.mask(columns)) | (not held.known(columns))
    if lacks.any():
        slot = slots[[lacks.argmax()]]
        has = held.of(held.held.values[slot[0]])
        name = next(name for name in columns if name not in has)
        raise ValueError(f"sample {state.ids.texts(slot)[0]!r} lacks column {name!r}; it has {has}")

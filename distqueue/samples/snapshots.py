"""Serialize the table to a few flat arrays and a JSON string, and back: live rows and remembered endings.

Rows are stored in the order of their numbers and keep them; slots are assigned again. Leased rows are open in the copy:
their readers hold leases of another table."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from distqueue.messages import array_to_names, labels, names_to_array
from distqueue.samples.endings import marks_of
from distqueue.samples.state import State

Snapshot = Mapping[str, "np.ndarray | str"]


def dump(state: State, tasks: Sequence[str]) -> dict[str, np.ndarray | str]:
    slots, segments, claims = state.pages.live_slots(), state.segments.pages.live_slots(), state.claims
    groups, row_group = labels(state.groups.of(slots))
    ended_marks, ended_how = state.endings.recent()
    about = {
        "tasks": list(tasks),
        "page_rows": state.page_rows,
        "remembered": state.endings.remembered,
        "next_row": state.next_row,
        "columns": state.columns.names,
        "ended": dict(state.endings.counts),
        "reasons": list(state.endings.reasons),
        "redelivered": claims.redelivered,
    }
    return {
        "about": json.dumps(about),
        "row": state.pages.numbers(slots),
        "id": names_to_array(state.ids.of(slots)),
        "born_s": state.born_s.values[slots],
        "version": state.versions.values[slots],
        "held": state.columns.held.values[slots],
        "row_group": row_group,
        "acked": np.stack([claims.is_acked(task, slots) for task in range(len(tasks))]),
        "handed": np.stack([handed.values[slots] for handed in claims.handed]),
        "part_count": state.segments.part_count.values[slots],
        "part": state.segments.flat(slots),
        "segment": state.segments.pages.numbers(segments),
        "segment_mask": state.segments.mask.values[segments],
        "group": np.arange(len(groups)),
        "group_name": names_to_array(groups),
        "ended_mark": ended_marks,
        "ended_how": ended_how,
    } | {f"tokens/{c}": state.columns.tokens[c].values[held] for c, held in state.columns.holders(slots)}


def options(snapshot: Snapshot) -> dict[str, Any]:
    """The arguments with which the table was created."""
    about = json.loads(str(snapshot["about"]))
    return {name: about[name] for name in ("tasks", "page_rows", "remembered")}


def load(state: State, snapshot: Snapshot) -> None:
    """Restore a snapshot into an empty state."""
    about = json.loads(str(snapshot["about"]))
    array = {name: np.asarray(value) for name, value in snapshot.items() if name != "about"}
    names = *array_to_names(array["group_name"], len(array["group"])), ""  # earlier versions: -1 for no group
    groups = [names[k] for k in array["row_group"].tolist()]
    slots = state.create(array_to_names(array["id"], len(array["row"])), array["row"], array["born_s"], groups)
    state.next_row = about["next_row"]
    state.versions.values[slots] = array["version"]
    state.columns.names = about["columns"]
    state.columns.held.values[slots] = array["held"]
    for name in array:
        if name.startswith("tokens/"):
            state.columns.load_tokens(int(name.removeprefix("tokens/")), slots, array[name])
    _load_segments(state, slots, array)
    for task, (acked, handed) in enumerate(zip(array["acked"], array["handed"], strict=True)):
        state.claims.handed[task].values[slots] = handed
        state.claims.ack(task, slots[acked])
    state.claims.redelivered = about["redelivered"]
    _load_endings(state, array, reasons=about["reasons"])
    state.endings.counts = Counter(about["ended"])


def _load_segments(state: State, slots: np.ndarray, array: Mapping[str, np.ndarray]) -> None:
    state.segments.open(array["segment"], array["segment_mask"])
    counts = array["part_count"].astype(np.int64)
    starts = np.cumsum(counts) - counts
    for k in range(int(counts.max(initial=0))):
        parts = array["part"][starts[counts > k] + k]
        state.segments.append(slots[counts > k], parts >> 32, parts & 0xFFFFFFFF)


def _load_endings(state: State, array: Mapping[str, np.ndarray], reasons: Sequence[str]) -> None:
    how = array["ended_how"]
    if "ended_id" in array:  # an earlier version stored the ids themselves
        marks = marks_of(array_to_names(array["ended_id"], len(how)))
    else:
        marks = array["ended_mark"]
    codes = np.array([state.endings.code(reason) for reason in reasons], np.int32)
    state.endings.remember(marks, codes[how] if len(how) else how)

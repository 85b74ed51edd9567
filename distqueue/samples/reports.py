"""What the table says of itself: why a request waits, and its figures. Looked up when asked, over all live rows."""

from __future__ import annotations

import numpy as np

from distqueue.samples.face import Want
from distqueue.samples.state import State


def explain(state: State, number: int, want: Want) -> str:
    """Why `want`, of task `number`, is not served."""
    slots = state.pages.live_slots()
    open_slots = slots[state.claims.is_open(number, slots)]
    holds = {name: state.columns.holding(open_slots, state.columns.mask([name])) for name in want.columns}
    holds = {name: held & state.columns.known([name]) for name, held in sorted(holds.items())}
    ready = open_slots[np.logical_and.reduce(list(holds.values()))]
    parts = [f"{len(ready)} samples ready"]
    parts += [f"column {name!r} missing for {(~held).sum()}" for name, held in holds.items() if not held.all()]
    if leased := state.claims.out(number):
        parts.append(f"{leased} leased and not acknowledged")
    if want.whole_groups and state.groups.size:
        parts.append(f"{state.groups.unfinished()} groups not all put")
    if want.min_version is not None:
        older = np.count_nonzero(state.versions.values[ready, 0] < want.min_version)
        parts.append(f"{older} older than version {want.min_version}")
    asked = (
        f"{want.count} samples"
        if want.count
        else f"{want.token_budget} tokens"
        if want.token_budget
        else "what is ready"
    )
    return f"task {want.task!r} wants {asked} with {list(want.columns)}: " + ", ".join(parts)


def open_rows(state: State, number: int) -> int:
    return state.pages.count - state.claims.out(number) - state.claims.acked[number]


def task_stats(state: State, number: int, now_s: float) -> dict[str, float]:
    return {
        "open": open_rows(state, number),
        "leased": state.claims.out(number),
        "acked": state.claims.acked[number],
        "redelivered": state.claims.redelivered[number],
        "age_s": _age_s(state, number, now_s),
    }


def _age_s(state: State, number: int, now_s: float) -> float:
    """Seconds since the first put of the oldest row that the task has not acknowledged; 0 if there is none."""
    for page in state.pages.in_order():
        slots = state.pages.marked(state.pages.live, np.array([page]))
        slots = slots[~state.claims.is_acked(number, slots)]
        if len(slots):
            return now_s - float(state.born_s.values[slots[0]])
    return 0.0

"""Reports on the table: why a selection waits, and metrics per task. Computed on demand, over all live rows."""

from __future__ import annotations

import numpy as np

from distqueue.samples.state import State
from distqueue.samples.types import Selection


def explain(state: State, number: int, selection: Selection) -> str:
    """Return the reason why `selection`, of task `number`, is not served yet."""
    slots = state.pages.live_slots()
    open_slots = slots[state.claims.is_open(number, slots)]
    holds = {name: state.columns.holding(open_slots, state.columns.mask([name])) for name in selection.required}
    holds = {name: held & state.columns.known([name]) for name, held in sorted(holds.items())}
    ready = open_slots[np.logical_and.reduce(list(holds.values()))]
    parts = [f"{len(ready)} samples ready"]
    parts += [f"column {name!r} missing for {(~held).sum()}" for name, held in holds.items() if not held.all()]
    if leased := state.claims.leased[number]:
        parts.append(f"{leased} leased and not acknowledged")
    amount = f"{selection.count} samples" if selection.count else "any samples"
    return f"task {selection.task!r} requests {amount} with {list(selection.required)}: " + ", ".join(parts)


def open_rows(state: State, number: int) -> int:
    """Count the rows that the task neither holds nor has acknowledged."""
    return state.pages.count - state.claims.leased[number] - state.claims.acked[number]


def task_stats(state: State, number: int, now_s: float) -> dict[str, float]:
    """Metrics of task `number`, listed at `SampleTable.stats`."""
    return {
        "open": open_rows(state, number),
        "leased": state.claims.leased[number],
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

"""Plans what a selection takes: ready units (rows, or whole groups), oldest first, up to its count or token budget.

Invariants (property-tested against a list searched from the front): the chosen units are the oldest that are ready and
new enough; they fill the count, or the budget as far as whole units do (a larger one is served alone), or are all that
are ready for a `partial` selection; otherwise there is no plan. Planning changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distqueue.samples.groups import Groups
from distqueue.samples.pages import Field, Pages
from distqueue.samples.types import Selection
from distqueue.samples.views import MIN_CHUNK, Ready, View

TOO_OLD = 1000
"""At most this many samples that were passed over as too old are named"""


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows to lease, and older rows passed over before them; slots, oldest first."""

    rows: np.ndarray
    too_old: np.ndarray


def can_serve(view: View, selection: Selection, group_size: int | None) -> bool:
    """Whether there is a plan; with min_version, whether there would be one if all units were new enough."""
    ready = view.groups if selection.whole_groups else view.rows
    unit = _slots_of_unit(selection, group_size)
    return (
        (selection.count is not None and ready.count * unit >= selection.count)
        or (selection.partial and ready.count > 0)
        or (selection.token_budget is not None and _reaches(view, selection, selection.token_budget))
    )


def _reaches(view: View, selection: Selection, budget: int) -> bool:
    """Whether the ready units have as many tokens. Reads no more of them than that takes."""
    tokens = 0
    for units in (view.groups if selection.whole_groups else view.rows).oldest(MIN_CHUNK):
        tokens += int(_tokens(view, units, selection).sum())
        if tokens >= budget:
            return True
    return False


def plan(view: View, selection: Selection, *, pages: Pages, groups: Groups, versions: Field) -> Plan | None:
    """Plan a selection. `pages` are those of the rows, `versions` (slots, 2) their oldest and newest ones."""
    if not can_serve(view, selection, groups.size):
        return None
    ready = view.groups if selection.whole_groups else view.rows
    limit = selection.count // _slots_of_unit(selection, groups.size) if selection.count else None
    chosen = np.zeros(0, np.int64)
    passed = np.zeros(0, np.int64)
    stop = None
    for units in ready.oldest(_num_needed(selection, limit, ready)):
        old = _too_old(view, units, selection=selection, versions=versions)
        chosen, passed = np.concatenate([chosen, units[~old]]), np.concatenate([passed, units[old]])
        if (stop := _num_filling(view, chosen, selection=selection, limit=limit)) is not None:
            break
    if stop is None and not (selection.partial and len(chosen)):
        return None
    chosen = chosen[:stop]
    numbers = (groups.pages if selection.whole_groups else pages).numbers
    passed = passed[numbers(passed) < numbers(chosen[-1:])]
    return Plan(
        _rows_of(view, chosen, selection), _old_rows_of(view, passed, selection=selection, versions=versions)[:TOO_OLD]
    )


def _slots_of_unit(selection: Selection, group_size: int | None) -> int:
    """Samples that a unit counts towards `count`: a group counts all its members, dropped ones included."""
    return group_size or 1 if selection.whole_groups else 1


def _num_needed(selection: Selection, limit: int | None, ready: Ready) -> int:
    """How many units to read first."""
    if limit is not None:
        return limit
    return ready.count if selection.token_budget is None else MIN_CHUNK


def _num_filling(view: View, units: np.ndarray, *, selection: Selection, limit: int | None) -> int | None:
    """How many of the units reach the count or the budget, whichever comes first; None: all of them do not."""
    stops = [limit] if limit is not None and len(units) >= limit else []
    if selection.token_budget is not None:
        tokens = np.cumsum(_tokens(view, units, selection))
        k = int(np.searchsorted(tokens, selection.token_budget))
        if k < len(units):
            stops.append(k if k and tokens[k] > selection.token_budget else k + 1)
    return min(stops, default=None)


def _tokens(view: View, units: np.ndarray, selection: Selection) -> np.ndarray:
    return view.group_tokens(units) if selection.whole_groups else view.row_tokens(units)


def _too_old(view: View, units: np.ndarray, *, selection: Selection, versions: Field) -> np.ndarray:
    """(U,) bool: units with a row older than min_version."""
    if selection.min_version is None:
        return np.zeros(len(units), np.bool_)
    if not selection.whole_groups:
        return versions.values[units, 0] < selection.min_version
    members, counts = view.members(units)
    return (counts & (versions.values[members, 0] < selection.min_version)).any(1)


def _rows_of(view: View, units: np.ndarray, selection: Selection) -> np.ndarray:
    if not selection.whole_groups:
        return units
    members, counts = view.members(units)
    return members[counts]


def _old_rows_of(view: View, units: np.ndarray, *, selection: Selection, versions: Field) -> np.ndarray:
    """Of units that were passed over, the rows that are themselves too old."""
    rows = _rows_of(view, units, selection)
    return rows[versions.values[rows, 0] < selection.min_version] if len(rows) else rows

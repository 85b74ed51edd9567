"""What a request gets: units (rows, or whole groups) that are ready, oldest first, up to its count or token budget.

Invariants (property-tested against a list searched from the front): the units chosen are the oldest that are ready and
new enough; they fill the count, or the budget as far as whole units do (one larger than it is served alone), or are all
there are of a `partial` want, or there is no plan. Planning changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from distqueue.samples.face import Want
from distqueue.samples.groups import Groups
from distqueue.samples.pages import Field, Pages
from distqueue.samples.views import View

TOO_OLD = 1000
"""Samples passed over for their age that are named at most"""


@dataclass(frozen=True, eq=False)
class Plan:
    """Rows to hand out, and rows that were passed over on the way to them; slots, oldest first."""

    rows: np.ndarray
    too_old: np.ndarray


def can_serve(view: View, want: Want, group_size: int | None) -> bool:
    """Whether there is a plan; where versions matter, whether there was one if all were new enough."""
    ready = view.groups if want.whole_groups else view.rows
    unit = _slots_of_unit(want, group_size)
    return (
        (want.count is not None and ready.count * unit >= want.count)
        or (want.token_budget is not None and ready.tokens >= want.token_budget)
        or (want.partial and ready.count > 0)
    )


def plan(view: View, want: Want, pages: Pages, groups: Groups, oldest_version: Field) -> Plan | None:
    """`pages` are those of the rows, `oldest_version` (slots, 2) their versions."""
    if not can_serve(view, want, groups.size):
        return None
    ready = view.groups if want.whole_groups else view.rows
    limit = want.count // _slots_of_unit(want, groups.size) if want.count else None
    chosen = np.zeros(0, np.int64)
    passed = np.zeros(0, np.int64)
    stop = None
    for units in ready.oldest(_needed(want, limit, ready.count, ready.tokens)):
        old = _too_old(view, units, want, oldest_version)
        chosen, passed = np.concatenate([chosen, units[~old]]), np.concatenate([passed, units[old]])
        if (stop := _filled(view, chosen, want, limit)) is not None:
            break
    if stop is None and not (want.partial and len(chosen)):
        return None
    chosen = chosen[:stop]
    numbers = (groups.pages if want.whole_groups else pages).numbers
    passed = passed[numbers(passed) < numbers(chosen[-1:])]
    return Plan(_rows_of(view, chosen, want), _old_rows_of(view, passed, want, oldest_version)[:TOO_OLD])


def _slots_of_unit(want: Want, group_size: int | None) -> int:
    """What a unit counts towards `count`: a group all its members, also where some were dropped."""
    return group_size or 1 if want.whole_groups else 1


def _needed(want: Want, limit: int | None, count: int, tokens: int) -> int:
    """How many units the first look should bring: as many as will do if units are of the mean length."""
    needed = [] if limit is None else [limit]
    if want.token_budget is not None and tokens:
        needed.append(want.token_budget * count // tokens + 2)
    return min(needed, default=count)


def _filled(view: View, units: np.ndarray, want: Want, limit: int | None) -> int | None:
    """How many of the units reach the count or the budget, whichever comes first; None: all of them do not."""
    stops = [limit] if limit is not None and len(units) >= limit else []
    if want.token_budget is not None:
        tokens = np.cumsum(view.group_tokens(units) if want.whole_groups else view.row_tokens(units))
        k = int(np.searchsorted(tokens, want.token_budget))
        if k < len(units):
            stops.append(k if k and tokens[k] > want.token_budget else k + 1)
    return min(stops, default=None)


def _too_old(view: View, units: np.ndarray, want: Want, versions: Field) -> np.ndarray:
    if want.min_version is None:
        return np.zeros(len(units), np.bool_)
    if not want.whole_groups:
        return versions.values[units, 0] < want.min_version
    members, counts = view.members(units)
    return (counts & (versions.values[members, 0] < want.min_version)).any(1)


def _rows_of(view: View, units: np.ndarray, want: Want) -> np.ndarray:
    if not want.whole_groups:
        return units
    members, counts = view.members(units)
    return members[counts]


def _old_rows_of(view: View, units: np.ndarray, want: Want, versions: Field) -> np.ndarray:
    """Of units that were passed over, the rows that are too old themselves."""
    rows = _rows_of(view, units, want)
    return rows[versions.values[rows, 0] < want.min_version] if len(rows) else rows

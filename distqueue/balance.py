"""Splits one batch among data-parallel readers so that each gets about the same number of tokens. Pure.

Invariants (tests/distqueue/test_balance.py): every sample goes to exactly one reader; samples of a unit (a whole group)
stay together; each reader's samples keep the order of the batch; no reader exceeds the mean by more than the largest
unit; if there are enough units, every reader gets one.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

import numpy as np


def split_by_tokens(tokens: Sequence[int], readers: int, units: Sequence[Hashable] = ()) -> list[np.ndarray]:
    """Assign rows to readers: the heaviest unit first, each to the reader with the fewest tokens (ties: fewest units).

    `units`: the unit of each sample; (): every sample is a unit.
    """
    members: dict[Hashable, list[int]] = {}
    for row in range(len(tokens)):
        members.setdefault(units[row] if units else row, []).append(row)
    weights = {unit: sum(tokens[row] for row in rows) for unit, rows in members.items()}
    loads: list[tuple[int, int, int]] = [(0, 0, reader) for reader in range(readers)]  # (tokens, units, reader)
    rows_by_reader: list[list[int]] = [[] for _ in range(readers)]
    for unit in sorted(members, key=lambda unit: -weights[unit]):
        num_tokens, num_units, reader = loads[0]
        heapq.heapreplace(loads, (num_tokens + weights[unit], num_units + 1, reader))
        rows_by_reader[reader] += members[unit]
    return [np.array(sorted(rows), np.int64) for rows in rows_by_reader]

"""One batch for several data-parallel readers: who gets which samples, so that each has about as many tokens. Pure.

Invariants (tests/distqueue/test_balance.py): every sample goes to exactly one reader; samples of a unit (a group that
is to stay whole) go together; readers keep the order of the batch; no reader is more than the largest unit above the
mean; as long as there are enough units, every reader gets one.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Sequence

import numpy as np


def split_by_tokens(tokens: Sequence[int], readers: int, units: Sequence[Hashable] = ()) -> list[np.ndarray]:
    """Rows for each reader: the heaviest unit first, each to the reader with least so far (ties: fewest units).

    `units`: what each sample belongs to; () where each stands for itself.
    """
    members: dict[Hashable, list[int]] = {}
    for row in range(len(tokens)):
        members.setdefault(units[row] if units else row, []).append(row)
    weights = {unit: sum(tokens[row] for row in rows) for unit, rows in members.items()}
    loads: list[tuple[int, int, int]] = [(0, 0, reader) for reader in range(readers)]
    chosen: list[list[int]] = [[] for _ in range(readers)]
    for unit in sorted(members, key=lambda unit: -weights[unit]):
        load, held, reader = loads[0]
        heapq.heapreplace(loads, (load + weights[unit], held + 1, reader))
        chosen[reader] += members[unit]
    return [np.array(sorted(rows), np.int64) for rows in chosen]

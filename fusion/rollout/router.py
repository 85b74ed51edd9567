"""Assigns groups to engines.

Invariants: every group goes to exactly one engine, so that its members share their prompt's KV; engines that had
nothing before differ by at most the largest group's load; the same arguments give the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence


def assign_groups(load_by_group: Mapping[str, int], loads: Sequence[int]) -> list[list[str]]:
    """Assigns groups to engines, heaviest first, each to the engine with the least load so far (of several the first).

    Args:
        load_by_group: group id → expected tokens (prompts and responses of all members).
        loads: tokens that each engine has already.

    Returns:
        The groups of each engine, in the order of ``load_by_group``.
    """
    least_loaded = [(load, engine) for engine, load in enumerate(loads)]
    heapq.heapify(least_loaded)
    engine_of_group: dict[str, int] = {}
    for group in sorted(load_by_group, key=lambda group: -load_by_group[group]):
        load, engine = least_loaded[0]
        engine_of_group[group] = engine
        heapq.heapreplace(least_loaded, (load + load_by_group[group], engine))
    groups_by_engine: list[list[str]] = [[] for _ in loads]
    for group in load_by_group:
        groups_by_engine[engine_of_group[group]].append(group)
    return groups_by_engine

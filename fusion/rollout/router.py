"""Which engine serves which group.

Invariants: every group goes to exactly one engine, so that its members share their prompt's KV; engines that
had nothing before differ by at most the largest group's; the same arguments give the same answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def assign_groups(load_by_group: Mapping[str, int], loads: Sequence[int]) -> list[list[str]]:
    """Deals groups out to engines, heaviest first, each to the engine with least so far.

    Args:
        load_by_group: group id → expected tokens (prompts and responses of all members).
        loads: tokens that each engine has already.

    Returns:
        The groups of each engine, in the order of ``load_by_group``.
    """
    loads, chosen = list(loads), {}
    for group in sorted(load_by_group, key=lambda group: -load_by_group[group]):
        engine = loads.index(min(loads))
        chosen[group] = engine
        loads[engine] += load_by_group[group]
    return [[group for group in load_by_group if chosen[group] == engine] for engine in range(len(loads))]

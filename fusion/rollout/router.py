"""Assigns groups and requests to engines.

Invariants of `assign_groups`: every group goes to exactly one engine, so that its members share their prompt's KV;
engines that had nothing before differ by at most the largest group's load; the same arguments give the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


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


class LeastLoaded:
    """Finds the engine with the fewest requests while requests are added; O(log n) each.

    Attributes:
        num_running: requests that each engine has.
    """

    def __init__(self, num_running: Mapping[int, int]) -> None:
        self.num_running = dict(num_running)
        self._heap = [(count, place, engine) for place, (engine, count) in enumerate(num_running.items())]
        heapq.heapify(self._heap)

    def first(self) -> int:
        """Returns the engine with the fewest requests, of several the first."""
        count, place, engine = self._heap[0]
        while count != self.num_running[engine]:
            heapq.heapreplace(self._heap, (self.num_running[engine], place, engine))
            count, place, engine = self._heap[0]
        return engine

    def add(self, engine: int) -> None:
        self.num_running[engine] += 1


REMOTE_PULL = 2
"""Times ``min_pull_tokens`` from which KV is pulled from another machine: a call of another process and a second copy
come on top (docs/figures.md, "KV pool")"""


@dataclass(frozen=True)
class PoolRouting:
    """Routes requests whose KV is in the pool of a machine.

    Args:
        max_spread: how many requests more than the least loaded engine the one may have that has parked a request's KV,
            and still gets the request back.
        min_pull_tokens: shorter KV is computed again rather than copied by another engine.
        machines: of the ranks of each engine; (): all are on one machine.
        remote: whether engines also copy KV from other machines, from `REMOTE_PULL` times as many tokens on.
    """

    max_spread: int
    min_pull_tokens: int
    machines: Sequence[tuple[int, ...]] = ()
    remote: bool = False

    def choose_engine(self, num_running: Mapping[int, int], *, kv_home: int | None, least_loaded: int) -> int:
        """Chooses the engine of a request: the one that has parked its KV while the counts stay balanced, else the
        least loaded one.

        Args:
            num_running: requests that each engine has.
            kv_home: that has parked the request's KV; None: none has.
            least_loaded: the engine with the fewest requests.
        """
        if kv_home is None or kv_home not in num_running:
            return least_loaded
        spread = num_running[kv_home] - num_running[least_loaded]
        return kv_home if spread <= self.max_spread else least_loaded

    def pulls(self, kv_tokens: int, *, kv_home: int, engine: int) -> bool:
        """Whether an engine copies KV of ``kv_tokens`` tokens from the pool, which another one has parked.

        Args:
            kv_home: that has parked it.
        """
        if not self.machines or self.machines[kv_home] == self.machines[engine]:
            return kv_tokens >= self.min_pull_tokens
        return self.remote and kv_tokens >= REMOTE_PULL * self.min_pull_tokens

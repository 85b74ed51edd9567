"""Assign waiting requests to engines. Pure; which request comes next is decided by `order.py`.

Invariants (property-tested with tests/rollout/test_buffer.py against plain choices): `assign_all` assigns every
request, those of a group together but for those that return to their KV; `fill` assigns requests in order until the
next one fits no engine. Both give each engine its requests in order. Where engines have classes (`histopipe.py`), each
first gets what it prefers, and the rest goes on as without.

Cost, for d requests and E engines: `assign_all` O(d + E log E), `fill` O(E + d log E), without that of the order.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from fusion.rollout.engine_room import EngineRoom, Vacancy
from fusion.rollout.histopipe import HistoPipeRequests
from fusion.rollout.router import LeastLoaded, PoolRouting, assign_groups
from fusion.rollout.waiting_requests import WaitingRequests

if TYPE_CHECKING:
    from fusion.rollout.buffer import Entry, Group

ByEngine = dict[int, list["Entry"]]


def assign_all(
    waiting: Iterable[Entry], loads: dict[int, int], counts: Mapping[int, int], pool: PoolRouting | None = None
) -> ByEngine:
    """Assigns requests to the engine that has their KV as far as loads stay even, with a pool as `PoolRouting` chooses;
    the others of a group together, to the least loaded engine.

    Args:
        waiting: the requests in order.
        loads: tokens of the requests that each engine has; those of the new ones are added.
        counts: number of requests that each engine has.
    """
    waiting = list(waiting)
    by_engine: ByEngine = {engine: [] for engine in loads}
    returning = _return_to_kv(waiting, loads, counts, pool)
    load_by_group: dict[str, int] = {}
    for entry in waiting:
        if entry.id not in returning:
            load = entry.prompt_tokens + entry.generated  # the property `load` takes several times as long
            load_by_group[entry.group] = load_by_group.get(entry.group, 0) + load
    groups_by_engine = assign_groups(load_by_group, list(loads.values()))
    entries_of_group = {
        group: entries for entries, groups in zip(by_engine.values(), groups_by_engine, strict=True) for group in groups
    }
    for entry in waiting:
        engine = returning.get(entry.id)
        (entries_of_group[entry.group] if engine is None else by_engine[engine]).append(entry)
    return by_engine


def _return_to_kv(
    waiting: Iterable[Entry], loads: dict[int, int], counts: Mapping[int, int], pool: PoolRouting | None
) -> dict[str, int]:
    """Returns the engine of each request that is resumed where its KV is, or pulls it there; adds them to ``loads``."""
    with_kv = [entry for entry in waiting if entry.kv]
    if not with_kv:
        return {}
    total = sum(loads.values()) + sum(entry.load for entry in waiting)
    running = LeastLoaded(counts)
    engine_of: dict[str, int] = {}
    for entry in with_kv:
        assert entry.kv is not None
        home = entry.kv[0]
        if pool is not None and entry.kv_tokens:
            engine = pool.choose_engine(running.num_running, kv_home=home, least_loaded=running.first())
            running.add(engine)
        elif home in loads and loads[home] * len(loads) < total:
            engine = home
        else:
            continue
        engine_of[entry.id] = engine
        loads[engine] += entry.load
    return engine_of


def fill(
    waiting: WaitingRequests,
    vacancies: Mapping[int, Vacancy],
    room: EngineRoom,
    groups: Mapping[str, Group],
    pool: PoolRouting | None = None,
) -> ByEngine:
    """Takes requests and assigns them until the next one fits nowhere: to the engine with the request's KV (with a pool
    as `PoolRouting` chooses), else to that of the sibling assigned last, else to the one with the most room (of several
    the first). Where engines have classes, each first gets those that it prefers, in the same way.

    Args:
        vacancies: what each engine that can take a request can still take; changed.
        groups: by id; the engine of each is updated.
    """
    filling = _Filling(vacancies, room, groups, pool)
    if isinstance(waiting, HistoPipeRequests):
        filling.moves = waiting.moves
        filling.add_preferred(waiting)
    while filling.free and (entry := waiting.take()) is not None:
        if not filling.add(entry):
            waiting.put_back(entry)
            break
    return filling.by_engine


class _Filling:
    """Engines that are filled with requests. ``free``: number of requests that they can still take."""

    def __init__(
        self,
        vacancies: Mapping[int, Vacancy],
        room: EngineRoom,
        groups: Mapping[str, Group],
        pool: PoolRouting | None,
    ) -> None:
        self._vacancies, self._room, self._groups, self._pool = vacancies, room, groups, pool
        self._widest_first = _WidestFirst(vacancies)
        self.by_engine: ByEngine = {engine: [] for engine in vacancies}
        self.free = sum([max(0, vacancy.requests) for vacancy in vacancies.values()])
        self.moves: Callable[[Entry], bool] | None = None
        """Whether a request leaves the engine that has its KV, for the one with the most room; None: none does"""

    def add(self, entry: Entry) -> bool:
        """Assigns a request; returns whether it fits."""
        tokens = entry.load + self._room.chunk(entry.max_tokens - entry.generated)
        group, vacancies, pool = self._groups[entry.group], self._vacancies, self._pool
        engine = entry.kv[0] if entry.kv else group.engine
        vacancy = None if engine is None or (self.moves and self.moves(entry)) else vacancies.get(engine)
        if (
            engine is None
            or vacancy is None
            or not vacancy.takes(tokens)
            or (pool and entry.kv_tokens and not _stays(engine, vacancies, self._widest_first.engine, pool))
        ):
            engine = self._widest_first.engine
            vacancy = vacancies[engine]
            if not vacancy.takes(tokens):
                return False
        vacancy.add(tokens)
        entry.reserved = tokens
        self.by_engine[engine].append(entry)
        group.engine = engine
        self.free -= 1
        return True

    def add_preferred(self, waiting: HistoPipeRequests) -> None:
        """Assigns to each engine, the widest first, what it prefers, until the next one that it prefers does not
        fit."""
        widest_first = _WidestFirst(self._vacancies)
        while self.free and widest_first:
            entry = waiting.take_for(widest_first.engine)
            if entry is None:
                widest_first.drop()
            elif not self.add(entry):
                waiting.put_back(entry)
                widest_first.drop()


class _WidestFirst:
    """Finds the engine with the most room, of several the first, while room is only taken."""

    def __init__(self, vacancies: Mapping[int, Vacancy]) -> None:
        self._vacancies = vacancies
        self._heap = [(vacancy.rank, place, engine) for place, (engine, vacancy) in enumerate(vacancies.items())]
        """The rank of an engine, or an earlier one, which was lower; its place among the engines, and its number"""
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    def drop(self) -> None:
        """Leaves out the engine that was found last."""
        heapq.heappop(self._heap)

    @property
    def engine(self) -> int:
        while True:
            rank, place, engine = self._heap[0]
            now = self._vacancies[engine].rank
            if rank == now:
                return engine
            heapq.heapreplace(self._heap, (now, place, engine))


def _stays(home: int, vacancies: Mapping[int, Vacancy], widest: int, pool: PoolRouting) -> bool:
    """Whether a request in the pool returns to the engine that has parked its KV rather than to the one with the most
    room."""
    missing = {engine: -vacancies[engine].requests for engine in (home, widest)}
    return pool.choose_engine(missing, kv_home=home, least_loaded=widest) == home

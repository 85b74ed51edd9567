"""Assign waiting requests to engines. Pure; which request comes next is decided by `order.py`.

Invariants (property-tested with tests/rollout/test_buffer.py against plain choices): `assign_all` assigns every
request, those of a group together but for those that return to their KV; `fill` assigns requests in order until the
next one fits no engine. Both give each engine its requests in order. Where engines have classes (`histopipe.py`), each
first gets what it prefers, and the rest goes on as without.

Cost, for d requests and E engines: `assign_all` O(d + E log E), `fill` O(E + d log E), without that of the order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fusion.rollout.engine_room import EngineRoom, Vacancy
from fusion.rollout.histopipe import HistoPipeRequests
from fusion.rollout.order import WaitingRequests
from fusion.rollout.router import LeastLoaded, PoolRouting, assign_groups

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
            load_by_group[entry.group] = load_by_group.get(entry.group, 0) + entry.load
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
    by_engine: ByEngine = {engine: [] for engine in vacancies}
    if isinstance(waiting, HistoPipeRequests):
        _fill(by_engine, waiting, vacancies, room, groups, pool, classes=waiting)
    _fill(by_engine, waiting, vacancies, room, groups, pool)
    return by_engine


def _fill(
    by_engine: ByEngine,
    waiting: WaitingRequests,
    vacancies: Mapping[int, Vacancy],
    room: EngineRoom,
    groups: Mapping[str, Group],
    pool: PoolRouting | None,
    *,
    classes: HistoPipeRequests | None = None,
) -> None:
    """Adds requests to ``by_engine``. ``classes``: the waiting requests, where an engine gets only those that it
    prefers; None: any."""
    widest_first = [(vacancy.rank, place, engine) for place, (engine, vacancy) in enumerate(vacancies.items())]
    """The rank of an engine, or an earlier one, which was lower; its place among the engines, and its number"""
    heapq.heapify(widest_first)
    moves = waiting.moves if isinstance(waiting, HistoPipeRequests) else None
    while widest_first and len(waiting):
        rank, place, widest = widest_first[0]
        vacancy = vacancies[widest]
        if rank != vacancy.rank:  # it has been assigned to since, and may not be the widest any more
            heapq.heapreplace(widest_first, (vacancy.rank, place, widest))
            continue
        if vacancy.requests <= 0:
            break
        entry = waiting.take() if classes is None else classes.take_for(widest)
        if entry is None:
            heapq.heappop(widest_first)
            continue
        tokens = entry.load + room.chunk(entry.max_tokens - entry.generated)
        group = groups[entry.group]
        wish = entry.kv[0] if entry.kv else group.engine
        if moves is not None and moves(entry):
            wish = None
        wished = None if wish is None else vacancies.get(wish)
        engine = widest
        if wish is not None and wished is not None and wished.takes(tokens):
            if not (pool and entry.kv_tokens) or _stays(wish, wished, widest, vacancy, pool):
                engine, vacancy = wish, wished
        if not vacancy.takes(tokens):
            waiting.put_back(entry)
            if classes is None:
                break
            heapq.heappop(widest_first)
            continue
        vacancy.add(tokens)
        entry.reserved = tokens
        by_engine[engine].append(entry)
        group.engine = engine


def _stays(home: int, at_home: Vacancy, widest: int, at_widest: Vacancy, pool: PoolRouting) -> bool:
    """Whether a request in the pool returns to the engine that has parked its KV rather than to the one with the most
    room."""
    missing = {home: -at_home.requests, widest: -at_widest.requests}
    return pool.choose_engine(missing, kv_home=home, least_loaded=widest) == home

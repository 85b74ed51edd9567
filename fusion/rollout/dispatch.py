"""Assign waiting requests to engines. Pure; which request comes next is decided by an order (`orders/`).

    assign_all   every request at once: to its KV as far as loads stay even, else groups whole, heaviest first
    fill         in order until the next one fits no engine, within the bounds of the engines (`EngineRoom`)

Invariants (property-tested in tests/rollout/test_dispatch.py and test_buffer.py against plain choices): every group of
`assign_groups` goes to exactly one engine, so that its members share their prompt's KV, and engines that had nothing
before differ by at most the largest group's load; `assign_all` assigns every request, those of a group together but for
those that return to their KV; `fill` assigns requests in order until the next one fits no engine. All give each engine
its requests in order, and the same answer for the same arguments. Where engines prefer requests (`Order.take_for`),
each first gets those, and the rest is assigned as without.

Cost, for d requests and E engines: `assign_all` O(d + E log E), `fill` O(E + d log E), without that of the order."""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from fusion.rollout.entry import Entry, RequestGroup
from fusion.rollout.orders.interface import Order

ByEngine = dict[int, list["Entry"]]
REMOTE_PULL = 2
"""Times ``min_pull_tokens`` from which KV is pulled from another machine: a call of another process and a second copy
come on top (docs/figures.md, "KV pool")"""


class EngineRoom(NamedTuple):
    """The bounds of an engine. ``requests``: that it has at most; ``kv_tokens``: of its cache, None: not known yet;
    ``chunk_tokens``: after which a request returns, 0: it does not."""

    requests: int
    kv_tokens: int | None = None
    chunk_tokens: int = 0

    def chunk(self, left: int) -> int:
        """Return how many of the ``left`` tokens of a response its next chunk may add."""
        return min(left, self.chunk_tokens) if self.chunk_tokens else left

    def left(self, requests: int, kv_tokens: int) -> "Vacancy":
        """Return what an engine can still take. ``requests``, ``kv_tokens``: that it has."""
        free = inf if self.kv_tokens is None else self.kv_tokens - kv_tokens
        return Vacancy(self.requests - requests, free, not requests)


@dataclass(slots=True)
class Vacancy:
    """What an engine can still take. ``kv_tokens``: infinite if unknown; ``empty``: without requests, it takes any."""

    requests: int
    kv_tokens: float
    empty: bool

    @property
    def rank(self) -> tuple[bool, float, int]:
        """The engine of the lowest rank has the most room."""
        return (self.requests <= 0, -self.kv_tokens, -self.requests)

    def takes(self, tokens: int) -> bool:
        return self.requests > 0 and (self.empty or tokens <= self.kv_tokens)

    def add(self, tokens: int) -> None:
        self.requests, self.kv_tokens, self.empty = self.requests - 1, self.kv_tokens - tokens, False


@dataclass(frozen=True)
class PoolRouting:
    """Route requests whose KV is in the pool of a machine. ``max_spread``: maximum imbalance at which a request returns
    to its KV, in requests more than those of the least loaded engine; ``min_pull_tokens``: shorter KV is computed again
    rather than copied by another engine; ``machines``: of the ranks of each engine; (): all are on one machine;
    ``remote``: whether engines also copy KV from other machines, from `REMOTE_PULL` times as many tokens on."""

    max_spread: int
    min_pull_tokens: int
    machines: Sequence[tuple[int, ...]] = ()
    remote: bool = False

    def choose_engine(self, num_running: Mapping[int, int], *, kv_home: int, least_loaded: int) -> int:
        """Choose the engine of a request: the one that has parked its KV while the counts stay balanced, else the least
        loaded one. ``num_running``: requests that each engine has; ``kv_home``: that has parked the request's KV;
        ``least_loaded``: the engine with the fewest requests."""
        if kv_home not in num_running:
            return least_loaded
        spread = num_running[kv_home] - num_running[least_loaded]
        return kv_home if spread <= self.max_spread else least_loaded

    def pulls(self, kv_tokens: int, *, kv_home: int, engine: int) -> bool:
        """Whether an engine copies KV of ``kv_tokens`` tokens from the pool, which ``kv_home`` has parked."""
        if not self.machines or self.machines[kv_home] == self.machines[engine]:
            return kv_tokens >= self.min_pull_tokens
        return self.remote and kv_tokens >= REMOTE_PULL * self.min_pull_tokens


class LowestEngine:
    """Find the engine of the lowest rank, of several the first, while ranks only rise; O(log n) each."""

    def __init__(self, engines: Iterable[int], rank_of: Callable[[int], Any]) -> None:
        self._rank_of = rank_of
        self._heap = [(rank_of(engine), place, engine) for place, engine in enumerate(engines)]
        """Rank of an engine, or an earlier one, which was lower; its place among the engines, and its number"""
        heapq.heapify(self._heap)

    def __bool__(self) -> bool:
        return bool(self._heap)

    @property
    def first(self) -> int:
        while True:
            rank, place, engine = self._heap[0]
            now = self._rank_of(engine)
            if rank == now:
                return engine
            heapq.heapreplace(self._heap, (now, place, engine))

    def drop(self) -> None:
        """Leave out the engine that was found last."""
        heapq.heappop(self._heap)


def assign_groups(load_by_group: Mapping[str, int], loads: Sequence[int]) -> list[list[str]]:
    """Assign groups to engines, heaviest first, each to the engine with the least load so far (of several the first);
    return the groups of each engine, in the order of ``load_by_group``: group id → expected tokens (prompts and
    responses of all members). ``loads``: tokens that each engine has already."""
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


def assign_all(
    waiting: Iterable[Entry], loads: dict[int, int], counts: Mapping[int, int], pool: PoolRouting | None = None
) -> ByEngine:
    """Assign requests to the engine that has their KV as far as loads stay even, with a pool as `PoolRouting` chooses;
    the others of a group together, to the least loaded engine. ``waiting``: the requests in order; ``loads``: tokens of
    each engine's requests; those of the new ones are added; ``counts``: number of these requests."""
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
    """Return the engine of each request that is resumed where its KV is, or pulls it there; adds them to ``loads``."""
    with_kv = [entry for entry in waiting if entry.kv]
    if not with_kv:
        return {}
    total = sum(loads.values()) + sum(entry.load for entry in waiting)
    num_running = dict(counts)
    least_loaded = LowestEngine(counts, num_running.__getitem__)
    engine_of: dict[str, int] = {}
    for entry in with_kv:
        assert entry.kv is not None
        home = entry.kv[0]
        if pool is not None and entry.kv_tokens:
            engine = pool.choose_engine(num_running, kv_home=home, least_loaded=least_loaded.first)
            num_running[engine] += 1
        elif home in loads and loads[home] * len(loads) < total:
            engine = home
        else:
            continue
        engine_of[entry.id] = engine
        loads[engine] += entry.load
    return engine_of


def fill(
    waiting: Order,
    vacancies: Mapping[int, Vacancy],
    room: EngineRoom,
    groups: Mapping[str, RequestGroup],
    pool: PoolRouting | None = None,
) -> ByEngine:
    """Take requests and assign them until the next one fits nowhere: to the engine with the request's KV (with a pool
    as `PoolRouting` chooses), else to that of the sibling assigned last, else to the one with the most room (of several
    the first). Where engines prefer requests, each first gets those, in the same way. ``vacancies``: what each engine
    that can take a request can still take; changed; ``groups``: by id; the engine of each is updated."""
    filling = _Filling(waiting, vacancies, room, groups=groups, pool=pool)
    if waiting.prefers_engines:
        filling.add_preferred()
    while filling.free and (entry := waiting.take()) is not None:
        if not filling.add(entry):
            waiting.put_back(entry)
            break
    return filling.by_engine


class _Filling:
    """Engines that are filled with requests. ``free``: number of requests that they can still take."""

    def __init__(
        self,
        waiting: Order,
        vacancies: Mapping[int, Vacancy],
        room: EngineRoom,
        *,
        groups: Mapping[str, RequestGroup],
        pool: PoolRouting | None,
    ) -> None:
        self._waiting, self._vacancies, self._room, self._groups, self._pool = waiting, vacancies, room, groups, pool
        self._widest = self._widest_first()
        self.by_engine: ByEngine = {engine: [] for engine in vacancies}
        self.free = sum([max(0, vacancy.requests) for vacancy in vacancies.values()])

    def add(self, entry: Entry) -> bool:
        """Assign a request; return whether it fits."""
        tokens = entry.load + self._room.chunk(entry.max_tokens - entry.generated)
        group, vacancies, pool = self._groups[entry.group], self._vacancies, self._pool
        engine = entry.kv[0] if entry.kv else group.engine
        vacancy = None if engine is None or self._waiting.moves(entry) else vacancies.get(engine)
        if (
            engine is None
            or vacancy is None
            or not vacancy.takes(tokens)
            or (pool and entry.kv_tokens and not _stays(engine, vacancies, self._widest.first, pool))
        ):
            engine = self._widest.first
            vacancy = vacancies[engine]
            if not vacancy.takes(tokens):
                return False
        vacancy.add(tokens)
        entry.reserved = tokens
        self.by_engine[engine].append(entry)
        group.engine = engine
        self.free -= 1
        return True

    def add_preferred(self) -> None:
        """Assign to each engine, the widest first, what it prefers, until the next of that does not fit."""
        widest, waiting = self._widest_first(), self._waiting
        while self.free and widest:
            entry = waiting.take_for(widest.first)
            if entry is None:
                widest.drop()
            elif not self.add(entry):
                waiting.put_back(entry)
                widest.drop()

    def _widest_first(self) -> LowestEngine:
        """Return the engines by room, the most first, while room is only taken."""
        vacancies = self._vacancies  # not by `self`: a cycle would keep the requests until the next garbage collection
        return LowestEngine(vacancies, lambda engine: vacancies[engine].rank)


def _stays(home: int, vacancies: Mapping[int, Vacancy], widest: int, pool: PoolRouting) -> bool:
    """Whether a request in the pool returns to the engine that parked its KV, not to that with the most room."""
    missing = {engine: -vacancies[engine].requests for engine in (home, widest)}
    return pool.choose_engine(missing, kv_home=home, least_loaded=widest) == home

"""Track the requests of all groups in progress, and the engine of each. Pure; holds no token.

    add ──► waiting ──dispatch──► running on an engine ──finish──► finished, until its group is removed
               ▲                      │
               └───── suspend ────────┘   at the end of a chunk, or by a pause; `earlier` names its tokens so far

The idea is Seer's request buffer (arXiv 2511.14617): a group's requests are independent, and a suspended one can be
resumed on any engine.

A suspended request is resumed on the engine that has its KV, oldest first, unless that engine already has an equal
share of the total load or, with a bound on requests, its maximum. It never waits for that engine: if the engine does
not run, the request is resumed elsewhere, and `take_left_kv` reports its unused KV once. `state_dict` does not contain
the location of KV. A request whose KV is in the machine's pool (`kv_tokens`) prefers the engine that has parked it by
`PoolRouting`; another engine may copy it, so `take_left_kv` reports it once the request has left that engine, too. A
request without KV goes where the last one of its group went, if there is capacity: an engine
shares prefixes of, and drafts from, what it has computed itself.

The first ``num_probes`` requests of a group run ahead (Seer's probes), so that the others have a whole response to
draft from. This is an order within an engine (`Entry.priority`) and no condition: where there is capacity, no request
waits for a probe. Lengths estimated from finished probes would refine the order here.

Cost, for n requests in progress and E engines to dispatch to: `finish` O(1) for each request, `is_finished` and counts
O(1); `suspend` O(log n); `dispatch` O(E + d (log n + log E)) for d requests that it dispatches. No method but `of` and
`state_dict` visits all requests.

Invariants (property-tested in tests/rollout/test_buffer.py): a request is on at most one engine; it is finished once;
its number of generated tokens never decreases; a group is removed as a whole; a buffer restored from `state_dict` is
the same buffer with nothing on an engine.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from fusion.rollout.router import LeastLoaded, PoolRouting, assign_groups

State = Literal["waiting", "running", "finished"]


@dataclass(slots=True)
class Entry:
    """One request.

    ``max_tokens``: of its whole response; ``generated``: tokens so far; ``engine``: that has it while it runs;
    ``earlier``: the queue's row that holds its tokens so far, "" for none; ``oldest``, ``newest``: policy versions of
    its tokens so far, -1 for none; ``kv``: engine and attention rank that have its KV; ``kv_tokens``: number of tokens
    whose KV these have in the machine's pool; ``kv_weights``: under which weights it was computed, where engines share
    KV; ``position``: in the order of all requests ever added; ``behind``: whether probes run ahead of it.
    """

    id: str
    group: str
    prompt_tokens: int
    max_tokens: int
    generated: int = 0
    state: State = "waiting"
    engine: int | None = None
    earlier: str = ""
    oldest: int = -1
    newest: int = -1
    kv: tuple[int, int] | None = None
    kv_tokens: int = 0
    kv_weights: int = 0
    position: int = 0
    behind: bool = False

    @property
    def load(self) -> int:
        """Number of known tokens that an engine must process to start or resume the request."""
        return self.prompt_tokens + self.generated

    @property
    def priority(self) -> int:
        """Of the requests that wait in an engine, those of the lowest priority begin first."""
        return int(self.behind and not self.generated)


SAVED = tuple(
    field.name for field in fields(Entry) if field.name not in ("kv_tokens", "kv_weights", "position", "behind")
)
"""Fields of an entry in the state of a buffer"""


class Finished(NamedTuple):
    """``engines``: that had the requests which finished; ``groups``: in which no unfinished request is left."""

    engines: list[int]
    groups: list[str]


@dataclass(slots=True)
class Group:
    """The requests of a group. ``engine``: to which the last one was assigned, where requests are bounded."""

    members: list[Entry] = field(default_factory=list)
    num_unfinished: int = 0
    engine: int | None = None


class RequestBuffer:
    """Holds requests by group, in the order in which groups were added; older requests are dispatched first.

    ``num_probes``: requests of a group that run ahead of the others; 0: none. ``pool``: how engines share KV; None:
    they do not.
    """

    def __init__(self, num_probes: int = 0, pool: PoolRouting | None = None) -> None:
        self._num_probes, self._pool = num_probes, pool
        self._weights = 0
        """How often the weights have changed"""
        self.entries: dict[str, Entry] = {}
        self._groups: dict[str, Group] = {}
        self._left_kv: dict[int, list[str]] = {}
        self._added = 0
        """Number of requests ever added"""
        self._new: deque[Entry] = deque()
        """Waiting requests that have not run yet, in order. It may also hold requests of groups that were removed."""
        self._suspended: list[tuple[int, Entry]] = []
        """The other waiting requests, a heap by position; likewise"""
        self._count: Counter[State] = Counter()
        self._running_count: Counter[int] = Counter()
        """Engine → requests that it has; `_running_load` their tokens"""
        self._running_load: Counter[int] = Counter()

    def add(self, group: str, ids: Iterable[str], prompt_tokens: int, max_tokens: int) -> None:
        """Adds a group of requests, which wait from now on."""
        assert group not in self._groups, f"group {group!r} was added before"
        self._insert(group, "waiting", [Entry(id, group, prompt_tokens, max_tokens) for id in ids])

    def of(self, state: State) -> list[Entry]:
        """Returns all requests in this state, oldest group first."""
        return [entry for entry in self.entries.values() if entry.state == state]

    def num(self, state: State) -> int:
        """Counts requests in this state."""
        return self._count[state]

    def num_running_on(self, engine: int) -> int:
        """Counts requests that an engine has."""
        return self._running_count[engine]

    def dispatch(self, engines: Sequence[int], max_requests: int | None = None) -> dict[int, list[Entry]]:
        """Assigns waiting requests to engines; returns the assigned ones by engine, in the order of all.

        Without ``max_requests`` all are assigned: those with KV to the engine that has it as far as loads stay even,
        the others of a group together, to the least loaded engine. With it they are assigned oldest first until every
        engine has that many: what waits here may still go anywhere.
        """
        assigned = self._assign_all(engines) if max_requests is None else self._fill(engines, max_requests)
        by_engine: dict[int, list[Entry]] = {engine: [] for engine in engines}
        for entry, engine in assigned:
            by_engine[engine].append(entry)
        for engine, entries in by_engine.items():
            self._start(engine, entries)
        return by_engine

    def observe_new_weights(self) -> None:
        """Records that engines which share KV free all of it, because their weights are new."""
        self._weights += 1

    def take_left_kv(self) -> dict[int, list[str]]:
        """Returns, by engine, the requests that were resumed elsewhere since the last call and left their KV there."""
        left, self._left_kv = self._left_kv, {}
        return left

    def suspend(
        self,
        engine: int,
        id: str,
        *,
        generated: int,
        earlier: str,
        versions: tuple[int, int] | None,
        kv_rank: int | None = None,
        kv_tokens: int = 0,
    ) -> None:
        """Returns a request from an engine to the waiting ones.

        Args:
            generated: tokens so far.
            earlier: the queue's row that holds them.
            versions: of its oldest and newest token; None: nothing was added.
            kv_rank: the attention rank at which the engine keeps its KV; None: it does not.
            kv_tokens: number of tokens whose KV it has in the machine's pool.
        """
        entry = self.entries[id]
        assert entry.state == "running" and entry.engine == engine, f"request {id!r} is {entry.state}, not on {engine}"
        assert generated >= entry.generated, f"request {id!r} had {entry.generated} tokens and has {generated}"
        self._stop(engine, [entry], "waiting")
        entry.generated, entry.earlier = generated, earlier
        self._locate_kv(entry, engine, None if kv_rank is None else (engine, kv_rank), kv_tokens)
        if versions is not None:
            entry.oldest, entry.newest = versions
        heapq.heappush(self._suspended, (entry.position, entry))

    def finish(self, generated: Mapping[str, int]) -> Finished:
        """Marks requests finished. ``generated``: the tokens of each, by id."""
        running: dict[int, list[Entry]] = {}
        for id in generated:
            entry = self.entries[id]
            assert entry.state == "running" and entry.engine is not None, f"request {id!r} is {entry.state}"
            running.setdefault(entry.engine, []).append(entry)
        groups: list[str] = []
        for engine, entries in running.items():
            self._stop(engine, entries, "finished")
            for entry in entries:
                entry.generated, entry.earlier = generated[entry.id], ""
                if entry.kv is not None:
                    self._locate_kv(entry, engine)
                group = self._groups[entry.group]
                group.num_unfinished -= 1
                if not group.num_unfinished:
                    groups.append(entry.group)
        return Finished(list(running), groups)

    def is_finished(self, group: str) -> bool:
        """Whether all requests of a group are finished."""
        return not self._groups[group].num_unfinished

    def remove(self, group: str) -> list[Entry]:
        """Removes a group, none of whose requests is on an engine; returns its requests."""
        members = self._groups.pop(group).members
        for entry in members:
            assert entry.state != "running", f"request {entry.id!r} is still on engine {entry.engine}"
            self._count[entry.state] -= 1
            del self.entries[entry.id]
        return members

    @property
    def groups(self) -> list[str]:
        return list(self._groups)

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns plain JSON. All requests must have been suspended: no engine may have one."""
        assert not self.num("running"), "engines are suspended before the buffer is saved"
        return [{name: getattr(entry, name) for name in SAVED} | {"kv": None} for entry in self.entries.values()]

    def load_state_dict(self, state: Iterable[dict[str, Any]]) -> None:
        """Restores a buffer into this empty one. Keys of earlier formats that are not used any more are ignored."""
        for fields_ in state:
            entry = Entry(**{key: value for key, value in fields_.items() if key in SAVED})
            self._insert(entry.group, entry.state, [entry])

    def _insert(self, group: str, state: State, entries: list[Entry]) -> None:
        """Adds requests of one group in one state, the newest of all."""
        known = self._groups.setdefault(group, Group())
        if self._num_probes:
            for member, entry in enumerate(entries, start=len(known.members)):
                entry.behind = member >= self._num_probes
        known.members += entries
        for position, entry in enumerate(entries, start=self._added):
            entry.position = position
            self.entries[entry.id] = entry
        self._added += len(entries)
        self._count[state] += len(entries)
        if state != "finished":
            known.num_unfinished += len(entries)
        if state == "waiting":
            self._new += entries

    def _start(self, engine: int, entries: Sequence[Entry]) -> None:
        load = 0
        for entry in entries:
            load += entry.prompt_tokens + entry.generated
            entry.state, entry.engine = "running", engine
            if entry.kv and entry.kv[0] != engine and not (self._pool and self._pool.pulls(entry.kv_tokens)):
                self._locate_kv(entry, engine)
        self._count["waiting"] -= len(entries)
        self._count["running"] += len(entries)
        self._running_count[engine] += len(entries)
        self._running_load[engine] += load

    def _locate_kv(self, entry: Entry, engine: int, kv: tuple[int, int] | None = None, kv_tokens: int = 0) -> None:
        """Records where the KV of a request of this engine is now; what it has at another is left there."""
        if entry.kv and entry.kv[0] != engine:
            self._left_kv.setdefault(entry.kv[0], []).append(entry.id)
        entry.kv, entry.kv_tokens, entry.kv_weights = kv, kv_tokens, self._weights

    def _stop(self, engine: int, entries: Sequence[Entry], state: State) -> None:
        load = 0
        for entry in entries:
            load += entry.prompt_tokens + entry.generated
            entry.state, entry.engine = state, None
        self._count["running"] -= len(entries)
        self._count[state] += len(entries)
        self._running_count[engine] -= len(entries)
        self._running_load[engine] -= load

    def _next_waiting(self) -> Entry | None:
        """Takes out the oldest waiting request."""
        new, suspended = self._new, self._suspended
        while new or suspended:
            oldest_is_new = not suspended or (new and new[0].position < suspended[0][0])
            entry = new.popleft() if oldest_is_new else heapq.heappop(suspended)[1]
            if self.entries.get(entry.id) is entry:
                if self._pool and entry.kv_weights != self._weights:
                    entry.kv, entry.kv_tokens = None, 0
                return entry
        return None

    def _fill(self, engines: Sequence[int], max_requests: int) -> list[tuple[Entry, int]]:
        """Assigns waiting requests until every engine has its maximum: to the engine with the request's KV, else to
        that of the sibling assigned last, else to the one with the most capacity (of several the first)."""
        room = {engine: max_requests - self._running_count[engine] for engine in engines}
        place = {engine: place for place, engine in enumerate(engines)}
        widest_first = [(-room[engine], place[engine], engine) for engine in engines]
        heapq.heapify(widest_first)
        assigned: list[tuple[Entry, int]] = []
        while widest_first:
            widest_room, _, widest = widest_first[0]
            if -widest_room != room[widest]:  # it has been assigned to since, and may not be the widest any more
                heapq.heapreplace(widest_first, (-room[widest], place[widest], widest))
                continue
            if room[widest] <= 0 or (entry := self._next_waiting()) is None:
                break
            group = self._groups[entry.group]
            wish = entry.kv[0] if entry.kv else group.engine
            engine = widest if wish is None or room.get(wish, 0) <= 0 else wish
            if self._pool and entry.kv_tokens and engine != widest:
                counts = {one: max_requests - room[one] for one in (engine, widest)}
                engine = self._pool.choose_engine(counts, kv_home=engine, least_loaded=widest)
            assigned.append((entry, engine))
            group.engine = engine
            room[engine] -= 1
        return assigned

    def _assign_all(self, engines: Sequence[int]) -> list[tuple[Entry, int]]:
        """Assigns all waiting requests."""
        waiting: list[Entry] = []
        while (entry := self._next_waiting()) is not None:
            waiting.append(entry)
        loads = {engine: self._running_load[engine] for engine in engines}
        home_of = self._return_to_kv(waiting, loads)
        load_by_group: dict[str, int] = {}
        for entry in waiting:
            if entry.id not in home_of:
                load_by_group[entry.group] = load_by_group.get(entry.group, 0) + entry.prompt_tokens + entry.generated
        groups_by_engine = zip(engines, assign_groups(load_by_group, list(loads.values())), strict=True)
        engine_of_group = {group: engine for engine, groups in groups_by_engine for group in groups}
        return [
            (entry, home_of[entry.id] if entry.id in home_of else engine_of_group[entry.group]) for entry in waiting
        ]

    def _return_to_kv(self, waiting: Sequence[Entry], loads: dict[int, int]) -> dict[str, int]:
        """Returns the engine of each waiting request that is resumed where its KV is; adds them to ``loads``, by
        engine."""
        if not any(entry.kv for entry in waiting):
            return {}
        total = sum(loads.values()) + sum(entry.load for entry in waiting)
        counts = LeastLoaded({engine: self._running_count[engine] for engine in loads})
        engine_of: dict[str, int] = {}
        for entry in waiting:
            home = entry.kv[0] if entry.kv else None
            if self._pool and entry.kv_tokens:
                engine = self._pool.choose_engine(counts.num_running, kv_home=home, least_loaded=counts.first())
                counts.add(engine)
                loads[engine] += entry.load
                engine_of[entry.id] = engine
            elif home in loads and loads[home] * len(loads) < total:
                engine_of[entry.id] = home
                loads[home] += entry.load
        return engine_of

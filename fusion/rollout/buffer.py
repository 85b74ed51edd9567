"""Track the requests of all groups in progress, and the engine of each. Pure; holds no token.

    add ──► waiting ──dispatch──► running on an engine ──finish──► finished, until its group is removed
               ▲                      │
               └───── suspend ────────┘   at the end of a chunk, or by a pause; `earlier` names its tokens so far

The idea is Seer's request buffer (arXiv 2511.14617): a group's requests are independent, and a suspended one can be
resumed on any engine.

A suspended request is resumed on the engine that has its KV, oldest first, unless that engine already has an equal
share of the total load or, with a bound on requests, its maximum. It never waits for that engine: if the engine does
not run, the request is resumed elsewhere, and `take_left_kv` reports its unused KV once. `state_dict` does not contain
the location of KV. A request without KV goes where the last one of its group went, if there is capacity: an engine
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
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from fusion.rollout.router import assign_groups

State = Literal["waiting", "running", "finished", "removed"]


@dataclass(slots=True)
class Entry:
    """One request.

    ``max_tokens``: of its whole response; ``generated``: tokens so far; ``engine``: that has it while it runs;
    ``earlier``: the queue's row that holds its tokens so far, "" for none; ``oldest``, ``newest``: policy versions of
    its tokens so far, -1 for none; ``kv``: engine and attention rank that have its KV; ``position``: in the order
    of all requests ever added; ``behind``: whether probes run ahead of it.
    """

    id: str
    group: str
    prompt_tokens: int
    max_tokens: int
    position: int = 0
    behind: bool = False
    generated: int = 0
    state: State = "waiting"
    engine: int | None = None
    earlier: str = ""
    oldest: int = -1
    newest: int = -1
    kv: tuple[int, int] | None = None

    @property
    def load(self) -> int:
        """Number of known tokens that an engine must process to start or resume the request."""
        return self.prompt_tokens + self.generated

    @property
    def priority(self) -> int:
        """Of the requests that wait in an engine, those of the lowest priority begin first."""
        return int(self.behind and not self.generated)


by_position = attrgetter("position")
"""Key by which requests are sorted"""

SAVED = tuple(field.name for field in fields(Entry) if field.name not in ("position", "behind"))
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

    ``num_probes``: requests of a group that run ahead of the others; 0: none.
    """

    def __init__(self, num_probes: int = 0) -> None:
        self._num_probes = num_probes
        self.entries: dict[str, Entry] = {}
        self._groups: dict[str, Group] = {}
        self._left_kv: dict[int, list[str]] = {}
        self._added = 0
        """Number of requests ever added"""
        self._new: deque[Entry] = deque()
        """Waiting requests that have not run yet, in order. It may also hold removed ones."""
        self._suspended: list[tuple[int, Entry]] = []
        """The other waiting requests, a heap by position; likewise"""
        self._count: Counter[State] = Counter()
        self._running_count: Counter[int] = Counter()
        """Engine → requests that it has; `_running_load` their tokens"""
        self._running_load: Counter[int] = Counter()

    def add(self, group: str, ids: Iterable[str], prompt_tokens: int, max_tokens: int) -> None:
        """Adds a group of requests, which wait from now on."""
        assert group not in self._groups, f"group {group!r} was added before"
        first, num_probes = self._added, self._num_probes
        self._insert(
            group,
            "waiting",
            [
                Entry(id, group, prompt_tokens, max_tokens, first + member, member >= num_probes > 0)
                for member, id in enumerate(ids)
            ],
        )

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
        by_engine = self._assign_all(engines) if max_requests is None else self._fill(engines, max_requests)
        for engine, entries in by_engine.items():
            if entries:
                self._start(engine, entries)
        return by_engine

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
    ) -> None:
        """Returns a request from an engine to the waiting ones.

        Args:
            generated: tokens so far.
            earlier: the queue's row that holds them.
            versions: of its oldest and newest token; None: nothing was added.
            kv_rank: the attention rank at which the engine keeps its KV; None: it does not.
        """
        entry = self.entries[id]
        assert entry.state == "running" and entry.engine == engine, f"request {id!r} is {entry.state}, not on {engine}"
        assert generated >= entry.generated, f"request {id!r} had {entry.generated} tokens and has {generated}"
        self._count["running"] -= 1
        self._count["waiting"] += 1
        self._running_count[engine] -= 1
        self._running_load[engine] -= entry.load
        entry.state, entry.engine = "waiting", None
        entry.generated, entry.earlier = generated, earlier
        entry.kv = None if kv_rank is None else (engine, kv_rank)
        if versions is not None:
            entry.oldest, entry.newest = versions
        heapq.heappush(self._suspended, (entry.position, entry))

    def finish(self, generated: Mapping[str, int]) -> Finished:
        """Marks requests finished. ``generated``: the tokens of each, by id."""
        engines: dict[int, None] = {}
        groups: list[str] = []
        for id, num_tokens in generated.items():
            entry = self.entries[id]
            engine = entry.engine
            assert entry.state == "running" and engine is not None, f"request {id!r} is {entry.state}"
            engines[engine] = None
            self._running_count[engine] -= 1
            self._running_load[engine] -= entry.prompt_tokens + entry.generated
            entry.state, entry.engine, entry.kv = "finished", None, None
            entry.generated, entry.earlier = num_tokens, ""
            group = self._groups[entry.group]
            group.num_unfinished -= 1
            if not group.num_unfinished:
                groups.append(entry.group)
        self._count["running"] -= len(generated)
        self._count["finished"] += len(generated)
        return Finished(list(engines), groups)

    def is_finished(self, group: str) -> bool:
        """Whether all requests of a group are finished."""
        return not self._groups[group].num_unfinished

    def remove(self, group: str) -> list[Entry]:
        """Removes a group, none of whose requests is on an engine; returns its requests."""
        members = self._groups.pop(group).members
        for entry in members:
            assert entry.state != "running", f"request {entry.id!r} is still on engine {entry.engine}"
            self._count[entry.state] -= 1
            entry.state = "removed"
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
            entry = Entry(**{key: value for key, value in fields_.items() if key in SAVED}, position=self._added)
            group = self._groups.get(entry.group)
            entry.behind = (len(group.members) if group else 0) >= self._num_probes > 0
            self._insert(entry.group, entry.state, [entry])

    def _insert(self, group: str, state: State, entries: list[Entry]) -> None:
        """Adds requests of one group in one state, the newest of all."""
        known = self._groups.setdefault(group, Group())
        known.members += entries
        self.entries.update({entry.id: entry for entry in entries})
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
            if entry.kv and entry.kv[0] != engine:
                self._left_kv.setdefault(entry.kv[0], []).append(entry.id)
                entry.kv = None
        self._count["waiting"] -= len(entries)
        self._count["running"] += len(entries)
        self._running_count[engine] += len(entries)
        self._running_load[engine] += load

    def _next_waiting(self) -> Entry | None:
        """Takes out the oldest waiting request."""
        new, suspended = self._new, self._suspended
        while new or suspended:
            oldest_is_new = not suspended or (new and new[0].position < suspended[0][0])
            entry = new.popleft() if oldest_is_new else heapq.heappop(suspended)[1]
            if entry.state == "waiting":
                return entry
        return None

    def _fill(self, engines: Sequence[int], max_requests: int) -> dict[int, list[Entry]]:
        """Assigns waiting requests until every engine has its maximum: to the engine with the request's KV, else to
        that of the sibling assigned last, else to the one with the most capacity (of several the first)."""
        by_engine: dict[int, list[Entry]] = {engine: [] for engine in engines}
        room: dict[int, int] = {}
        """By engine that has any"""
        widest_first: list[tuple[int, int, int]] = []
        """Minus its room, its place among the engines, and its number; or an earlier room, which was larger"""
        for place, engine in enumerate(engines):
            num_more = max_requests - self._running_count[engine]
            if num_more > 0:
                room[engine] = num_more
                widest_first.append((-num_more, place, engine))
        heapq.heapify(widest_first)
        while widest_first:
            widest_room, place, widest = widest_first[0]
            if -widest_room != room[widest]:  # it has been assigned to since, and may not be the widest any more
                heapq.heapreplace(widest_first, (-room[widest], place, widest))
                continue
            if room[widest] <= 0 or (entry := self._next_waiting()) is None:
                break
            group = self._groups[entry.group]
            wish = entry.kv[0] if entry.kv else group.engine
            engine = widest if wish is None or room.get(wish, 0) <= 0 else wish
            by_engine[engine].append(entry)
            group.engine = engine
            room[engine] -= 1
        return by_engine

    def _assign_all(self, engines: Sequence[int]) -> dict[int, list[Entry]]:
        """Assigns all waiting requests."""
        loads = {engine: self._running_load[engine] for engine in engines}
        by_engine: dict[int, list[Entry]] = {engine: [] for engine in engines}
        others: dict[str, list[Entry]] = {}
        load_by_group: dict[str, int] = {}
        for entry in self._return_to_kv(loads, by_engine):
            group, load = entry.group, entry.prompt_tokens + entry.generated
            if group in others:
                others[group].append(entry)
                load_by_group[group] += load
            else:
                others[group], load_by_group[group] = [entry], load
        groups_by_engine = assign_groups(load_by_group, list(loads.values()))
        for entries, groups in zip(by_engine.values(), groups_by_engine, strict=True):
            has_resumed = bool(entries)
            for group in groups:
                entries += others[group]
            if has_resumed:
                entries.sort(key=by_position)
        return by_engine

    def _return_to_kv(self, loads: dict[int, int], by_engine: Mapping[int, list[Entry]]) -> Iterable[Entry]:
        """Takes out all waiting requests and assigns those that are resumed where their KV is: adds them to
        ``by_engine`` and to ``loads``, both by engine. Returns the others, in the order of all."""
        new, self._new = self._new, deque()
        waiting = (entry for entry in new if entry.state == "waiting")
        if not self._suspended:
            return waiting
        suspended, self._suspended = self._suspended, []
        both = sorted((*waiting, *(entry for _, entry in suspended if entry.state == "waiting")), key=by_position)
        total = sum(loads.values()) + sum(entry.load for entry in both)
        others: list[Entry] = []
        for entry in both:
            home = entry.kv[0] if entry.kv else None
            if home in loads and loads[home] * len(loads) < total:
                by_engine[home].append(entry)
                loads[home] += entry.load
            else:
                others.append(entry)
        return others

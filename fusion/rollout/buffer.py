"""The requests of all groups that are under way, and which engine has which. Pure; holds no token.

    add ──► waiting ──dispatch──► on an engine ──finish──► finished, until its group leaves
               ▲                      │
               └───── suspend ────────┘   what it has so far is named by `earlier`; at a chunk's end, or for a while

The idea is Seer's request buffer (arXiv 2511.14617): a group's requests are independent, and one that was cut short may
go on anywhere.

Invariants (property-tested in tests/rollout/test_buffer.py): a request is on at most one engine; it is finished once;
what was generated is never less than before; a group leaves as a whole; `state_dict` and back is the same buffer with
nothing on an engine. A suspended request whose KV an engine has goes back there, oldest first, unless that engine has
its even share of all load already, or, where engines get no more than ``most``, so many; it never waits for it: where
that engine does not run, it goes on elsewhere and leaves its KV, which `left` tells once. Where KV is is in no
`state_dict`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fusion.rollout.router import assign_groups

State = Literal["waiting", "running", "finished"]


@dataclass
class Entry:
    """One request. ``max_tokens``: of its whole response; ``earlier``: where its tokens so far are kept, "" for none;
    ``oldest``, ``newest``: policy versions of its tokens so far, -1 for none; ``kv``: engine and attention rank that
    have its KV."""

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
    suspensions: int = 0
    kv: tuple[int, int] | None = None


class RequestBuffer:
    """Groups in the order in which they were added: the oldest come first wherever there is a choice."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self._groups: dict[str, list[Entry]] = {}
        self._left: dict[int, list[str]] = {}

    def add(self, group: str, ids: Iterable[str], prompt_tokens: int, max_tokens: int) -> None:
        assert group not in self._groups, f"group {group!r} is there already"
        self._groups[group] = [Entry(id, group, prompt_tokens, max_tokens) for id in ids]
        self.entries |= {entry.id: entry for entry in self._groups[group]}

    def of(self, state: State) -> list[Entry]:
        """Requests in this state, oldest group first."""
        return [entry for entry in self.entries.values() if entry.state == state]

    def dispatch(self, engines: Sequence[int], most: int | None = None) -> dict[int, list[Entry]]:
        """Gives waiting requests to engines; returns those of each. Without ``most`` all of them: those with KV to
        the engine that has it as far as loads stay even, the others of a group together, the least loaded engine
        first. With it, oldest first until every engine has so many: what waits here may still go anywhere."""
        chosen = self._deal(engines) if most is None else self._fill({n: most - self.count(n) for n in engines})
        found: dict[int, list[Entry]] = {engine: [] for engine in engines}
        for id, engine in chosen.items():
            entry = self.entries[id]
            found[engine].append(entry)
            entry.state, entry.engine = "running", engine
            if entry.kv and entry.kv[0] != engine:
                self._left.setdefault(entry.kv[0], []).append(id)
                entry.kv = None
        return found

    def left(self) -> dict[int, list[str]]:
        """By engine, the requests that have gone elsewhere since this was asked last and left their KV there."""
        left, self._left = self._left, {}
        return left

    def count(self, engine: int) -> int:
        """Requests that an engine has."""
        return sum(entry.engine == engine for entry in self.of("running"))

    def _fill(self, room: dict[int, int]) -> dict[str, int]:
        """Waiting request → engine, as far as there is ``room`` by engine: where its KV is, else where its sibling has
        just gone, else where most is."""
        chosen: dict[str, int] = {}
        before: dict[str, int] = {}
        for entry in self.of("waiting"):
            widest = max(room, key=lambda engine: room[engine])
            if room[widest] <= 0:
                break
            wish = entry.kv[0] if entry.kv else before.get(entry.group, widest)
            engine = wish if room.get(wish, 0) > 0 else widest
            chosen[entry.id] = before[entry.group] = engine
            room[engine] -= 1
        return chosen

    def _deal(self, engines: Sequence[int]) -> dict[str, int]:
        loads = {engine: 0 for engine in engines}
        for entry in self.of("running"):
            if entry.engine in loads:
                loads[entry.engine] += self._load(entry)
        chosen = self._go_back(loads)
        waiting: dict[str, list[Entry]] = {}
        for entry in self.of("waiting"):
            if entry.id not in chosen:
                waiting.setdefault(entry.group, []).append(entry)
        load_by_group = {group: sum(map(self._load, members)) for group, members in waiting.items()}
        dealt = assign_groups(load_by_group, list(loads.values()))
        for engine, groups in zip(engines, dealt, strict=True):
            chosen |= {entry.id: engine for group in groups for entry in waiting[group]}
        return {entry.id: chosen[entry.id] for entry in self.of("waiting")}

    def _go_back(self, loads: dict[int, int]) -> dict[str, int]:
        """The engine of each waiting request that returns to its KV; adds them to ``loads`` by engine."""
        waiting = self.of("waiting")
        total, chosen = sum(loads.values()) + sum(map(self._load, waiting)), {}
        for entry in waiting:
            home = entry.kv[0] if entry.kv else None
            if home in loads and loads[home] * len(loads) < total:
                chosen[entry.id] = home
                loads[home] += self._load(entry)
        return chosen

    def suspend(
        self,
        engine: int,
        id: str,
        generated: int,
        earlier: str,
        versions: tuple[int, int] | None,
        kv_rank: int | None = None,
    ) -> None:
        """An engine has let go of a request. ``versions``: of its oldest and newest token; None: nothing was added.
        ``kv_rank``: the attention rank at which the engine has its KV; None: it has not."""
        entry = self.entries[id]
        assert entry.state == "running" and entry.engine == engine, f"request {id!r} is {entry.state}, not on {engine}"
        assert generated >= entry.generated, f"request {id!r} had {entry.generated} tokens and has {generated}"
        entry.state, entry.engine = "waiting", None
        entry.generated, entry.earlier = generated, earlier
        entry.kv = None if kv_rank is None else (engine, kv_rank)
        entry.suspensions += generated > 0
        if versions is not None:
            entry.oldest, entry.newest = versions

    def finish(self, id: str, generated: int) -> Entry:
        entry = self.entries[id]
        assert entry.state == "running", f"request {id!r} is {entry.state}"
        entry.state, entry.engine, entry.generated, entry.earlier = "finished", None, generated, ""
        entry.kv = None
        return entry

    def is_finished(self, group: str) -> bool:
        return all(entry.state == "finished" for entry in self._groups[group])

    def remove(self, group: str) -> list[Entry]:
        """The group has ended, or all of it is somebody else's. Returns its requests."""
        members = self._groups.pop(group)
        for entry in members:
            assert entry.state != "running", f"request {entry.id!r} is still on engine {entry.engine}"
            del self.entries[entry.id]
        return members

    @property
    def groups(self) -> list[str]:
        return list(self._groups)

    def __contains__(self, group: str) -> bool:
        return group in self._groups

    def state_dict(self) -> list[dict[str, Any]]:
        """Plain JSON. Nothing is on an engine."""
        assert not self.of("running"), "engines are suspended before the buffer is saved"
        return [asdict(entry) | {"kv": None} for entry in self.entries.values()]

    def load_state_dict(self, state: Iterable[dict[str, Any]]) -> None:
        for fields in state:
            entry = Entry(**fields)
            self.entries[entry.id] = entry
            self._groups.setdefault(entry.group, []).append(entry)

    @staticmethod
    def _load(entry: Entry) -> int:
        """Tokens an engine will have to look at, as far as they are known."""
        return entry.prompt_tokens + entry.generated

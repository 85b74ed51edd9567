"""Track the requests of all groups in progress, and the engine of each. Pure; holds no token.

    add ──► waiting ──dispatch──► running on an engine ──finish──► finished, until its group is removed
               ▲ ▲                    │
               │ └─── suspend ────────┤   at the end of a chunk, or by a pause; `earlier` names its tokens so far
    observe_returned                  │
    branch     └─ away ◄── suspend ───┘   at the end of a conversation's turn, until its environment has answered;
                   └─────── finish ───►   or it has ended with that turn

The idea is Seer's request buffer (arXiv 2511.14617): a group's requests are independent, and a suspended one can be
resumed on any engine.

A suspended request is resumed on the engine that has its KV, oldest first, unless that engine already has an equal
share of the total load or, with a bound on requests, its maximum. It never waits for that engine: if the engine does
not run, the request is resumed elsewhere, and `take_left_kv` reports its unused KV once. `state_dict` does not contain
the location of KV. A request whose KV is in the machine's pool (`kv_tokens`) prefers the engine that has parked it by
`PoolRouting`; another engine may copy it, also one of another machine, so `take_left_kv` reports it once the request
has left that engine, too. A request without KV goes where the last one of its group went, if there is capacity: an
engine shares prefixes of, and drafts from, what it has computed itself.

The first ``num_probes`` requests of a group run ahead (Seer's probes), so that the others have a whole response to
draft from. This is an order within an engine (`Entry.priority`) and no condition: where there is capacity, no request
waits for a probe.

Which waiting request comes next is decided by an order (`orders/`), where it goes by `dispatch.py`. With bounds
(`EngineRoom`) a request goes only where its prompt, its tokens so far and those of its next chunk fit, besides those of
all requests that the engine has; if the next one fits nowhere, nothing goes. An engine without a request takes any.

`end` cancels a group, as the environment of one of its requests has failed: those that wait or are away are finished,
the others when they come back, suspended or not. `take_left_rows` reports once which rows of the queue that leaves.

A conversation that cannot be continued behind its tokens is continued in another `branch`: with another prompt and
under another name, for engines and queue. Here it stays one request.

Cost, for n requests in progress and E engines: `finish` O(1) a request (with an order that knows siblings, as in
`orders/ranked.py`), counts O(1); `suspend`, `observe_returned` O(log n); `end` O(log n) a request; `dispatch`
O(E + d (log n + log E)) for d requests. Only `of`, `forget_kv`, `state_dict` and, where engines share KV,
`observe_new_weights` visit all requests.

Invariants (property-tested in tests/rollout/test_buffer.py): a request is on at most one engine; it is finished once;
its number of generated tokens decreases only by a branch; a group is removed as a whole; a buffer restored from
`state_dict` is the same buffer with nothing on an engine; an engine with several requests has at most its bounds of
requests and KV."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import fsum
from typing import Any

from fusion.rollout.dispatch import EngineRoom, PoolRouting, assign_all, fill
from fusion.rollout.entry import SAVED, SAVED_IF_SET, EngineHoldings, Entry, Finished, RequestGroup, State
from fusion.rollout.length_history import MAX_ROWS, LengthHistory, row_of
from fusion.rollout.orders import find_order
from fusion.rollout.orders.interface import Lengths, OrderInputs
from fusion.rollout.orders.length_classes import HistoPipeSpec
from fusion.rollout.types import SuspendedSample, branch_id, conversation_of


class RequestBuffer:
    """Hold requests by group, in the order in which groups were added. ``num_probes``: requests of a group that run
    ahead of the others; 0: none; ``order``: in which they are dispatched: a name as of `rollout.schedule.order`;
    ``exact_lengths``: gives the lengths of all responses of a group, for the order `oracle`; ``pool``: how engines
    share KV; None: they do not; ``max_rows``: rows of the data of which lengths are kept, for orders that know the last
    epoch; 0: none comes a second time; ``histopipe``: settings of the order `histopipe`; None with another one."""

    def __init__(
        self,
        num_probes: int = 0,
        order: str = "fifo",
        exact_lengths: Callable[[str], Sequence[int]] = lambda group: (),
        pool: PoolRouting | None = None,
        max_rows: int = MAX_ROWS,
        histopipe: HistoPipeSpec | None = None,
    ) -> None:
        self._num_probes, self._exact_lengths, self._pool = num_probes, exact_lengths, pool
        self.entries: dict[str, Entry] = {}
        self._groups: dict[str, RequestGroup] = {}
        self._left_kv: dict[int, list[str]] = {}
        self._left_rows: list[str] = []
        self._newly_away: list[Entry] = []
        self._added = 0
        """Number of requests ever added"""
        self.history = LengthHistory(max_rows)
        """Lengths of the rows whose groups have ended, if the order knows them"""
        self._waiting = find_order(order)(OrderInputs(self.history, histopipe))
        self._count: Counter[State] = Counter()
        self._held: defaultdict[int, EngineHoldings] = defaultdict(EngineHoldings)
        """Engine → what it has"""
        self._migrated = 0
        """Requests with tokens that were dispatched to another engine than the last one, since `take_metrics`"""

    def add(self, group: str, ids: Iterable[str], prompt_tokens: int, max_tokens: int, step: int = 0) -> None:
        """Add a group of requests, which wait from now on. ``step``: in which it is expected to be trained."""
        assert group not in self._groups, f"group {group!r} was added before"
        self._add_group(group, max_tokens, step)
        first, num_probes = self._added, self._num_probes
        self._insert(
            group,
            "waiting",
            [
                Entry(id, group, prompt_tokens, max_tokens, first + member, member, member >= num_probes > 0, step=step)
                for member, id in enumerate(ids)
            ],
        )

    def of(self, state: State) -> list[Entry]:
        """Return all requests in this state, oldest group first."""
        return [entry for entry in self.entries.values() if entry.state == state]

    def num(self, state: State) -> int:
        return self._count[state]

    @property
    def num_idle(self) -> int:
        """Number of requests that wait or are away."""
        return self._count["waiting"] + self._count["away"]

    def num_running_on(self, engine: int) -> int:
        return self._held[engine].requests

    def dispatch(
        self, engines: Sequence[int], room: EngineRoom | None = None, *, slots: int = 0
    ) -> dict[int, list[Entry]]:
        """Assign waiting requests to engines; return the assigned ones by engine, in the order of all. Without ``room``
        all are assigned: those with KV to the engine that has it as far as loads stay even, the others of a group
        together, to the least loaded engine; the oldest first if all can run at once. With it they are assigned in
        order until the next one fits no engine: what waits here may still go anywhere. ``slots``: requests that an
        engine decodes at a time."""
        if room is None:
            loads = {engine: self._held[engine].tokens for engine in engines}
            counts = {engine: self._held[engine].requests for engine in engines}
            ranked = len(self._waiting) + sum(counts.values()) > slots * len(engines)
            by_engine = assign_all(self._waiting.take_all(ranked=ranked), loads, counts, self._pool)
        else:
            vacancies = {
                engine: room.left(held.requests, held.reserved)
                for engine in engines
                if (held := self._held[engine]).requests < room.requests
            }
            assigned = fill(self._waiting, vacancies, room, self._groups, self._pool)
            by_engine = {engine: assigned.get(engine, []) for engine in engines}
        for engine, entries in by_engine.items():
            if entries:
                self._start(engine, entries)
        return by_engine

    def observe_new_weights(self) -> None:
        """Record that engines which share KV free all of it, because their weights are new."""
        for entry in self.entries.values() if self._pool else ():
            if entry.state in ("waiting", "away"):
                entry.kv, entry.kv_tokens = None, 0

    def forget_kv(self, engine: int) -> None:
        """Record that the KV that an engine has is gone, because the engine has died."""
        self._left_kv.pop(engine, None)
        for entry in self.entries.values():
            if entry.kv and entry.kv[0] == engine:
                entry.kv, entry.kv_tokens = None, 0

    def take_left_kv(self) -> dict[int, list[str]]:
        """Return, by engine, the requests that were resumed elsewhere since the last call and left their KV there."""
        left, self._left_kv = self._left_kv, {}
        return left

    def take_away(self) -> list[Entry]:
        """Return the requests that are away since the last call or, of a restored buffer, since it was restored."""
        entries, self._newly_away = self._newly_away, []
        return [entry for entry in entries if entry.state == "away"]

    def take_left_rows(self) -> list[str]:
        """Return the queue's rows of cancelled requests since the last call: nothing refers to them any more."""
        left, self._left_rows = self._left_rows, []
        return left

    def take_metrics(self) -> dict[str, float]:
        """Return the number of requests that have continued on another engine since the last call and, with an order
        that estimates lengths, the mean relative error of the estimates for the responses that have finished."""
        migrated, self._migrated = self._migrated, 0
        metrics = {"rollout/migrations_total": float(migrated)}
        if errors := self._waiting.take_errors():
            metrics["rollout/length_error_mean"] = fsum(errors) / len(errors)  # in whatever order they have come
        return metrics

    def suspend(self, engine: int, sample: SuspendedSample) -> None:
        """Return a request from an engine to the waiting ones or, at the end of a turn, to those that are away."""
        entry, generated, kv_rank = self.entries[conversation_of(sample.id)], sample.generated, sample.kv_rank
        assert entry.engine == engine, f"request {entry.id!r} is {entry.state}, not on {engine}"
        assert entry.name == sample.id, f"branch {sample.id!r} of request {entry.id!r} has ended"
        assert generated >= entry.generated, f"request {entry.id!r} had {entry.generated} tokens and has {generated}"
        self._stop(entry)
        if generated > entry.generated:
            entry.observation = 0
        entry.state = "away" if sample.turn else "waiting"
        self._count["running"] -= 1
        self._count[entry.state] += 1
        entry.generated, entry.earlier = generated, sample.earlier
        entry.last_engine = engine
        self._locate_kv(entry, engine, None if kv_rank is None else (engine, kv_rank), sample.kv_tokens)
        if sample.versions is not None:
            entry.oldest, entry.newest = sample.versions
        if self._groups[entry.group].cancelled:
            self._cancel(entry)
        elif sample.turn:
            self._newly_away.append(entry)
        else:
            self._waiting.add([entry])

    def observe_returned(self, id: str, observation_tokens: int) -> None:
        """Return a request that is away to the waiting ones, with the tokens that its environment has answered."""
        entry = self.entries[id]
        assert entry.state == "away" and observation_tokens > 0, f"request {id!r} is {entry.state}"
        entry.observation = observation_tokens
        entry.generated += observation_tokens
        self._return(entry)

    def branch(self, id: str, prompt_tokens: int, max_tokens: int) -> None:
        """Return a request that is away to the waiting ones, as another branch of its conversation: with a prompt of
        ``prompt_tokens`` and a response of at most ``max_tokens``, of which none is generated."""
        entry = self.entries[id]
        assert entry.state == "away" and max_tokens > 0, f"request {id!r} is {entry.state}"
        if entry.kv is not None:
            self._locate_kv(entry, None)
        entry.branch += 1
        entry.prompt_tokens, entry.max_tokens, entry.generated, entry.observation = prompt_tokens, max_tokens, 0, 0
        entry.earlier, entry.oldest, entry.newest, entry.last_engine = "", -1, -1, None
        self._return(entry)

    def _return(self, entry: Entry) -> None:
        entry.state = "waiting"
        self._count["away"] -= 1
        self._count["waiting"] += 1
        self._waiting.add([entry])

    def end(self, group: str) -> None:
        """Cancel a group: its requests that wait or are away are finished, the others when they come back."""
        known = self._groups[group]
        known.cancelled, known.complete = True, False
        self._waiting.discard(group, [entry for entry in known.members if entry.state == "waiting"])
        for entry in known.members:
            if entry.state in ("waiting", "away"):
                self._cancel(entry)

    def num_unfinished(self, group: str) -> int:
        return self._groups[group].num_unfinished

    def finish(self, generated: Mapping[str, int], *, lost: bool = False) -> Finished:
        """Mark requests finished that run or are away. ``generated``: tokens by id; ``lost``: as far as known."""
        engines: dict[int, None] = {}
        groups: list[str] = []
        num_away = 0
        for id, num_tokens in generated.items():
            entry, engine = self.entries[id], None
            if entry.state == "away":
                num_away += 1
            else:
                engine = self._stop(entry)
                engines[engine] = None
            if entry.kv is not None:
                self._locate_kv(entry, engine)
            entry.state, entry.generated, entry.earlier = "finished", num_tokens, ""
            group = self._groups[entry.group]
            group.num_unfinished -= 1
            groups += [] if group.num_unfinished else [entry.group]
            if lost:
                group.complete = False
            elif not group.cancelled:
                self._waiting.observe_finished(entry.group, num_tokens)
        self._count["away"] -= num_away
        self._count["running"] -= len(generated) - num_away
        self._count["finished"] += len(generated)
        return Finished(list(engines), groups)

    def remove(self, group: str) -> list[Entry]:
        """Remove a group, none of whose requests is on an engine; return its requests."""
        removed = self._groups.pop(group)
        members = removed.members
        for entry in members:
            assert entry.engine is None, f"request {entry.id!r} is still on engine {entry.engine}"
            del self.entries[entry.id]
        self._count["finished"] -= len(members) - removed.num_unfinished
        unfinished = [entry for entry in members if entry.state != "finished"] if removed.num_unfinished else []
        waiting = [entry for entry in unfinished if entry.state == "waiting"]
        self._count["waiting"] -= len(waiting)
        self._count["away"] -= len(unfinished) - len(waiting)
        if not removed.cancelled:
            self._waiting.discard(group, waiting)
        if self._waiting.knows_last_epoch and removed.complete and not removed.num_unfinished:
            self.history.observe(members[0].position, row_of(group), [entry.generated for entry in members])
        return members

    def state_dict(self) -> list[dict[str, Any]]:
        """Return plain JSON. All requests must have been suspended: no engine may have one."""
        assert not self.num("running"), "engines are suspended before the buffer is saved"
        return [
            {name: value for name in SAVED if (value := getattr(one, name)) or name not in SAVED_IF_SET} | {"kv": None}
            for one in self.entries.values()
        ]

    def load_state_dict(self, state: Iterable[dict[str, Any]]) -> None:
        """Restore a buffer into this empty one. Keys of earlier formats that are not used any more are ignored."""
        for fields_ in state:
            entry = Entry(**{key: value for key, value in fields_.items() if key in SAVED}, position=self._added)
            if entry.group not in self._groups:
                self._add_group(entry.group, entry.max_tokens, entry.step)
            entry.member = len(self._groups[entry.group].members)
            entry.behind = entry.member >= self._num_probes > 0
            self._insert(entry.group, entry.state, [entry])
            if entry.state == "finished":
                self._waiting.observe_finished(entry.group, entry.generated)
        self._waiting.take_errors()  # they were reported before

    def _add_group(self, group: str, max_tokens: int, step: int) -> None:
        self._groups[group] = RequestGroup()
        lengths = Lengths(max_tokens, self.history.of(row_of(group)), self._exact_lengths(group), step=step)
        self._waiting.add_group(group, lengths)

    def _insert(self, group: str, state: State, entries: list[Entry]) -> None:
        """Add requests of one group in one state, the newest of all."""
        known = self._groups[group]
        known.members += entries
        self.entries.update({entry.id: entry for entry in entries})
        self._added += len(entries)
        self._count[state] += len(entries)
        if state != "finished":
            known.num_unfinished += len(entries)
        if state == "waiting":
            self._waiting.add(entries)
        elif state == "away":
            self._newly_away += entries

    def _start(self, engine: int, entries: Sequence[Entry]) -> None:
        held = self._held[engine]
        held.requests += len(entries)
        for entry in entries:
            held.tokens += entry.prompt_tokens + entry.generated
            held.reserved += entry.reserved
            entry.state, entry.engine = "running", engine
            if entry.generated and entry.last_engine not in (None, engine):  # None: not known after a restart
                self._migrated += 1
            if entry.kv and entry.kv[0] != engine and not self._pulls(entry, entry.kv[0], engine):
                self._locate_kv(entry, engine)
        self._count["waiting"] -= len(entries)
        self._count["running"] += len(entries)

    def _pulls(self, entry: Entry, kv_home: int, engine: int) -> bool:
        return self._pool is not None and self._pool.pulls(entry.kv_tokens, kv_home=kv_home, engine=engine)

    def _cancel(self, entry: Entry) -> None:
        """Finish a request of a cancelled group, which is on no engine."""
        if entry.kv is not None:
            self._locate_kv(entry, None)
        self._left_rows += [branch_id(entry.id, number) for number in range(entry.branch)]
        if entry.earlier:
            self._left_rows.append(entry.earlier)
        self._count[entry.state] -= 1
        self._count["finished"] += 1
        entry.state, entry.earlier = "finished", ""
        self._groups[entry.group].num_unfinished -= 1

    def _locate_kv(
        self, entry: Entry, engine: int | None, kv: tuple[int, int] | None = None, kv_tokens: int = 0
    ) -> None:
        """Record where the KV of a request of this engine (None: of none) is now; what another engine has stays."""
        if entry.kv and entry.kv[0] != engine:
            self._left_kv.setdefault(entry.kv[0], []).append(entry.name)
        entry.kv, entry.kv_tokens = kv, kv_tokens

    def _stop(self, entry: Entry) -> int:
        """Take a request from its engine, which it returns."""
        engine = entry.engine
        assert entry.state == "running" and engine is not None, f"request {entry.id!r} is {entry.state}"
        held = self._held[engine]
        held.requests -= 1
        held.tokens -= entry.prompt_tokens + entry.generated
        held.reserved -= entry.reserved
        entry.engine, entry.reserved = None, 0
        return engine

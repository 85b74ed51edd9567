"""The sample table: which sample is ready for which task, who holds it, and how it ended. Pure: time is passed in.

    put ──► live ──┬─ every task acknowledged ──► done            per task of a live row:
                   └─ drop(reason) ─────────────► dropped:reason     open ──lease──► leased ──ack──► acked
                                                                      ▲───lease expired───┘
Invariants (property-tested against a plain model in tests/distqueue/test_sample_table.py):
1. Every row ever put is live or ended under a name (`ended` counts them): rows never vanish and never come back
   (the last REMEMBERED ids that ended are recognised).
2. `plan` proposes only live rows, open for the task, that hold every wanted column, oldest row first; with
   `whole_groups`, every member of a group that neither ended nor was acknowledged by the task, and only once all
   members of the group have been put. It fills the count, or the token budget as far as whole samples do, or is None.
3. A sample is leased by one reader of a task at a time; an expired lease opens it again; `acked` is final.
4. A call that raises has changed nothing.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

REMEMBERED = 100_000
"""The last ids that ended, kept so that a straggler's put or ack for one of them is recognised as late"""

Span = tuple[int, int]
"""Policy versions of the oldest and the newest token of a sample"""


@dataclass(frozen=True)
class Want:
    """What a reader asks for: `count` samples, or as many as fit `token_budget`, whichever is reached first."""

    task: str
    columns: tuple[str, ...]
    count: int | None = None
    token_budget: int | None = None
    whole_groups: bool = False

    def __post_init__(self) -> None:
        if not self.columns:
            raise ValueError("columns=(): expected the columns to read")
        if self.count is None and self.token_budget is None:
            raise ValueError("expected count or token_budget")
        for name, value in (("count", self.count), ("token_budget", self.token_budget)):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected a positive number")


@dataclass
class Claim:
    """Where a row stands for one task."""

    state: str = "open"
    leases: int = 0


@dataclass
class Row:
    """A live sample. `columns`: tokens per column held (1 where the column has no sequence)."""

    id: str
    group: str
    versions: Span | None
    born_s: float
    columns: dict[str, int]
    claims: dict[str, Claim]


@dataclass
class Group:
    """Members of a group put so far, and those of them still live."""

    put: int = 0
    live: dict[str, None] = field(default_factory=dict)


class SampleTable:
    """Rows in order of their first put. `group_size`: members of every group, needed for `whole_groups`."""

    def __init__(self, tasks: Iterable[str], lease_s: float, group_size: int | None = None) -> None:
        self.tasks = tuple(tasks)
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks={self.tasks}: expected at least one, all different")
        if lease_s <= 0:
            raise ValueError(f"lease_s={lease_s}: expected seconds > 0")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size={group_size}: expected a positive number or None")
        self.lease_s = lease_s
        self.group_size = group_size
        self.rows: dict[str, Row] = {}
        self.groups: dict[str, Group] = {}
        self.ended: Counter[str] = Counter()
        self.redelivered: Counter[str] = Counter()
        self._endings: OrderedDict[str, str] = OrderedDict()
        self._expiries: list[tuple[float, str, str]] = []
        """(seconds, task, id) per lease, a heap; one entry each, as only its end or an ack or drop ends a lease"""

    def put(
        self,
        ids: Sequence[str],
        columns: Mapping[str, Sequence[int]],
        groups: Sequence[str],
        versions: Sequence[Span],
        now_s: float,
    ) -> tuple[str, ...]:
        """Creates rows, or adds columns to live ones. `columns`: tokens per sample of each; `groups`, `versions`: per
        sample, or () where not said. Returns the ids that came too late: dropped before, so not stored.

        ValueError: a column put twice, a sample that is already done, a group that changes or grows too large.
        """
        self._check_put(ids, columns, groups)
        late = []
        for i, id in enumerate(ids):
            if id in self._endings:
                late.append(id)
                continue
            if id not in self.rows:
                group = groups[i] if groups else ""
                self.rows[id] = Row(id, group, None, now_s, {}, {task: Claim() for task in self.tasks})
                if group:
                    members = self.groups.setdefault(group, Group())
                    members.put += 1
                    members.live[id] = None
            row = self.rows[id]
            row.columns.update({name: tokens[i] for name, tokens in columns.items()})
            if versions:
                spans = (versions[i], row.versions or versions[i])
                row.versions = (min(span[0] for span in spans), max(span[1] for span in spans))
        return tuple(late)

    def _check_put(self, ids: Sequence[str], columns: Mapping[str, Sequence[int]], groups: Sequence[str]) -> None:
        new: Counter[str] = Counter()
        for i, id in enumerate(ids):
            row, ending, group = self.rows.get(id), self._endings.get(id), groups[i] if groups else ""
            if ending == "done":
                raise ValueError(f"sample {id!r}: every task has acknowledged it; nothing can be put to it any more")
            if row:
                if twice := row.columns.keys() & columns.keys():
                    raise ValueError(f"sample {id!r}: column {min(twice)!r} is there already")
                if group and group != row.group:
                    raise ValueError(f"sample {id!r}: group {group!r}, but it was put in group {row.group!r}")
            elif ending is None:
                if self.group_size and not group:
                    raise ValueError(f"sample {id!r}: no group; with group_size={self.group_size} a new sample has one")
                new[group] += 1
        for group, count in new.items():
            size = count + (self.groups[group].put if group in self.groups else 0)
            if group and self.group_size and size > self.group_size:
                raise ValueError(f"group {group!r}: {size} samples, but the queue has group_size={self.group_size}")

    def check(self, want: Want) -> None:
        """ValueError where this table can never serve `want`."""
        self.check_task(want.task)
        if not want.whole_groups:
            return
        if not self.group_size:
            raise ValueError("whole_groups=True: the queue was created without group_size, so no group is known whole")
        if want.count and want.count % self.group_size:
            raise ValueError(f"count={want.count}: expected a multiple of group_size={self.group_size}")

    def check_task(self, task: str) -> None:
        if task not in self.tasks:
            raise ValueError(f"task {task!r}: this queue serves {self.tasks}")

    def plan(self, want: Want) -> tuple[str, ...] | None:
        """The ids that `want` gets now, oldest first, or None: not yet. A whole group counts `group_size` towards
        `count` even where members were dropped; one unit larger than the budget is served alone."""
        chosen: list[str] = []
        slots = tokens = 0
        unit_slots = self.group_size or 1 if want.whole_groups else 1
        for unit in self._ready_units(want):
            unit_tokens = sum(max(row.columns[name] for name in want.columns) for row in unit)
            if chosen and want.token_budget and tokens + unit_tokens > want.token_budget:
                return tuple(chosen)
            chosen += [row.id for row in unit]
            slots += unit_slots
            tokens += unit_tokens
            if slots == want.count or (want.token_budget and tokens >= want.token_budget):
                return tuple(chosen)
        return None

    def _ready_units(self, want: Want) -> Iterator[list[Row]]:
        """Rows, or whole groups, that are ready for the task; oldest first."""
        if not want.whole_groups:
            yield from ([row] for row in self.rows.values() if self._ready(row, want))
            return
        for group in self.groups.values():
            unit = [row for id in group.live if (row := self.rows[id]).claims[want.task].state != "acked"]
            if unit and group.put == self.group_size and all(self._ready(row, want) for row in unit):
                yield unit

    def _ready(self, row: Row, want: Want) -> bool:
        return row.claims[want.task].state == "open" and all(name in row.columns for name in want.columns)

    def lease(self, task: str, ids: Sequence[str], columns: Sequence[str], now_s: float) -> None:
        """Hands `ids` to a reader of `task` until now_s + lease_s. They are open and hold the columns."""
        self.check_columns(ids, columns)
        assert all(self.rows[id].claims[task].state == "open" for id in ids), "leased or acknowledged already"
        for id in ids:
            claim = self.rows[id].claims[task]
            self.redelivered[task] += claim.leases > 0
            claim.state, claim.leases = "leased", claim.leases + 1
            heapq.heappush(self._expiries, (now_s + self.lease_s, task, id))

    def check_columns(self, ids: Sequence[str], columns: Sequence[str]) -> None:
        """ValueError, naming sample and column, unless every sample is live and holds every column."""
        for id in ids:
            if id not in self.rows:
                raise ValueError(f"sample {id!r}: {self._endings.get(id, 'never put')}")
            for name in columns:
                if name not in self.rows[id].columns:
                    raise ValueError(f"sample {id!r} lacks column {name!r}; it has {sorted(self.rows[id].columns)}")

    def expire(self, now_s: float) -> None:
        """Opens every sample whose lease has run out."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, task, id = heapq.heappop(self._expiries)
            if id in self.rows and self.rows[id].claims[task].state == "leased":
                self.rows[id].claims[task].state = "open"

    def next_expiry_s(self) -> float | None:
        """No lease runs out before this time; None: nothing is leased."""
        return self._expiries[0][0] if self._expiries else None

    def ack(self, task: str, ids: Sequence[str]) -> tuple[str, ...]:
        """Ends `task`'s work on `ids`: they are never handed to it again. Returns the rows that are done by it.

        An ack after the lease ran out counts; one repeated, or for a sample dropped meanwhile, changes nothing.
        ValueError: a sample never put, or never handed to this task.
        """
        self.check_task(task)
        for id in ids:
            if id in self.rows and not self.rows[id].claims[task].leases:
                raise ValueError(f"sample {id!r}: acknowledged by task {task!r}, which never got it")
            if id not in self.rows and id not in self._endings:
                raise ValueError(f"sample {id!r}: never put, or ended long ago")
        done = []
        for id in ids:
            if id in self.rows:
                row = self.rows[id]
                row.claims[task].state = "acked"
                if all(claim.state == "acked" for claim in row.claims.values()):
                    self._end(row, "done")
                    done.append(id)
        return tuple(done)

    def drop(self, ids: Iterable[str], reason: str) -> tuple[str, ...]:
        """Ends live rows as `dropped:reason`, leased or not; returns them. Their group goes on without them."""
        if not reason:
            raise ValueError("drop: expected a reason; every sample ends under a name")
        ids = tuple(dict.fromkeys(ids))
        for id in ids:
            if id not in self.rows and id not in self._endings:
                raise ValueError(f"sample {id!r}: never put, or ended long ago")
        dropped = tuple(id for id in ids if id in self.rows)
        for id in dropped:
            self._end(self.rows[id], f"dropped:{reason}")
        return dropped

    def _end(self, row: Row, name: str) -> None:
        del self.rows[row.id]
        self.ended[name] += 1
        self._endings[row.id] = name
        if len(self._endings) > REMEMBERED:
            self._endings.popitem(last=False)
        if row.group:
            group = self.groups[row.group]
            del group.live[row.id]
            if not group.live and group.put == (self.group_size or group.put):
                del self.groups[row.group]

    def explain(self, want: Want) -> str:
        """Why `want` is not served: which columns are missing for how many samples."""
        open_rows = [row for row in self.rows.values() if row.claims[want.task].state == "open"]
        leased = sum(row.claims[want.task].state == "leased" for row in self.rows.values())
        lacking = Counter(name for row in open_rows for name in want.columns if name not in row.columns)
        parts = [f"{sum(self._ready(row, want) for row in open_rows)} samples ready"]
        parts += [f"column {name!r} missing for {count}" for name, count in sorted(lacking.items())]
        if leased:
            parts.append(f"{leased} leased and not acknowledged")
        if want.whole_groups and self.group_size:
            partial = sum(group.put < self.group_size for group in self.groups.values())
            parts.append(f"{partial} groups not all put")
        asked = f"{want.count} samples" if want.count else f"{want.token_budget} tokens"
        return f"task {want.task!r} wants {asked} with {list(want.columns)}: " + ", ".join(parts)

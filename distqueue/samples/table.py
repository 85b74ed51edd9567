"""The sample table: which samples are ready for a task, leased to it, or ended, and how. Pure: time is passed in.

    put ──► live ──┬─ every task acknowledged ──► done            per task of a live row:
                   ├─ drop(reason) ─────────────► dropped:reason     open ──lease──► leased ──ack──► acked
                   └─ lose(reason) ─────────────► reason              ▲──expired, released──┘
Invariants (property-tested against a plain model in tests/distqueue/samples/test_table.py):
1. Every row ever put is live or ended for a reason (`stats` counts them): rows never vanish and never reappear
   (the last REMEMBERED ids that ended are recognised).
2. `take` leases only live rows, open for the task, that hold every wanted column, oldest row first. It fills the count,
   or takes all that is ready for a `partial` selection, or returns None.
3. A sample is leased to one reader of a task at a time; an expired lease opens it again; `acked` is final.
4. A call that raises has changed nothing.
5. A segment is returned as freed once: by the call that ended the last live row with a part in it.
6. `restore(snapshot())` answers every later call as the table itself would if all its leases had expired.
7. Deterministic: the same puts, acks, drops and losses in the same order make the same table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from distqueue.samples import snapshots
from distqueue.samples.endings import DONE, REMEMBERED
from distqueue.samples.pages import NONE, PAGE_ROWS
from distqueue.samples.puts import PutBatch
from distqueue.samples.segments import MAX_SEGMENT
from distqueue.samples.state import State
from distqueue.samples.types import Ended, Selection, Taken


class SampleTable:
    """Rows in the order of their first put.

    `page_rows`: rows per page of memory (a power of two); `remembered`: number of ended ids that are recognised."""

    def __init__(
        self, tasks: Iterable[str], lease_s: float, *, page_rows: int = PAGE_ROWS, remembered: int = REMEMBERED
    ) -> None:
        self.tasks = tuple(tasks)
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks={self.tasks}: expected at least one, all different")
        if lease_s <= 0:
            raise ValueError(f"lease_s={lease_s}: expected seconds > 0")
        self.lease_s = lease_s
        self.state = State(tasks=len(self.tasks), lease_s=lease_s, page_rows=page_rows, remembered=remembered)

    def __len__(self) -> int:
        return self.state.pages.count

    def check_put(self, ids: Sequence[str], columns: Iterable[str], groups: Sequence[str] = ()) -> int:
        """Validate a put without storing it. Return how many samples would be new."""
        batch = PutBatch(self.state, ids, groups)
        batch.check(tuple(columns))
        return int(batch.new.sum())

    def put(
        self,
        ids: Sequence[str],
        columns: Mapping[str, np.ndarray | None],
        *,
        segment: int,
        groups: Sequence[str] = (),
        versions: np.ndarray | None = None,
        now_s: float = 0.0,
        claim: str = "",
    ) -> tuple[str, ...]:
        """Create rows, or add columns to live ones, which the task `claim`, if any, claims. Return the ids that were
        dropped before and so are not stored.

        `columns`: tokens (B,) of ragged ones, None for dense ones. Sample i lies at position i of `segment`, a number
        from 0 that no live row uses; a put that stores no column of any row uses no segment. `groups` (B) and
        `versions` (B, 2; -1: unknown) are optional.

        Raise ValueError: an id twice, a column put twice, a 65th column, a sample that is already done, a group that
        changes, a NUL in a name."""
        for name, tokens in columns.items():
            assert tokens is None or len(tokens) == len(ids), f"column {name!r}: {len(ids)} samples"
        assert versions is None or versions.shape == (len(ids), 2), f"versions {versions.shape} for {len(ids)} samples"
        batch = PutBatch(self.state, ids, groups)
        batch.check(tuple(columns))
        if claim:
            self.claim(claim, ids, now_s)
        return batch.store(columns, segment=segment, versions=versions, now_s=now_s)

    def check_task(self, task: str) -> None:
        """ValueError: not a task of this queue."""
        if task not in self.tasks:
            raise ValueError(f"task {task!r}: this queue serves {self.tasks}")

    def take(self, selection: Selection, now_s: float) -> Taken | None:
        """Lease the samples of `selection` until now_s + lease_s, oldest first, or return None, in constant time: not
        yet."""
        self.check_task(selection.task)
        state, task = self.state, self.tasks.index(selection.task)
        view, wanted = state.views.get(task, selection.required), 1 if selection.partial else selection.count
        if view is None or wanted is None or view.count < wanted:
            return None
        slots = view.oldest(view.count if selection.count is None else selection.count)
        state.claims.lease(task, slots, now_s)
        state.views.refresh(slots, task)
        return self._taken(slots)

    def explain(self, selection: Selection) -> str:
        """Return the reason why `selection` is not served yet: the missing columns, and the number of samples. Visits
        every sample."""
        state, number = self.state, self.tasks.index(selection.task)
        slots = state.pages.live_slots()
        open_slots = slots[state.claims.is_open(number, slots)]
        holds = {name: state.columns.holding(open_slots, state.columns.mask([name])) for name in selection.required}
        holds = {name: held & state.columns.known([name]) for name, held in sorted(holds.items())}
        ready = open_slots[np.logical_and.reduce(list(holds.values()))]
        parts = [f"{len(ready)} samples ready"]
        parts += [f"column {name!r} missing for {(~held).sum()}" for name, held in holds.items() if not held.all()]
        if leased := self.leased(selection.task):
            parts.append(f"{leased} leased and not acknowledged")
        amount = f"{selection.count} samples" if selection.count else "any samples"
        return f"task {selection.task!r} requests {amount} with {list(selection.required)}: " + ", ".join(parts)

    def open(self, task: str) -> int:
        """Count live rows that the task neither holds nor has acknowledged."""
        number = self.tasks.index(task)
        return len(self) - self.state.claims.leased[number] - self.state.claims.acked[number]

    def leased(self, task: str) -> int:
        """Count live rows that the task holds."""
        return self.state.claims.leased[self.tasks.index(task)]

    def is_settled(self, selection: Selection) -> bool:
        """Whether every row that is open for the task holds the selected columns."""
        view = self.state.views.get(self.tasks.index(selection.task), selection.required)
        return self.open(selection.task) == (view.count if view else 0)

    def are_live(self, ids: Sequence[str]) -> np.ndarray:
        """(B,) bool: which samples are live."""
        return self.state.ids.find(ids) != NONE

    def holding(self, column: str) -> list[str]:
        """The ids of the live samples that hold a column, in the order of their first put."""
        slots, columns = self.state.pages.live_slots(), self.state.columns
        if not columns.known([column]):
            return []
        return list(self.state.ids.of(slots[columns.holding(slots, columns.mask([column]))]))

    def find(self, ids: Sequence[str], columns: Sequence[str] = ()) -> Taken:
        """Look up samples without a lease. ValueError, naming sample and column: one is not live or lacks a column."""
        return self._taken(self.state.holding(ids, columns))

    def parts(self, rows: np.ndarray, columns: Sequence[str]) -> list[tuple[list[str], np.ndarray, np.ndarray]]:
        """Locate columns of live rows (B > 0) that hold them: (columns, segments (B,), positions (B,)), one entry for
        all columns that lie at the same places."""
        names, slots = self.state.columns.names, self.state.pages.find(rows)
        located = self.state.segments.find(slots, [names.index(name) for name in columns])
        return [([names[c] for c in alike], segments, positions) for alike, segments, positions in located]

    def claim(self, task: str, ids: Iterable[str], now_s: float) -> None:
        """Lease these rows to the task until now_s + lease_s, whatever columns they hold. ValueError: a sample that is
        not alive, or that the task holds or has acknowledged."""
        self.check_task(task)
        number = self.tasks.index(task)
        slots = self.state.claimable(ids, (number, task))
        self.state.claims.lease(number, slots, now_s)
        self.state.views.refresh(slots, number)

    def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> np.ndarray:
        """(columns, B) int64: tokens of each sample in each column; 1 where the column is dense, text or metadata.
        ValueError, naming sample and column: a sample is not live or lacks a column."""
        return self.state.columns.lengths(self.state.holding(ids, columns), columns)

    def row_lengths(self, rows: np.ndarray, columns: Sequence[str]) -> np.ndarray:
        """`lengths` of live rows that hold the columns."""
        return self.state.columns.lengths(self.state.pages.find(rows), columns)

    def renew(self, task: str, ids: Iterable[str], now_s: float) -> None:
        """Extend the leases of those of `ids` that are leased until now_s + lease_s. ValueError: a sample never put."""
        number, slots = self._leased(task, ids)
        self.state.claims.renew(number, slots, now_s)

    def release_lease(self, task: str, ids: Iterable[str]) -> None:
        """Release the leases of those of `ids` that are leased. ValueError: a sample never put."""
        number, slots = self._leased(task, ids)
        self.state.claims.release(number, slots)
        self.state.views.refresh(slots, number)

    def expire(self, now_s: float) -> int:
        """Open every sample whose lease has expired. Return how many."""
        expired = self.state.claims.expire(now_s)
        for task, slots in expired:
            self.state.views.refresh(slots, task)
        return sum(len(slots) for _, slots in expired)

    def next_expiry_s(self) -> float | None:
        return self.state.claims.next_expiry_s()

    def ack(self, task: str, ids: Iterable[str], *, replayed: bool = False) -> Ended:
        """Acknowledge `ids` for `task`: they are never handed to it again. Return the rows that are done by it.

        An ack after the lease expired counts; a repeated one, or one for a sample dropped meanwhile, changes nothing.
        `replayed`: skip the check that the task ever received the samples, as a journal does not record leases.
        Raise ValueError: a sample never put, or never handed to this task."""
        self.check_task(task)
        state, number = self.state, self.tasks.index(task)
        slots = state.ever_put(ids, None if replayed else (number, task))
        slots = slots[~state.claims.is_acked(number, slots)]
        state.claims.ack(number, slots)
        state.views.refresh(slots, number)
        return state.end(slots[state.claims.all_acked(slots)], DONE)

    def drop(self, ids: Iterable[str], reason: str) -> Ended:
        """End live rows as `dropped:reason`, leased or not. Their groups continue without them. ValueError: a sample
        never put, or no reason."""
        _check_reason("drop", reason)
        return self.state.end(self.state.ever_put(ids), f"dropped:{reason}")

    def lose(self, ids: Iterable[str], reason: str) -> Ended:
        """End, as `reason`, the live ones of these samples, whose payload is lost."""
        _check_reason("lose", reason)
        slots = self.state.ids.find(list(dict.fromkeys(ids)))
        slots = slots[slots != NONE]
        groups = self.state.groups.of(slots)
        return replace(self.state.end(slots, reason), groups=groups)

    def at(self, segments: Sequence[int], first: int = 0, last: int = MAX_SEGMENT) -> tuple[str, ...]:
        """The live samples with a part in one of the segments, at positions from `first` to `last` - 1."""
        slots = self.state.pages.live_slots()
        return self.state.ids.of(self.state.segments.touching(slots, segments, first, last))

    def stats(self, now_s: float) -> dict[str, Any]:
        """Metrics. rows: live ones; ended: counts by reason; tasks: per task open, leased and acked (live rows each),
        redelivered (repeated deliveries), and age_s: seconds since the first put of the oldest row that it has not
        acknowledged, or 0."""
        claims = self.state.claims
        tasks = {
            task: {
                "open": self.open(task),
                "leased": claims.leased[number],
                "acked": claims.acked[number],
                "redelivered": claims.redelivered[number],
                "age_s": self._age_s(number, now_s),
            }
            for number, task in enumerate(self.tasks)
        }
        return {"rows": len(self), "ended": dict(self.state.endings.counts), "tasks": tasks}

    def snapshot(self) -> dict[str, np.ndarray | str]:
        """Serialize the durable state in a few flat arrays and a JSON string. Leased rows are open in it."""
        return snapshots.dump(self.state, self.tasks)

    @classmethod
    def restore(cls, snapshot: Mapping[str, np.ndarray | str], lease_s: float) -> "SampleTable":
        """Rebuild the table that made `snapshot`."""
        table = cls(lease_s=lease_s, **snapshots.options(snapshot))
        snapshots.load(table.state, snapshot)
        return table

    def _age_s(self, number: int, now_s: float) -> float:
        """Seconds since the first put of the oldest row that the task has not acknowledged; 0 if there is none."""
        state = self.state
        for page in state.pages.in_order():
            slots = state.pages.marked(state.pages.live, np.array([page]))
            slots = slots[~state.claims.is_acked(number, slots)]
            if len(slots):
                return now_s - float(state.born_s.values[slots[0]])
        return 0.0

    def _taken(self, slots: np.ndarray) -> Taken:
        state = self.state
        return Taken(
            ids=state.ids.of(slots),
            groups=state.groups.of(slots),
            versions=state.versions.values[slots],
            rows=state.pages.numbers(slots),
        )

    def _leased(self, task: str, ids: Iterable[str]) -> tuple[int, np.ndarray]:
        """(number of the task, slots of those of `ids` that it holds)."""
        self.check_task(task)
        number, slots = self.tasks.index(task), self.state.ever_put(ids)
        return number, slots[self.state.claims.is_leased(number, slots)]


def _check_reason(change: str, reason: str) -> None:
    if not reason:
        raise ValueError(f"{change}: expected a reason; every sample ends with one")

"""The sample table: which sample is ready for which task, who holds it, and how it ended. Pure: time is passed in.

    put ──► live ──┬─ every task acknowledged ──► done            per task of a live row:
                   ├─ drop(reason) ─────────────► dropped:reason     open ──lease──► leased ──ack──► acked
                   └─ lose(segments, reason) ───► reason              ▲──expired, released──┘
Invariants (property-tested against a plain model in tests/distqueue/samples/test_table.py):
1. Every row ever put is live or ended under a name (`stats` counts them): rows never vanish and never come back
   (the last REMEMBERED ids that ended are recognised).
2. `take` leases only live rows, open for the task, that hold every wanted column, oldest row first; with
   `whole_groups`, every member of a group that neither ended nor was acknowledged by the task, and only once all
   members of the group have been put. It fills the count, or the token budget as far as whole samples do, or takes what
   there is of a `partial` want, or is None. `can_serve` says beforehand which.
3. A sample is leased by one reader of a task at a time; an expired lease opens it again; `acked` is final.
4. A call that raises has changed nothing.
5. A segment is reported once: by the call that ended the last live row with a part in it.
6. `restore(snapshot())` answers every later call as the table itself would, had all its leases run out.
7. Only what it is given decides: the same puts, acks, drops and losses in the same order give the same table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from distqueue.samples import lookups, puts, reports, search, snapshots
from distqueue.samples.endings import DONE, REMEMBERED
from distqueue.samples.face import Ended, Taken, Want
from distqueue.samples.names import NONE
from distqueue.samples.pages import PAGE_ROWS
from distqueue.samples.state import State


class SampleTable:
    """Rows in order of their first put. `group_size`: members of every group, needed for `whole_groups`.

    `page_rows`: rows that share a page of memory (a power of two); `remembered`: ended ids that are recognised.
    """

    def __init__(
        self,
        tasks: Iterable[str],
        lease_s: float,
        group_size: int | None = None,
        *,
        page_rows: int = PAGE_ROWS,
        remembered: int = REMEMBERED,
    ) -> None:
        self.tasks = tuple(tasks)
        if not self.tasks or len(set(self.tasks)) != len(self.tasks):
            raise ValueError(f"tasks={self.tasks}: expected at least one, all different")
        if lease_s <= 0:
            raise ValueError(f"lease_s={lease_s}: expected seconds > 0")
        if group_size is not None and group_size < 1:
            raise ValueError(f"group_size={group_size}: expected a positive number or None")
        self.lease_s = lease_s
        self.group_size = group_size
        self.state = State(len(self.tasks), lease_s, group_size, page_rows, remembered)

    def __len__(self) -> int:
        return self.state.pages.count

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, with the parts of them that were never touched."""
        return self.state.nbytes

    def check_put(self, ids: Sequence[str], columns: Iterable[str], groups: Sequence[str] = ()) -> int:
        """Raises what `put` would; returns how many samples would be new."""
        batch = puts.look_up(self.state, ids, groups)
        puts.check(self.state, batch, tuple(columns))
        return int(batch.new.sum())

    def put(
        self,
        ids: Sequence[str],
        columns: Mapping[str, np.ndarray | None],
        segment: int,
        groups: Sequence[str] = (),
        versions: np.ndarray | None = None,
        now_s: float = 0.0,
    ) -> tuple[str, ...]:
        """Creates rows, or adds columns to live ones. `columns`: tokens (B,) of ragged ones, None for dense ones;
        sample i lies at position i of `segment`, a number from 0 that no live row uses; `groups` (B) and `versions`
        (B, 2), of which -1 is unknown, where they are said. Returns the ids that came too late: dropped before, so not
        stored. A put that stores no column of any row uses no segment.

        ValueError: an id twice, a column put twice, a 65th column, a sample that is already done, a group that changes
        or grows too large, a NUL in a name.
        """
        for name, tokens in columns.items():
            assert tokens is None or len(tokens) == len(ids), f"column {name!r}: {len(ids)} samples"
        assert versions is None or versions.shape == (len(ids), 2), f"versions {versions.shape} for {len(ids)} samples"
        batch = puts.look_up(self.state, ids, groups)
        puts.check(self.state, batch, tuple(columns))
        return puts.store(self.state, batch, columns, segment, versions, now_s)

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

    def can_serve(self, want: Want) -> bool:
        """Whether `take` would take something, at no cost; where min_version is given, it may take nothing all the
        same. `want` has passed `check`."""
        view = self.state.views.get(self.tasks.index(want.task), want.columns)
        return view is not None and search.can_serve(view, want, self.group_size)

    def take(self, want: Want, now_s: float) -> Taken | None:
        """Leases what `want` gets now until now_s + lease_s, oldest first, or None: not yet. A whole group counts
        `group_size` towards `count` even where members were dropped; one unit larger than the budget is served alone.
        With min_version, a row that is older, or of no known version, is passed over and stays open; so is a whole
        group with such a row."""
        self.check(want)
        state, task = self.state, self.tasks.index(want.task)
        view = state.views.get(task, want.columns)
        plan = search.plan(view, want, state.pages, state.groups, state.versions) if view else None
        if view is None or plan is None:
            return None
        state.claims.lease(task, plan.rows, now_s)
        state.views.refresh(plan.rows, task)
        return Taken(
            ids=state.ids.texts(plan.rows),
            groups=state.groups.texts(plan.rows),
            versions=state.versions.values[plan.rows],
            rows=state.pages.numbers(plan.rows),
            tokens=view.row_tokens(plan.rows),
            too_old=state.ids.texts(plan.too_old),
        )

    def explain(self, want: Want) -> str:
        """Why `want` is not served: which columns are missing for how many samples."""
        return reports.explain(self.state, self.tasks.index(want.task), want)

    def open(self, task: str) -> int:
        """Live rows that the task has neither out nor acknowledged."""
        return reports.open_rows(self.state, self.tasks.index(task))

    def leased(self, task: str) -> int:
        """Live rows that the task has out."""
        return self.state.claims.out(self.tasks.index(task))

    def is_settled(self, want: Want) -> bool:
        """Whether no row that is open for the task lacks a column that `want` reads."""
        view = self.state.views.get(self.tasks.index(want.task), want.columns)
        return self.open(want.task) == (view.rows.count if view else 0)

    def are_live(self, ids: Sequence[str]) -> np.ndarray:
        """(B,) bool."""
        return self.state.ids.find(self.state.ids.names(ids)) != NONE

    def describe(self, rows: np.ndarray) -> tuple[tuple[str, ...], np.ndarray]:
        """(group per row, "" where it has none; versions (B, 2) int32, -1 unknown). ValueError: a row that ended."""
        slots = lookups.live_numbers(self.state, rows)
        return self.state.groups.texts(slots), self.state.versions.values[slots]

    def find(self, ids: Sequence[str]) -> np.ndarray:
        """(B,) int64: row numbers. ValueError: a sample that is not alive."""
        return self.state.pages.numbers(lookups.live(self.state, ids))

    def check_columns(self, ids: Sequence[str], columns: Iterable[str]) -> None:
        """ValueError, naming sample and column, unless every sample is live and holds every column."""
        lookups.require_columns(self.state, lookups.live(self.state, ids), columns)

    def places(self, samples: np.ndarray | Sequence[str], column: str) -> tuple[np.ndarray, np.ndarray]:
        """(B,) int64 each: the segment that holds this column of each sample, and the position in it. `samples` are
        ids or row numbers. ValueError: one that is not alive or lacks the column."""
        if isinstance(samples, np.ndarray):
            slots = lookups.live_numbers(self.state, samples)
        else:
            slots = lookups.live(self.state, samples)
        lookups.require_columns(self.state, slots, (column,))
        if not len(slots):
            return slots, slots
        return self.state.segments.find(slots, [self.state.columns.names.index(column)])[0][1:]

    def parts(self, rows: np.ndarray, columns: Sequence[str]) -> list[tuple[list[str], np.ndarray, np.ndarray]]:
        """`places` of several columns of live rows (B > 0) that hold them, those that lie alike together."""
        names, slots = self.state.columns.names, self.state.pages.find(rows)
        found = self.state.segments.find(slots, [names.index(name) for name in columns])
        return [([names[c] for c in together], segments, inside) for together, segments, inside in found]

    def claim(self, task: str, ids: Iterable[str], now_s: float) -> None:
        """Leases these rows to the task until now_s + lease_s, whatever columns they hold. ValueError: a sample that is
        not alive, or that the task holds or has acknowledged."""
        self.check_task(task)
        number = self.tasks.index(task)
        slots = lookups.claimable(self.state, ids, (number, task))
        self.state.claims.lease(number, slots, now_s)
        self.state.views.refresh(slots, number)

    def lengths(self, ids: Sequence[str], columns: Sequence[str]) -> np.ndarray:
        """(columns, B) int64: tokens of each sample in each column; 1 where the column is dense, text or metadata.
        ValueError, naming sample and column, unless every sample is live and holds every column."""
        slots = lookups.live(self.state, ids)
        lookups.require_columns(self.state, slots, columns)
        held = self.state.columns
        return np.array([held.longest(slots, [held.names.index(name)]) for name in columns], np.int64)

    def renew(self, task: str, ids: Iterable[str], now_s: float) -> None:
        """Gives those of `ids` that are leased until now_s + lease_s. ValueError: a sample never put."""
        number, slots = self._leased(task, ids)
        self.state.claims.renew(number, slots, now_s)

    def release_lease(self, task: str, ids: Iterable[str]) -> None:
        """Opens those of `ids` that are leased, at once. ValueError: a sample never put."""
        number, slots = self._leased(task, ids)
        self.state.claims.release(number, slots)
        self.state.views.refresh(slots, number)

    def expire(self, now_s: float) -> int:
        """Opens every sample whose lease has run out; returns how many."""
        expired = self.state.claims.expire(now_s)
        for task, slots in expired:
            self.state.views.refresh(slots, task)
        return sum(len(slots) for _, slots in expired)

    def next_expiry_s(self) -> float | None:
        """No lease runs out before this time; None: nothing is leased."""
        return self.state.claims.next_expiry_s()

    def ack(self, task: str, ids: Iterable[str], *, replayed: bool = False) -> Ended:
        """Ends `task`'s work on `ids`: they are never handed to it again. Returns the rows that are done by it.

        An ack after the lease ran out counts; one repeated, or for a sample dropped meanwhile, changes nothing.
        `replayed`: not asked whether the task ever got the samples, as a journal knows of no leases. ValueError: a
        sample never put, or never handed to this task.
        """
        self.check_task(task)
        state, number = self.state, self.tasks.index(task)
        slots = lookups.for_ack(state, ids, None if replayed else (number, task))
        slots = slots[~state.claims.is_acked(number, slots)]
        state.claims.ack(number, slots)
        state.views.refresh(slots, number)
        return state.end(slots[state.claims.all_acked(slots)], DONE)

    def drop(self, ids: Iterable[str], reason: str) -> Ended:
        """Ends live rows as `dropped:reason`, leased or not. Their group goes on without them. ValueError: a sample
        never put, or no reason."""
        return self.state.end(lookups.for_drop(self.state, ids, reason), f"dropped:{reason}")

    def lose(self, segments: Iterable[int], reason: str) -> Ended:
        """Ends, as `reason`, every live row with a part in one of these segments, whose payload is gone."""
        if not reason:
            raise ValueError("lose: expected a reason; every sample ends under a name")
        return self.state.end(self.state.segments.touching(self.state.pages.live_slots(), tuple(segments)), reason)

    def segments(self) -> dict[int, int]:
        """Live rows per segment."""
        segments = self.state.segments
        slots = segments.pages.live_slots()
        counts = segments.live.values[slots].tolist()
        return dict(zip(segments.pages.numbers(slots).tolist(), counts, strict=True))

    def rows_of_segment(self, segment: int) -> np.ndarray:
        """(B,) int64: numbers of the live rows that have a part in it, oldest first."""
        slots = self.state.segments.touching(self.state.pages.live_slots(), (segment,))
        return self.state.pages.numbers(slots)

    def stats(self, now_s: float) -> dict[str, Any]:
        """rows: live ones; ended: how many by name; tasks: per task open, leased and acked (live rows each),
        redelivered (deliveries of what had been delivered before) and age_s, since the first put of the oldest row that
        it has not acknowledged, or 0."""
        tasks = {task: reports.task_stats(self.state, number, now_s) for number, task in enumerate(self.tasks)}
        return {"rows": len(self), "ended": dict(self.state.endings.counts), "tasks": tasks}

    def snapshot(self) -> dict[str, np.ndarray | str]:
        """Everything durable, in a few flat arrays and a JSON string. What is leased is open in it."""
        return snapshots.dump(self.state, self.tasks)

    @classmethod
    def restore(cls, snapshot: Mapping[str, np.ndarray | str], lease_s: float) -> SampleTable:
        """The table that `snapshot` was made of."""
        table = cls(lease_s=lease_s, **snapshots.options(snapshot))
        snapshots.load(table.state, snapshot)
        return table

    def _leased(self, task: str, ids: Iterable[str]) -> tuple[int, np.ndarray]:
        """(number of the task, slots of those of `ids` that it has out)."""
        self.check_task(task)
        number, slots = self.tasks.index(task), lookups.for_ack(self.state, ids)
        return number, slots[self.state.claims.is_leased(number, slots)]

"""The sample table against the model, step by step; its counters against a recount; its copies against itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from distqueue.samples import Ended, SampleTable, Selection
from distqueue.samples.views import View
from tests.distqueue.samples.inspect_table import live_rows_by_segment, places
from tests.distqueue.samples.model import LEASE_S, Model, Row

TASKS, RAGGED, DENSE, GROUP_SIZE = ("reward", "train"), ("x", "y"), "d", 2
COLUMNS = (*RAGGED, DENSE)
PAGE_ROWS = 4
"""few, so that pages are crossed, used again and added"""
TASK = st.sampled_from(TASKS)
SPAN = st.sampled_from([(-1, -1), (0, 0), (1, 3), (2, 2), (3, 3)])
SELECTIONS = st.builds(
    lambda partial, count, **selection: Selection(count=count, partial=partial or count is None, **selection),
    task=TASK,
    columns=st.sampled_from([("x",), ("y",), ("x", "y"), ("y", "x", "d"), ("d",)]),
    count=st.none() | st.sampled_from([1, 2, 4]),
    partial=st.booleans(),
)


class TableAgainstModel(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.model = Model(TASKS)
        self.new_table = lambda: SampleTable(TASKS, LEASE_S, page_rows=PAGE_ROWS)
        self.table = self.new_table()
        self.segment = 0
        self.journal: list[Callable[[SampleTable], object]] = []

    def do(self, event: Callable[[SampleTable], Any]) -> Any:
        """An event that a journal keeps."""
        self.journal.append(event)
        return event(self.table)

    def put(self, rows: list[Row], names: set[str], data: st.DataObject, is_new: bool) -> tuple[str, ...]:
        tokens = [data.draw(st.integers(0, 5)) for _ in rows]
        spans = [data.draw(SPAN) for _ in rows]
        columns = {name: None if name == DENSE else np.array(tokens) for name in sorted(names)}
        segment, now_s, ids = self.segment, self.model.now_s, [row.id for row in rows]
        groups = [row.group for row in rows] if is_new or data.draw(st.booleans()) else ()
        versions = np.array(spans) if set(spans) != {(-1, -1)} else None
        self.segment += 1
        late = self.do(
            lambda table: table.put(ids, columns, segment=segment, groups=groups, versions=versions, now_s=now_s)
        )
        for i, row in enumerate(rows):
            if row.end is None:
                row.columns |= {name: 1 if name == DENSE else tokens[i] for name in names}
                row.places |= dict.fromkeys(names, (segment, i))
                row.widen(spans[i])
        return late

    @rule(data=st.data(), names=st.sets(st.sampled_from(COLUMNS)), count=st.integers(1, 5))
    def put_new(self, data: st.DataObject, names: set[str], count: int) -> None:
        first, model = len(self.model.rows), self.model
        rows = [Row(n, f"s{n}", f"g{n // GROUP_SIZE}", TASKS, model.now_s) for n in range(first, first + count)]
        model.rows += rows
        assert self.put(rows, names, data, is_new=True) == ()

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), names=st.sets(st.sampled_from(COLUMNS), min_size=1, max_size=2))
    def extend(self, data: st.DataObject, names: set[str]) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.model.rows), min_size=1, max_size=4, unique_by=id))
        bad = next((row for row in rows if row.end == "done" or (row.end is None and names & row.columns.keys())), None)
        if bad:
            columns = {name: np.ones(len(rows), int) for name in names}
            self.refused(
                lambda: self.table.put([row.id for row in rows], columns, segment=self.segment), f"{bad.id!r}: "
            )
        else:
            late = [row.id for row in rows if row.end]
            assert self.put(rows, names, data, is_new=False) == tuple(late), "columns of a dropped sample are late"

    @precondition(lambda self: any(row.lacks(Selection("train", COLUMNS, 1)) for row in self.model.live()))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        """All columns that the oldest unfinished rows lack, so that there is something to take."""
        for row in [row for row in self.model.live() if row.lacks(Selection("train", COLUMNS, 1))][:4]:
            self.put([row], set(COLUMNS) - row.columns.keys(), data, is_new=False)

    @rule(selection=SELECTIONS)
    def take(self, selection: Selection) -> None:
        taken, rows = self.table.take(selection, self.model.now_s), self.model.take(selection)
        if taken is None:
            assert rows is None and f"with {list(selection.columns)}: " in self.table.explain(selection)
            return
        assert rows is not None
        assert taken.ids == tuple(row.id for row in rows) and taken.groups == tuple(row.group for row in rows)
        assert taken.rows.tolist() == [row.number for row in rows]
        assert taken.versions.tolist() == [list(row.versions) for row in rows]
        self.model.lease(rows, selection.task)

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), task=TASK)
    def claim(self, data: st.DataObject, task: str) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.model.rows), max_size=4))
        ids = [row.id for row in rows]
        if any(row.end or self.model.state(row, task) != "open" for row in rows):
            self.refused(lambda: self.table.claim(task, ids, self.model.now_s), "^sample 's")
            return
        self.table.claim(task, ids, self.model.now_s)
        self.model.lease([row for number, row in enumerate(rows) if row not in rows[:number]], task)

    @rule(data=st.data(), task=TASK)
    def ack(self, data: st.DataObject, task: str) -> None:
        handed = [row for row in self.model.rows if row.handed.get(task)]
        rows = data.draw(st.lists(st.sampled_from(handed), max_size=6)) if handed else []
        ids = [row.id for row in rows]
        before = self.model.segments()
        replayed = False

        def event(table: SampleTable) -> Ended:
            return table.ack(task, ids, replayed=replayed)

        ended = self.do(event)
        replayed = True
        self.check_ended(ended, self.model.ack(rows, task), before)

    @precondition(lambda self: self.model.live())
    @rule(data=st.data(), task=TASK)
    def ack_of_what_was_never_handed_out(self, data: st.DataObject, task: str) -> None:
        rows = data.draw(st.permutations(self.model.live()))
        if not all(row.handed.get(task) for row in rows):
            self.refused(lambda: self.table.ack(task, [row.id for row in rows]), "which never received it")

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), reason=st.sampled_from(["stale", "filtered"]))
    def drop(self, data: st.DataObject, reason: str) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.model.rows), max_size=3, unique_by=id))
        ids, before = [row.id for row in rows], self.model.segments()
        ended = self.do(lambda table: table.drop(ids, reason))
        self.check_ended(ended, self.end(rows, f"dropped:{reason}"), before)
        self.refused(lambda: self.table.drop([*ids, "unheard of"], "again"), "'unheard of': never put")

    @precondition(lambda self: self.model.segments())
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        before = self.model.segments()
        lost = data.draw(st.lists(st.sampled_from(sorted(before)), max_size=2))
        rows = [row for row in self.model.live() if {segment for segment, _ in row.places.values()} & set(lost)]
        assert self.table.at(lost) == tuple(row.id for row in rows)
        ended = self.do(lambda table: table.lose(table.at(lost), "lost:node-2"))
        self.check_ended(ended, self.end(rows, "lost:node-2"), before)

    def end(self, rows: list[Row], reason: str) -> list[Row]:
        ended = [row for row in rows if row.end is None]
        for row in ended:
            row.end = reason
        return ended

    def check_ended(self, ended: Ended, rows: list[Row], before: dict[int, int]) -> None:
        assert ended.ids == tuple(row.id for row in rows)
        assert ended.segments == tuple(sorted(before.keys() - self.model.segments().keys()))

    @precondition(lambda self: self.model.rows)
    @rule(data=st.data(), task=TASK, renews=st.booleans())
    def renew_or_release(self, data: st.DataObject, task: str, renews: bool) -> None:
        rows = data.draw(st.lists(st.sampled_from(self.model.rows), max_size=4))
        ids = [row.id for row in rows]
        if renews:
            self.table.renew(task, ids, self.model.now_s)
        else:
            self.table.release_lease(task, ids)
        for row in rows:
            if row.end is None and self.model.state(row, task) == "leased":
                row.claims[task] = self.model.now_s + (LEASE_S if renews else 0.0)

    @rule(seconds=st.sampled_from([1.0, 6.0, 11.0]))
    def time_passes(self, seconds: float) -> None:
        """What runs out meanwhile is open again."""
        leased = sum(self.table.leased(task) for task in TASKS)
        self.model.now_s += seconds
        opened = self.table.expire(self.model.now_s)
        assert leased - opened == sum(self.table.leased(task) for task in TASKS)

    @rule()
    def restore(self) -> None:
        snapshot = self.table.snapshot()
        self.table = SampleTable.restore(snapshot, LEASE_S)
        assert_same(self.table.snapshot(), snapshot)
        assert self.table.next_expiry_s() is None
        for row in self.model.live():
            row.claims = {task: claim for task, claim in row.claims.items() if claim == "acked"}

    @rule()
    def replay(self) -> None:
        again = self.new_table()
        for event in self.journal:
            event(again)
        assert_same(durable(again.snapshot()), durable(self.table.snapshot()))

    def refused(self, call: Callable[[], object], message: str) -> None:
        def everything() -> tuple:
            return self.table.snapshot(), self.table.stats(self.model.now_s), self.table.next_expiry_s()

        before = everything()
        with pytest.raises(ValueError, match=message):
            call()
        assert_same(everything()[0], before[0])
        assert everything()[1:] == before[1:]

    @invariant()
    def rows_are_the_models(self) -> None:
        live = self.model.live()
        ids = [row.id for row in live]
        assert len(self.table) == len(live) and self.table.snapshot()["row"].tolist() == [row.number for row in live]
        found = self.table.find(ids)
        assert found.ids == tuple(ids) and found.rows.tolist() == [row.number for row in live]
        assert found.groups == tuple(row.group for row in live)
        assert found.versions.tolist() == [list(row.versions) for row in live]
        for name in COLUMNS:
            holders = [row for row in live if name in row.columns]
            numbers = np.array([row.number for row in holders], np.int64)
            for samples in (numbers, [row.id for row in holders]) if holders else ():
                assert places(self.table, samples, name) == [row.places[name] for row in holders]
            lengths = self.table.lengths([row.id for row in holders], [name]) if holders else np.zeros((1, 0))
            assert lengths.tolist() == [[row.columns[name] for row in holders]]
            for row in live:
                if name not in row.columns:
                    with pytest.raises(ValueError, match=f"sample '{row.id}' lacks column '{name}'"):
                        self.table.find([row.id], [name])

    @invariant()
    def figures_are_the_models(self) -> None:
        model, live = self.model, self.model.live()
        stats = self.table.stats(model.now_s)
        assert stats["rows"] == len(live)
        assert stats["ended"] == Counter(row.end for row in model.rows if row.end)
        for task in TASKS:
            states = Counter(model.state(row, task) for row in live)
            assert {state: stats["tasks"][task][state] for state in ("open", "leased", "acked")} == {
                state: states[state] for state in ("open", "leased", "acked")
            }
            assert (self.table.open(task), self.table.leased(task)) == (states["open"], states["leased"])
            assert stats["tasks"][task]["redelivered"] == model.redelivered[task]
            born_s = next((row.born_s for row in live if model.state(row, task) != "acked"), model.now_s)
            assert stats["tasks"][task]["age_s"] == model.now_s - born_s
        ends_s = [row.claims[task] for row in live for task in TASKS if model.state(row, task) == "leased"]
        next_s = self.table.next_expiry_s()
        assert next_s <= min(ends_s) if ends_s else next_s is None

    @invariant()
    def segments_are_the_models(self) -> None:
        assert live_rows_by_segment(self.table) == self.model.segments()
        for segment in list(self.model.segments())[:2]:
            rows = [row for row in self.model.live() if segment in {place[0] for place in row.places.values()}]
            assert self.table.at([segment]) == tuple(row.id for row in rows)

    @invariant()
    def a_task_is_settled_when_no_open_row_lacks_a_column(self) -> None:
        for selection in (Selection("train", ("x",), 2), Selection("reward", ("d",), partial=True)):
            open_rows = [row for row in self.model.live() if self.model.state(row, selection.task) == "open"]
            assert self.table.is_settled(selection) == (not any(row.lacks(selection) for row in open_rows))

    @invariant()
    def counters_are_a_recount(self) -> None:
        state = self.table.state
        for (task, names), view in state.views._views.items():
            recount = View(task, names, rows=state.pages, columns=state.columns, claims=state.claims)
            assert view.count == recount.count
            assert (view._flags.values == recount._flags.values).all()
            assert (view._per_page.values == recount._per_page.values).all()
            recount.close()


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert np.array_equal(one[name], other[name]), name


def durable(snapshot: dict) -> dict:
    """What a journal of puts, acks, drops and losses tells: all but what was handed out."""
    about = json.loads(snapshot["about"])
    about.pop("redelivered")
    return {name: value for name, value in snapshot.items() if name != "handed"} | {"about": json.dumps(about)}


@pytest.mark.parametrize("examples", [25, pytest.param(400, marks=pytest.mark.slow)])
def test_table_against_model(examples: int) -> None:
    drawn = settings(max_examples=examples, stateful_step_count=50, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(TableAgainstModel, settings=drawn)

"""A core driven at random; the one that is made of a snapshot and the events since is the same but for leases."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from distqueue.core import QueueCore
from distqueue.errors import LostSample
from distqueue.messages import Put, pack, unpack
from distqueue.samples import SampleTable, Selection
from distqueue.segments import Segment, ShardState
from tests.distqueue.core.cores import LEASE_S, ask, put_of

TASKS, COLUMNS, GROUP_SIZE = ("reward", "train"), ("x", "y"), 2
SELECTIONS = [
    Selection("reward", ("x",), 2),
    Selection("train", ("x", "y"), 4),
    Selection("train", ("y",), partial=True),
    Selection("reward", ("y",), 1),
]
SHARDS = ("one", "two")


class Recovery(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s, self.born, self.lives, self.moves = 0.0, 0, 0, 0
        self.events: list[tuple[str, bytes]] = []
        self.handed: dict[str, list[str]] = {task: [] for task in TASKS}
        self.writing: list[Segment] = []

    @initialize()
    def create(self) -> None:
        self.core = self.with_shards(QueueCore(SampleTable(TASKS, LEASE_S), epoch="life0"))
        self.compact()
        self.core.record = lambda kind, body: self.events.append((kind, body))
        for column in COLUMNS * 2:
            self.put(4, column)

    def with_shards(self, core: QueueCore) -> QueueCore:
        for name in SHARDS:
            core.ledger.add_shard(ShardState(name, node=name, folder=f"/{name}", max_bytes=1 << 40))
        return core

    @property
    def ids(self) -> list[str]:
        return [f"s{n}" for n in range(self.born)]

    def live(self) -> list[str]:
        return [id for id, live in zip(self.ids, self.core.table.are_live(self.ids), strict=True) if live]

    def segments(self) -> list[int]:
        return [segment.number for segment in self.core.ledger.segments.values() if segment.live]

    def reserve(self, put: Put) -> None:
        (found,) = ask_room(self.core, put, self.now_s)
        if isinstance(found, Segment):
            self.writing.append(found)

    @rule(count=st.integers(1, 5), column=st.sampled_from(COLUMNS), version=st.integers(-1, 5))
    def write_new(self, count: int, column: str, version: int) -> None:
        numbers = range(self.born, self.born + count)
        self.born += count
        lengths, groups = {f"s{n}": 1 + n % 4 for n in numbers}, [f"g{n // GROUP_SIZE}" for n in numbers]
        self.reserve(put_of(lengths, column, groups, version))

    @rule(count=st.integers(1, 5), column=st.sampled_from(COLUMNS))
    def put(self, count: int, column: str) -> None:
        before = len(self.writing)
        self.write_new(count, column, self.born % 5)
        for segment in self.writing[before:]:  # none once it is sealed
            self.writing.remove(segment)
            self.core.commit(segment.number, segment.path, self.now_s)

    @rule(data=st.data(), column=st.sampled_from(COLUMNS), version=st.integers(-1, 5))
    def write_columns(self, data: st.DataObject, column: str, version: int) -> None:
        """Some are late; some puts are refused now or, where another writer was faster, when they are committed."""
        ids = data.draw(st.lists(st.sampled_from(self.ids), min_size=1, max_size=6, unique=True))
        put = put_of({id: len(id) for id in ids}, column, [f"g{int(id[1:]) // GROUP_SIZE}" for id in ids], version)
        self.reserve(put)

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), twice=st.booleans())
    def commit(self, data: st.DataObject, twice: bool) -> None:
        segment = data.draw(st.sampled_from(self.writing))
        self.writing.remove(segment)
        before = self.core.snapshot()
        try:
            late = self.core.commit(segment.number, segment.path, self.now_s)
        except (ValueError, LookupError):
            assert self.core.snapshot() == before
            return
        assert not twice or self.core.commit(segment.number, segment.path, self.now_s) == late

    @rule(count=st.integers(1, 5), column=st.sampled_from(COLUMNS), old=st.booleans(), twice=st.booleans())
    def put_granted(self, count: int, column: str, old: bool, twice: bool) -> None:
        """New samples, or a column of the last that are there, in one call."""
        file = self.core.grant(SHARDS[0], 100, self.now_s)
        if file is None:
            assert self.core.sealed
            return
        numbers = range(max(0, self.born - count), self.born) if old else range(self.born, self.born + count)
        self.born = max(self.born, numbers.stop)
        put = put_of({f"s{n}": 1 + n % 4 for n in numbers}, column, [f"g{n // GROUP_SIZE}" for n in numbers], 3)
        before = self.core.snapshot()
        try:
            late = self.core.put(put, nbytes=100, number=file.number, path=file.path, now_s=self.now_s)
        except ValueError:
            assert self.core.snapshot() == before and file.number not in self.core.ledger.segments
            return
        assert not twice or self.core.put(put, nbytes=100, number=file.number, path=file.path, now_s=self.now_s) == late

    @precondition(lambda self: self.writing)
    @rule()
    def cancel(self) -> None:
        self.core.cancel(self.writing.pop().number, self.now_s)

    @rule()
    def get(self) -> None:
        for selection in SELECTIONS:
            answers: list[Any] = []
            waiter = self.core.ask(selection, now_s=self.now_s, answer=answers.append)
            self.core.readers.leave(waiter)
            for found in answers:
                if not isinstance(found, Exception):
                    self.handed[selection.task] += found.ids

    @rule(data=st.data(), task=st.sampled_from(TASKS))
    def ack(self, data: st.DataObject, task: str) -> None:
        if self.handed[task]:
            ids = data.draw(st.lists(st.sampled_from(self.handed[task]), max_size=5))
            self.core.ack(task, ids, self.now_s)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ids = data.draw(st.lists(st.sampled_from(self.live()), max_size=3, unique=True))
        self.core.drop(ids, data.draw(st.sampled_from(["stale", "filtered"])), self.now_s)

    @precondition(lambda self: self.segments())
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        self.core.lose([data.draw(st.sampled_from(self.segments()))], "one", self.now_s)

    @precondition(lambda self: self.live())
    @rule(data=st.data())
    def lose_samples(self, data: st.DataObject) -> None:
        """Some may have ended already."""
        ids = data.draw(st.lists(st.sampled_from(self.ids), max_size=3))
        lost = self.core.lose_samples(ids, "damaged", self.now_s)
        assert lost == tuple(one.id for one in self.core.lost[len(self.core.lost) - len(lost) :])

    @precondition(lambda self: self.segments())
    @rule(
        data=st.data(), name=st.sampled_from(SHARDS), spilled=st.booleans(), ends=st.booleans(), compacted=st.booleans()
    )
    def move(self, data: st.DataObject, name: str, spilled: bool, ends: bool, compacted: bool) -> None:
        """Its samples may end while it is being copied, and there may be a snapshot then."""
        number = data.draw(st.sampled_from(self.segments()))
        self.moves += 1
        with self.core.ledger.pinned(number):
            if ends:
                self.core.lose([number], "two", self.now_s)
            if compacted:
                self.compact()
            self.core.moved(number, name, f"/{name}/moved-{self.moves}", spilled=spilled)

    @rule(seconds=st.sampled_from([1.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.core.tick(self.now_s)
        self.core.writers.serve(self.now_s)

    @precondition(lambda self: self.born > 25)
    @rule()
    def seal(self) -> None:
        self.core.seal(self.now_s)

    @rule()
    def compact(self) -> None:
        self.snapshot, self.events = self.core.snapshot(), []

    def recovered(self) -> QueueCore:
        core = QueueCore.recover(self.snapshot, list(self.events), LEASE_S, epoch=f"life{self.lives}")
        assert not core.ledger.discards and not core.awaited
        return core

    @rule()
    def look(self) -> None:
        assert_same(self.core, self.recovered(), self.now_s)

    @rule()
    def crash(self) -> None:
        """Life goes on with the recovered one; who was writing has to reserve again."""
        self.lives += 1
        again = self.recovered()
        assert_same(self.core, again, self.now_s)
        self.core = self.with_shards(again)
        for segment in self.writing:
            with pytest.raises(LookupError):
                again.commit(segment.number, segment.path, self.now_s)
        self.writing.clear()
        self.core.record = lambda kind, body: self.events.append((kind, body))

    def teardown(self) -> None:
        """What they hand out from here on is the same too."""
        if not hasattr(self, "core"):
            return
        again = self.recovered()
        self.now_s += 2 * LEASE_S
        self.core.writers.serve(self.now_s)
        self.core.tick(self.now_s)
        for selection in SELECTIONS * 2:
            one, other = ask(self.core, selection, now_s=self.now_s), ask(again, selection, now_s=self.now_s)
            assert [str(found) for found in one] == [str(found) for found in other]
            for found in one:
                if not isinstance(found, Exception):
                    self.core.ack(selection.task, found.ids, self.now_s)
                    again.ack(selection.task, found.ids, self.now_s)


def ask_room(core: QueueCore, put: Put, now_s: float) -> list[Any]:
    answers: list[Any] = []
    core.ask_room(put, node="one", nbytes=100, now_s=now_s, answer=answers.append)
    return answers


def assert_same(live: QueueCore, again: QueueCore, now_s: float) -> None:
    """Rows, groups, versions, what is put and acknowledged, endings, places, readiness, figures."""
    (fields, arrays), (others, other_arrays) = (durable(core) for core in (live, again))
    assert fields == others
    assert arrays.keys() == other_arrays.keys()
    for name in arrays:
        assert np.array_equal(arrays[name], other_arrays[name]), name
    assert figures(live, now_s) == figures(again, now_s)
    for selection in SELECTIONS:
        opened, reopened = (
            core.table.open(selection.task) + core.table.leased(selection.task) for core in (live, again)
        )
        assert opened == reopened
        if not live.table.leased(selection.task):
            assert live.table.is_settled(selection) == again.table.is_settled(selection)
            assert live.table.explain(selection) == again.table.explain(selection)


def durable(core: QueueCore) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A snapshot, less how often samples were handed out."""
    fields, arrays = unpack(core.snapshot())
    about = json.loads(fields["texts"].pop("table.about"))
    about.pop("redelivered")
    fields["segments"].sort()
    return fields | about, {name: array for name, array in arrays.items() if name != "table.handed"}


def figures(core: QueueCore, now_s: float) -> dict[str, float]:
    return {
        name: value
        for name, value in core.stats(now_s).items()
        if name.rsplit("/", 1)[1] not in ("depth", "leased", "redelivered", "waiters", "bytes")
    }


def test_the_loss_of_a_segment_in_a_journal_of_an_earlier_version_is_replayed() -> None:
    core = QueueCore(SampleTable(TASKS, LEASE_S), epoch="life0")
    core.ledger.add_shard(ShardState("one", node="one", folder="/one", max_bytes=1 << 40))
    for ids in ({"a": 1, "b": 1}, {"c": 1}):
        (segment,) = ask_room(core, put_of(ids), 0.0)
        core.commit(segment.number, segment.path, 0.0)
    event = pack({"numbers": [segment.number - 1], "reason": "shard-1"}, {})
    again = QueueCore.recover(core.snapshot(), [("lose", event)])
    assert again.lost == [LostSample(id, "", "lost:shard-1") for id in "ab"] and len(again.table) == 1


@pytest.mark.parametrize("examples", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_recovery(examples: int) -> None:
    run_state_machine_as_test(Recovery, settings=settings(max_examples=examples, stateful_step_count=40))

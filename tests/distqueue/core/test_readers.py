"""Readers of the core, driven without processes: who is served first, and what waiters cost."""

from __future__ import annotations

from typing import Any

import pytest

from distqueue.core import QueueCore
from tests.distqueue.core.cores import ask, new_core, put_of, select, store


def test_what_many_readers_wait_for_is_looked_at_once_a_put() -> None:
    core = new_core()
    waiting = [ask(core, select(4)) for _ in range(512)]
    looks = count_looks(core)
    for n in range(3):
        store(core, put_of({f"{n}": 1}))
    assert looks == {"take": 3, "is_settled": 0}
    store(core, put_of({"3": 1}))
    assert looks == {"take": 5, "is_settled": 0}
    assert sum(len(answers[0].ids) for answers in waiting if answers) == 4


def test_readers_of_other_columns_cost_one_look_a_want() -> None:
    core = new_core()
    for rank in range(512):
        ask(core, select(4 + rank % 2))
    looks = count_looks(core)
    store(core, put_of({"a": 1}))
    assert looks == {"take": 2, "is_settled": 0}


def count_looks(core: QueueCore) -> dict[str, int]:
    """How often the table is asked from now on."""
    counts = {"take": 0, "is_settled": 0}

    def counted(name: str) -> Any:
        real = getattr(core.table, name)

        def look(*arguments: Any) -> Any:
            counts[name] += 1
            return real(*arguments)

        return look

    for name in counts:
        setattr(core.table, name, counted(name))
    return counts


def test_the_longest_waiting_is_served_first_and_keeps_its_place() -> None:
    core, answers = new_core(), []

    def told_as(name: str) -> Any:
        return lambda found: answers.append((name, found.ids))

    first = core.ask(select(1), now_s=0.0, answer=told_as("first"))
    core.ask(select(1), now_s=1.0, answer=told_as("second"))
    core.readers.leave(first)
    core.ask(select(1), now_s=2.0, answer=told_as("first"), place=(first.number, first.since_s))
    store(core, put_of({"a": 1, "b": 1}))
    assert answers == [("first", ("a",)), ("second", ("b",))]


def test_places_are_those_of_the_puts() -> None:
    core = new_core()
    whole = store(core, put_of({"a": 1, "b": 2, "c": 3}))
    later = store(core, put_of({"c": 1, "a": 1}, "reward"))
    found = core.locate(["a", "c"], ["tokens", "reward"])
    runs = {part.columns: part.runs.tolist() for part in found.parts}
    assert [place.number for place in found.places] == [whole.number, later.number]
    assert runs == {("tokens",): [[0, 0, 1], [0, 2, 3]], ("reward",): [[1, 1, 2], [1, 0, 1]]}
    core.drop(["a"], "stale", 0.0)
    assert core.locate(["a", "c"], ["tokens"], skip_ended=True).ids == ("c",)
    assert core.locate(["a"], ["tokens"], skip_ended=True).ids == ()
    with pytest.raises(ValueError, match="sample 'a': dropped:stale"):
        core.locate(["a", "c"], ["tokens"])
    assert core.table.at([whole.number]) == ("b", "c")

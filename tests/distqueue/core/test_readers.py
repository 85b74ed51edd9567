"""Readers of the core, driven without processes: shares, age bounds, who is served first, and what waiters cost."""

from __future__ import annotations

from typing import Any

import pytest

from distqueue.core import QueueCore
from distqueue.messages import Delivery
from tests.distqueue.core.cores import LEASE_S, ask, new_core, numbered, put_of, select, store

# ---- shares


def test_a_batch_is_dealt_out_by_tokens_and_every_sample_goes_to_one_reader() -> None:
    core, lengths = new_core(), numbered(40)
    waiting = [ask(core, select(40), (rank, 4)) for rank in range(3)]
    assert waiting == [[], [], []]
    store(core, put_of(lengths))
    late = ask(core, select(40), (3, 4), now_s=LEASE_S - 1)
    parts = [answers[0] for answers in (*waiting, late)]
    ids = [id for part in parts for id in part.ids]
    assert sorted(ids) == sorted(lengths), "one that comes late gets its share; no sample comes twice or is left out"
    tokens = [sum(lengths[id] for id in part.ids) for part in parts]
    assert max(tokens) - min(tokens) <= max(lengths.values())
    assert all(list(part.ids) == sorted(part.ids, key=list(lengths).index) for part in parts)


def test_readers_who_go_on_at_their_own_pace_get_their_parts_of_every_batch() -> None:
    core = new_core()
    store(core, put_of(numbered(24)))
    first = [ask(core, select(8), (0, 2))[0] for _ in range(3)]
    second = [ask(core, select(8), (1, 2))[0] for _ in range(3)]
    for k, (one, other) in enumerate(zip(first, second, strict=True)):
        assert sorted(one.ids + other.ids) == sorted(numbered(8, 8 * k))


def test_groups_stay_whole_in_shares() -> None:
    core = new_core(group_size=2)
    store(core, put_of(numbered(8), groups=[f"g{n // 2}" for n in range(8)]))
    parts = [ask(core, select(8, whole_groups=True), (rank, 3))[0] for rank in range(3)]
    assert [sorted(set(part.groups)) for part in parts] and sum(len(set(part.groups)) for part in parts) == 4
    assert all(len(part.ids) == 2 * len(set(part.groups)) for part in parts)


def test_a_share_whose_lease_ran_out_is_handed_out_again_and_not_twice() -> None:
    core = new_core()
    store(core, put_of(numbered(8)))
    (mine,) = ask(core, select(8), (0, 2))
    core.ack("train", mine.ids, 1.0)
    left = set(numbered(8)) - set(mine.ids)
    again = [ask(core, select(len(left)), (rank, 2), now_s=LEASE_S) for rank in (1, 0)]
    assert sorted(id for answers in again for id in answers[0].ids) == sorted(left)
    assert ask(core, select(8), (1, 2), now_s=LEASE_S) == [], "what it was too late for is not handed to it as well"
    assert core.stats(LEASE_S)["distqueue/train/redelivered"] == len(left)


def test_what_ended_before_its_reader_came_is_left_out_of_its_share() -> None:
    core = new_core()
    segments = [store(core, put_of({id: 5})) for id in "abcd"]
    (mine,) = ask(core, select(4), (0, 2))
    others = sorted(set("abcd") - set(mine.ids))
    core.drop(others[:1], "stale", 0.0)
    (theirs,) = ask(core, select(4), (1, 2))
    assert theirs.ids == (others[1],)
    assert [place.number for place in theirs.places] == [segments["abcd".index(others[1])].number]
    core.drop(mine.ids, "stale", 0.0)
    store(core, put_of({"e": 5}))
    ask(core, select(1), (0, 2))
    core.drop(["e"], "stale", 0.0)
    assert ask(core, select(1), (1, 2))[0].ids == ()


def test_shares_nobody_came_for_are_not_kept_for_ever() -> None:
    core = new_core()
    for step in range(50):
        now_s = step * LEASE_S
        store(core, put_of({f"{step}-{k}": 3 for k in range(4)}, version=step), now_s)
        (mine,) = ask(core, select(4, min_version=step), (0, 2), now_s)
        core.ack("train", mine.ids, now_s)
    assert len(core.readers.shares) <= 2


# ---- age


def test_samples_that_are_too_old_stay_and_are_named() -> None:
    core = new_core()
    store(core, put_of({"old": 3, "older": 3}, version=4))
    store(core, put_of({"unknown": 3}))
    waiting = ask(core, select(2, min_version=5))
    assert waiting == [] and core.explain(select(2, min_version=5)).endswith("3 samples ready, 3 older than version 5")
    store(core, put_of({"new": 3, "newer": 3}, version=5))
    (found,) = waiting
    assert (found.ids, found.too_old) == (("new", "newer"), ("old", "older", "unknown"))
    assert Delivery.from_bytes(found.to_bytes()).too_old == found.too_old
    (rest,) = ask(core, select(3))
    assert rest.ids == ("old", "older", "unknown") and rest.too_old == ()


def test_a_share_names_what_was_too_old() -> None:
    core = new_core()
    store(core, put_of({"old": 3}, version=4))
    store(core, put_of({"a": 3, "b": 3}, version=5))
    parts = [ask(core, select(2, min_version=5), (rank, 2))[0] for rank in range(2)]
    assert [part.too_old for part in parts] == [("old",), ("old",)]


# ---- waiting


@pytest.mark.parametrize("readers", [None, 512])
def test_what_many_readers_wait_for_is_looked_at_once_a_put(readers: int | None) -> None:
    core = new_core()
    waiting = [ask(core, select(4), None if readers is None else (rank, readers)) for rank in range(512)]
    looks = count_looks(core)
    for n in range(3):
        store(core, put_of({f"{n}": 1}))
    assert looks == {"can_serve": 3, "take": 0, "is_settled": 0}
    store(core, put_of({"3": 1}))
    assert looks["take"] == 1 and looks["can_serve"] <= 5
    assert sum(len(answers[0].ids) for answers in waiting if answers) == 4


def test_readers_of_other_columns_cost_one_look_a_want() -> None:
    core = new_core()
    for rank in range(512):
        ask(core, select(4 + rank % 2))
    looks = count_looks(core)
    store(core, put_of({"a": 1}))
    assert looks == {"can_serve": 2, "take": 0, "is_settled": 0}


def count_looks(core: QueueCore) -> dict[str, int]:
    """How often the table is asked from now on."""
    counts = {"can_serve": 0, "take": 0, "is_settled": 0}

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

    first = core.ask(select(1), share=None, now_s=0.0, answer=told_as("first"))
    core.ask(select(1), share=None, now_s=1.0, answer=told_as("second"))
    core.readers.leave(first)
    core.ask(select(1), share=None, now_s=2.0, answer=told_as("first"), place=(first.number, first.since_s))
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

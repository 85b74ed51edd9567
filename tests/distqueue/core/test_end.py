"""The end of a queue, driven without processes: sealed, drained, closed."""

from __future__ import annotations

import pytest

from distqueue import QueueClosed, QueueDrained
from tests.distqueue.core.cores import LEASE_S, ask, ask_room, new_core, numbered, put_of, select, store


def test_a_sealed_queue_serves_what_is_left_then_says_so() -> None:
    core = new_core()
    store(core, put_of(numbered(3)))
    first, second = ask(core, select(2)), ask(core, select(2))
    assert len(first[0].ids) == 2 and second == []
    core.seal(0.0)
    core.seal(0.0)
    assert second[0].ids == ("s2",), "the rest, although it is less"
    third = ask(core, select(2))
    assert third == [], "what is leased may come back"
    core.ack("train", [*first[0].ids, *second[0].ids], 0.0)
    assert isinstance(third[0], QueueDrained) and str(third[0]) == (
        "the queue is sealed and task 'train' has received everything"
    )
    (refused,) = ask_room(core, put_of({"new": 1}))
    assert isinstance(refused, ValueError) and "sample 'new': the queue is sealed" in str(refused)


def test_a_lease_that_ends_after_the_seal_is_served_again() -> None:
    core = new_core()
    store(core, put_of({"a": 1}))
    assert ask(core, select(1))
    core.seal(0.0)
    waiting = ask(core, select(5), now_s=1.0)
    core.tick(LEASE_S)
    assert waiting[0].ids == ("a",)


def test_a_sealed_queue_waits_for_columns_that_are_missing() -> None:
    core = new_core("reward", "train")
    store(core, put_of({"a": 1, "b": 1}))
    core.seal(0.0)
    waiting = ask(core, select(5, columns=("tokens", "reward")))
    (scored,) = ask(core, select(5, task="reward"))
    store(core, put_of({"a": 1}, "reward"))
    assert scored.ids == ("a", "b") and waiting == [], "b lacks it still"
    core.drop(["b"], "no reward", 0.0)
    assert waiting[0].ids == ("a",)


def test_a_sealed_queue_waits_for_what_is_being_written() -> None:
    core = new_core()
    (living,), (dead,) = ask_room(core, put_of({"a": 1})), ask_room(core, put_of({"b": 1}))
    core.seal(0.0)
    waiting = [ask(core, select(2)), ask(core, select(2))]
    core.commit(living.number, living.path, 0.0)
    assert waiting == [[], []], "b may come yet"
    core.tick(LEASE_S)
    assert waiting[0][0].ids == ("a",) and dead.number not in core.ledger.segments
    core.ack("train", ["a"], LEASE_S)
    assert isinstance(waiting[1][0], QueueDrained)


def test_a_seal_ends_writers_who_wait_for_room_and_lets_columns_pass() -> None:
    core = new_core(max_rows=1)
    store(core, put_of({"a": 1}))
    waiting = ask_room(core, put_of({"b": 1}))
    core.seal(0.0)
    assert isinstance(waiting[0], ValueError) and "sealed" in str(waiting[0])
    store(core, put_of({"a": 1}, "reward"))


def test_a_closed_queue_answers_all_who_wait() -> None:
    core = new_core(max_rows=1)
    readers = [ask(core, select(1, columns=("x",))) for _ in range(2)]
    store(core, put_of({"a": 1}))
    writer = ask_room(core, put_of({"b": 1}))
    core.close()
    assert all(type(answers[0]) is QueueClosed for answers in (*readers, writer))
    with pytest.raises(QueueClosed, match=r"task 'train' cannot get \['tokens'\]"):
        ask(core, select(1))

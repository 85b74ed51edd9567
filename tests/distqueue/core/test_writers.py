"""Writers to the core, driven without processes: room and its order, files granted in advance, commits."""

from __future__ import annotations

from typing import Any

import pytest

from distqueue import PackedBatch
from distqueue.core import QueueCore
from distqueue.core.queue import REMEMBERED_PUTS
from distqueue.errors import NoRoomForRows
from distqueue.messages import Put
from distqueue.segments import GRAIN, Segment
from tests.distqueue.core.cores import LEASE_S, ask, ask_room, new_core, put_of, select, store

# ---- room


def test_writers_are_served_in_their_order_and_columns_pass_by() -> None:
    core = new_core(max_rows=4)
    store(core, put_of({"a": 1, "b": 1, "c": 1}))
    large, small = ask_room(core, put_of({"d": 1, "e": 1})), ask_room(core, put_of({"f": 1}))
    assert (large, small) == ([], []), "the small one, which has room, does not overtake"
    columns = ask_room(core, put_of({"a": 1}, "reward"))
    assert isinstance(columns[0], Segment)
    assert [writer.full for writer in core.writers.waiting] == [
        "the queue holds 3 samples of max_rows=4; task 'train' has 3 to get and 0 to acknowledge"
    ] * 2
    core.drop(["a"], "stale", 0.0)
    assert isinstance(large[0], Segment) and small == [], "what is being written takes room"
    core.drop(["b"], "stale", 0.0)
    assert isinstance(small[0], Segment) and core.writers.waiting == []


def test_bytes_are_bounded_but_for_columns() -> None:
    core = new_core(max_bytes=3 * GRAIN)
    store(core, put_of({"a": 1}))
    store(core, put_of({"b": 1}))
    large, small = ask_room(core, put_of({"c": 1}), 2 * GRAIN), ask_room(core, put_of({"d": 1}), GRAIN)
    assert (large, small) == ([], [])
    assert core.writers.waiting[0].full.startswith(
        "shard 'here' holds 8,192 of max_bytes=12,288; task 'train' has 2 to get"
    )
    assert isinstance(ask_room(core, put_of({"a": 1}, "reward"), 9 * GRAIN)[0], Segment), "it is what lets samples end"
    core.drop(["a", "b"], "stale", 0.0)
    assert (large, small) == ([], []), "the columns are there"
    core.cancel(3, 0.0)
    assert isinstance(large[0], Segment) and isinstance(small[0], Segment)
    assert core.ledger.shards["here"].held <= 3 * GRAIN


def test_what_could_never_be_stored_is_refused_at_once() -> None:
    core = new_core(max_bytes=GRAIN, max_rows=2)
    (error,) = ask_room(core, put_of({"a": 1}), GRAIN + 1)
    assert isinstance(error, ValueError) and "a shard of this queue holds max_bytes=4,096" in str(error)
    (error,) = ask_room(core, put_of({"a": 1, "b": 1, "c": 1}))
    assert isinstance(error, ValueError) and "a put of 3 new samples; this queue holds max_rows=2" in str(error)
    assert core.writers.waiting == [] and not core.ledger.segments


def test_a_dead_writers_reservation_is_given_up_and_the_next_is_served() -> None:
    core = new_core(max_rows=1)
    (dead,) = ask_room(core, put_of({"a": 1}))
    waiting = ask_room(core, put_of({"b": 1}), now_s=1.0)
    assert core.tick(2.0) == LEASE_S, "when to look again"
    assert waiting == []
    core.tick(LEASE_S)
    assert isinstance(waiting[0], Segment)
    with pytest.raises(LookupError, match=f"segment {dead.number} at .*: not reserved, or expired"):
        core.commit(dead.number, dead.path, LEASE_S)
    core.commit(waiting[0].number, waiting[0].path, LEASE_S)
    assert core.stats(LEASE_S)["distqueue/rows"] == 1


def test_a_put_that_another_came_before_is_refused_and_gives_its_room_back() -> None:
    core = new_core(max_rows=2)
    (first,), (second,) = (ask_room(core, put_of({"a": 1})) for _ in range(2))
    waiting = ask_room(core, put_of({"b": 1}))
    core.commit(first.number, first.path, 0.0)
    with pytest.raises(ValueError, match="sample 'a': column 'tokens' exists already"):
        core.commit(second.number, second.path, 0.0)
    assert isinstance(waiting[0], Segment) and second.number not in core.ledger.segments


def test_a_writer_that_leaves_lets_the_next_one_through() -> None:
    core = new_core(max_rows=2)
    store(core, put_of({"a": 1}))
    answers: list[Any] = []
    large = core.ask_room(put_of({"b": 1, "c": 1}), node="here", nbytes=100, now_s=0.0, answer=answers.append)
    small = ask_room(core, put_of({"d": 1}))
    core.writers.leave(large)
    core.writers.serve(0.0)
    assert isinstance(small[0], Segment) and answers == []


def test_a_put_without_columns_takes_no_room() -> None:
    core = new_core()
    batch = PackedBatch(("a", "b"), {}, versions=((3, 3), (3, 3)))
    segment = store(core, Put.of(batch))
    assert core.stats(0.0)["distqueue/rows"] == 2 and segment.number not in core.ledger.segments
    store(core, put_of({"a": 1, "b": 1}))
    assert ask(core, select(2))[0].versions == ((3, 3), (3, 3))


# ---- grants: a file for the next put


def granted(core: QueueCore, nbytes: int = 100, now_s: float = 0.0) -> Segment:
    found = core.grant("here", nbytes, now_s)
    assert found is not None
    return found


def test_a_put_into_a_granted_file_is_one_call_and_may_be_repeated() -> None:
    told: list[str] = []
    core = new_core()
    core.record = lambda kind, body: told.append(kind)
    file = granted(core)
    assert core.stats(0.0)["distqueue/bytes"] == 0, "nothing is in it yet"
    for _ in range(2):
        assert core.put(put_of({"a": 1}), nbytes=60, number=file.number, path=file.path, now_s=0.0) == ()
    assert told == ["put"] and core.stats(0.0)["distqueue/bytes"] == 60
    with pytest.raises(LookupError):
        core.put(put_of({"b": 1}), nbytes=60, number=file.number, path="/here/of another life", now_s=0.0)
    assert not core.table.are_live(["b"]).any()


def test_what_is_granted_keeps_nobody_waiting() -> None:
    core = new_core(max_bytes=2 * GRAIN)
    first, second = granted(core), granted(core)
    assert core.grant("here", 100, 0.0) is None, "room is short"
    (writer,) = ask_room(core, put_of({"a": 1}))
    assert isinstance(writer, Segment), "the oldest grant was taken back for it"
    with pytest.raises(LookupError, match="not granted, or revoked"):
        core.put(put_of({"b": 1}), nbytes=100, number=first.number, path=first.path, now_s=0.0)
    assert core.put(put_of({"b": 1}), nbytes=100, number=second.number, path=second.path, now_s=0.0) == ()
    assert ("here", first.path) in core.ledger.discards, "its writer may be writing: the file serves nobody else"


def test_a_grant_passes_nobody_who_waits_and_no_bound() -> None:
    core = new_core(max_rows=2)
    files = [granted(core) for _ in range(4)]
    core.put(put_of({"a": 1}), nbytes=100, number=files[0].number, path=files[0].path, now_s=0.0)
    with pytest.raises(NoRoomForRows, match="no room for 2 new samples yet"):
        core.put(put_of({"b": 1, "c": 1}), nbytes=100, number=files[1].number, path=files[1].path, now_s=0.0)
    waiting = ask_room(core, put_of({"b": 1, "c": 1}))
    assert waiting == [] and core.grant("here", 100, 0.0) is None
    with pytest.raises(LookupError):
        core.put(put_of({"d": 1}), nbytes=100, number=files[2].number, path=files[2].path, now_s=0.0)
    core.put(put_of({"a": 1}, "reward"), nbytes=100, number=files[3].number, path=files[3].path, now_s=0.0)
    assert core.table.are_live(["a", "b", "d"]).tolist() == [True, False, False]


def test_a_wrong_put_gives_its_grant_back_and_a_sealed_queue_takes_none() -> None:
    core = new_core()
    store(core, put_of({"a": 1}))
    file, other = granted(core), granted(core)
    with pytest.raises(ValueError, match="sample 'a': column 'tokens' exists already"):
        core.put(put_of({"a": 1}), nbytes=100, number=file.number, path=file.path, now_s=0.0)
    core.seal(0.0)
    with pytest.raises(ValueError, match="sample 'b': the queue is sealed"):
        core.put(put_of({"b": 1}), nbytes=100, number=other.number, path=other.path, now_s=0.0)
    assert core.grant("here", 100, 0.0) is None and core.writers.granted == {}
    assert len(core.ledger.segments) == 1


def test_a_grant_is_given_up_after_the_lease() -> None:
    core = new_core()
    file = granted(core)
    ask_room(core, put_of({"a": 1}), now_s=LEASE_S)
    with pytest.raises(LookupError):
        core.put(put_of({"b": 1}), nbytes=100, number=file.number, path=file.path, now_s=LEASE_S)


# ---- commits


def test_a_commit_that_is_repeated_changes_nothing() -> None:
    told: list[tuple[str, bytes]] = []
    core = new_core()
    core.record = lambda kind, body: told.append((kind, body))
    store(core, put_of({"late": 1}))
    core.drop(["late"], "stale", 0.0)
    (segment,) = ask_room(core, put_of({"a": 1, "late": 1}, "reward"))
    assert core.commit(segment.number, segment.path, 0.0) == ("late",)
    before = len(told), core.stats(0.0)
    assert core.commit(segment.number, segment.path, 1.0) == ("late",)
    core.drop(["a"], "stale", 0.0)
    assert core.commit(segment.number, segment.path, 2.0) == ("late",), "even when its samples have ended"
    assert (len(told) - 1, core.late) == (before[0], before[1]["distqueue/late"])
    with pytest.raises(LookupError):
        core.commit(segment.number, "/here/of another life", 0.0)


def test_a_repeated_commit_is_recognised_however_many_puts_follow() -> None:
    core = new_core()
    stored, ended = store(core, put_of({"a": 1})), store(core, put_of({"b": 1}))
    core.drop(["b"], "stale", 0.0)
    for n in range(2 * REMEMBERED_PUTS):
        store(core, put_of({f"c{n}": 1}))
    assert len(core.committed) == REMEMBERED_PUTS
    restored = QueueCore.recover(core.snapshot(), [])
    for one in (core, restored):
        before = one.stats(0.0)
        assert one.commit(stored.number, stored.path, 0.0) == () and one.stats(0.0) == before
        with pytest.raises(LookupError):
            one.commit(ended.number, ended.path, 0.0)
    (again,) = ask_room(core, put_of({"b": 1}))  # its writer puts again, and nothing is stored twice
    assert core.commit(again.number, again.path, 0.0) == ("b",) and not core.table.are_live(["b"]).any()


def test_segments_that_are_lost_take_their_writers_reservations_with_them() -> None:
    core = new_core()
    stored = store(core, put_of({"a": 1}))
    (writing,) = ask_room(core, put_of({"b": 1}))
    assert core.lose([stored.number, writing.number], "shard-1", 0.0) == ("a",)
    with pytest.raises(LookupError):
        core.commit(writing.number, writing.path, 0.0)
    assert core.stats(0.0)["distqueue/ended/lost:shard-1"] == 1 and not core.ledger.segments

"""The core driven without processes: shares, age bounds, backpressure, sealing, commits, and what waiters cost.
`test_recovery.py` is about going on from its snapshots and events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from distqueue import PackedBatch, QueueClosed, QueueDrained
from distqueue.core import QueueCore, Share
from distqueue.messages import Delivery, Put
from distqueue.samples import SampleTable, Want
from distqueue.segments import GRAIN, Segment, Shard

LEASE_S = 10.0


def new_core(
    *tasks: str, group_size: int | None = None, max_bytes: int = 1 << 40, max_rows: int | None = None
) -> QueueCore:
    core = QueueCore(SampleTable(tasks or ("train",), LEASE_S, group_size), max_rows=max_rows, epoch="e")
    core.ledger.add_shard(Shard("here", "here", "/here", max_bytes))
    return core


def put_of(lengths: dict[str, int], column: str = "tokens", groups: Sequence[str] = (), version: int = -1) -> Put:
    """What a writer says of samples, by id, of so many tokens."""
    batch = PackedBatch.from_samples(
        list(lengths), {column: [torch.zeros(n, dtype=torch.int8) for n in lengths.values()]}
    )
    return Put.of(batch.labelled(groups, [] if version < 0 else [version] * len(batch)))


def ask_room(core: QueueCore, put: Put, nbytes: int = 100, now_s: float = 0.0) -> list[Any]:
    """What a writer is answered: [] as long as it waits."""
    answers: list[Any] = []
    core.ask_room(put, "here", nbytes, now_s, answers.append)
    return answers


def store(core: QueueCore, put: Put, now_s: float = 0.0) -> Segment:
    (segment,) = ask_room(core, put, now_s=now_s)
    core.commit(segment.number, segment.path, now_s)
    return segment


def ask(core: QueueCore, want: Want, share: tuple[int, int] | None = None, now_s: float = 0.0) -> list[Any]:
    """What a reader is answered: [] as long as it waits."""
    answers: list[Any] = []
    core.ask(want, None if share is None else Share(*share), now_s, answers.append)
    return answers


def numbered(count: int, first: int = 0) -> dict[str, int]:
    """Samples of very different lengths."""
    return {f"s{n}": 1 + n * 7 % 23 for n in range(first, first + count)}


def want(count: int | None = None, task: str = "train", columns: Sequence[str] = ("tokens",), **more: Any) -> Want:
    return Want(task, tuple(columns), count, **more)


# ---- shares


def test_a_batch_is_dealt_out_by_tokens_and_every_sample_goes_to_one_reader() -> None:
    core, lengths = new_core(), numbered(40)
    waiting = [ask(core, want(40), (rank, 4)) for rank in range(3)]
    assert waiting == [[], [], []]
    store(core, put_of(lengths))
    late = ask(core, want(40), (3, 4), now_s=LEASE_S - 1)
    parts = [answers[0] for answers in (*waiting, late)]
    ids = [id for part in parts for id in part.ids]
    assert sorted(ids) == sorted(lengths), "one that comes late gets its share; no sample comes twice or is left out"
    tokens = [sum(lengths[id] for id in part.ids) for part in parts]
    assert max(tokens) - min(tokens) <= max(lengths.values())
    assert all(list(part.ids) == sorted(part.ids, key=list(lengths).index) for part in parts)


def test_readers_who_go_on_at_their_own_pace_get_their_parts_of_every_batch() -> None:
    core = new_core()
    store(core, put_of(numbered(24)))
    first = [ask(core, want(8), (0, 2))[0] for _ in range(3)]
    second = [ask(core, want(8), (1, 2))[0] for _ in range(3)]
    for k, (one, other) in enumerate(zip(first, second, strict=True)):
        assert sorted(one.ids + other.ids) == sorted(numbered(8, 8 * k))


def test_groups_stay_whole_in_shares() -> None:
    core = new_core(group_size=2)
    store(core, put_of(numbered(8), groups=[f"g{n // 2}" for n in range(8)]))
    parts = [ask(core, want(8, whole_groups=True), (rank, 3))[0] for rank in range(3)]
    assert [sorted(set(part.groups)) for part in parts] and sum(len(set(part.groups)) for part in parts) == 4
    assert all(len(part.ids) == 2 * len(set(part.groups)) for part in parts)


def test_a_share_whose_lease_ran_out_is_handed_out_again_and_not_twice() -> None:
    core = new_core()
    store(core, put_of(numbered(8)))
    (mine,) = ask(core, want(8), (0, 2))
    core.ack("train", mine.ids, 1.0)
    left = set(numbered(8)) - set(mine.ids)
    again = [ask(core, want(len(left)), (rank, 2), now_s=LEASE_S) for rank in (1, 0)]
    assert sorted(id for answers in again for id in answers[0].ids) == sorted(left)
    assert ask(core, want(8), (1, 2), now_s=LEASE_S) == [], "what it was too late for is not handed to it as well"
    assert core.stats(LEASE_S)["distqueue/train/redelivered"] == len(left)


def test_what_ended_before_its_reader_came_is_left_out_of_its_share() -> None:
    core = new_core()
    segments = [store(core, put_of({id: 5})) for id in "abcd"]
    (mine,) = ask(core, want(4), (0, 2))
    others = sorted(set("abcd") - set(mine.ids))
    core.drop(others[:1], "stale", 0.0)
    (theirs,) = ask(core, want(4), (1, 2))
    assert theirs.ids == (others[1],)
    assert [place.number for place in theirs.places] == [segments["abcd".index(others[1])].number]
    core.drop(mine.ids, "stale", 0.0)
    store(core, put_of({"e": 5}))
    ask(core, want(1), (0, 2))
    core.drop(["e"], "stale", 0.0)
    assert ask(core, want(1), (1, 2))[0].ids == ()


def test_shares_nobody_came_for_are_not_kept_for_ever() -> None:
    core = new_core()
    for step in range(50):
        now_s = step * LEASE_S
        store(core, put_of({f"{step}-{k}": 3 for k in range(4)}, version=step), now_s)
        (mine,) = ask(core, want(4, min_version=step), (0, 2), now_s)
        core.ack("train", mine.ids, now_s)
    assert len(core.readers.shares) <= 2


# ---- age


def test_samples_that_are_too_old_stay_and_are_named() -> None:
    core = new_core()
    store(core, put_of({"old": 3, "older": 3}, version=4))
    store(core, put_of({"unknown": 3}))
    waiting = ask(core, want(2, min_version=5))
    assert waiting == [] and core.explain(want(2, min_version=5)).endswith("3 samples ready, 3 older than version 5")
    store(core, put_of({"new": 3, "newer": 3}, version=5))
    (found,) = waiting
    assert (found.ids, found.too_old) == (("new", "newer"), ("old", "older", "unknown"))
    assert Delivery.from_bytes(found.to_bytes()).too_old == found.too_old
    (rest,) = ask(core, want(3))
    assert rest.ids == ("old", "older", "unknown") and rest.too_old == ()


def test_a_share_names_what_was_too_old() -> None:
    core = new_core()
    store(core, put_of({"old": 3}, version=4))
    store(core, put_of({"a": 3, "b": 3}, version=5))
    parts = [ask(core, want(2, min_version=5), (rank, 2))[0] for rank in range(2)]
    assert [part.too_old for part in parts] == [("old",), ("old",)]


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
    with pytest.raises(LookupError, match=f"segment {dead.number} at .*: not reserved, or given up"):
        core.commit(dead.number, dead.path, LEASE_S)
    core.commit(waiting[0].number, waiting[0].path, LEASE_S)
    assert core.stats(LEASE_S)["distqueue/rows"] == 1


def test_a_put_that_another_came_before_is_refused_and_gives_its_room_back() -> None:
    core = new_core(max_rows=2)
    (first,), (second,) = (ask_room(core, put_of({"a": 1})) for _ in range(2))
    waiting = ask_room(core, put_of({"b": 1}))
    core.commit(first.number, first.path, 0.0)
    with pytest.raises(ValueError, match="sample 'a': column 'tokens' is there already"):
        core.commit(second.number, second.path, 0.0)
    assert isinstance(waiting[0], Segment) and second.number not in core.ledger.segments


def test_a_writer_that_leaves_lets_the_next_one_through() -> None:
    core = new_core(max_rows=2)
    store(core, put_of({"a": 1}))
    answers: list[Any] = []
    large = core.ask_room(put_of({"b": 1, "c": 1}), "here", 100, 0.0, answers.append)
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
    assert ask(core, want(2))[0].versions == ((3, 3), (3, 3))


# ---- the end


def test_a_sealed_queue_serves_what_is_left_then_says_so() -> None:
    core = new_core()
    store(core, put_of(numbered(3)))
    first, second = ask(core, want(2)), ask(core, want(2))
    assert len(first[0].ids) == 2 and second == []
    core.seal(0.0)
    core.seal(0.0)
    assert second[0].ids == ("s2",), "the rest, although it is less"
    third = ask(core, want(2))
    assert third == [], "what is leased may come back"
    core.ack("train", [*first[0].ids, *second[0].ids], 0.0)
    assert isinstance(third[0], QueueDrained) and str(third[0]) == (
        "the queue is sealed and task 'train' has had everything"
    )
    (refused,) = ask_room(core, put_of({"new": 1}))
    assert isinstance(refused, ValueError) and "sample 'new': the queue is sealed" in str(refused)


def test_a_lease_that_ends_after_the_seal_is_served_again() -> None:
    core = new_core()
    store(core, put_of({"a": 1}))
    assert ask(core, want(1))
    core.seal(0.0)
    waiting = ask(core, want(5), now_s=1.0)
    core.tick(LEASE_S)
    assert waiting[0].ids == ("a",)


def test_a_sealed_queue_waits_for_columns_that_are_missing() -> None:
    core = new_core("reward", "train")
    store(core, put_of({"a": 1, "b": 1}))
    core.seal(0.0)
    waiting = ask(core, want(5, columns=("tokens", "reward")))
    (scored,) = ask(core, want(5, task="reward"))
    store(core, put_of({"a": 1}, "reward"))
    assert scored.ids == ("a", "b") and waiting == [], "b lacks it still"
    core.drop(["b"], "no reward", 0.0)
    assert waiting[0].ids == ("a",)


def test_a_sealed_queue_waits_for_what_is_being_written() -> None:
    core = new_core()
    (living,), (dead,) = ask_room(core, put_of({"a": 1})), ask_room(core, put_of({"b": 1}))
    core.seal(0.0)
    waiting = [ask(core, want(2)), ask(core, want(2))]
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


def test_what_a_task_may_not_have_is_counted_when_it_is_drained() -> None:
    core = new_core(group_size=2)
    store(core, put_of({"a": 1, "b": 1, "c": 1}, groups=["g", "g", "h"], version=1))
    store(core, put_of({"d": 1}, groups=["h"], version=0))
    core.seal(0.0)
    (whole,) = ask(core, want(4, whole_groups=True, min_version=1))
    assert whole.ids == ("a", "b")
    core.ack("train", whole.ids, 0.0)
    (error,) = ask(core, want(4, whole_groups=True, min_version=1))
    assert str(error).endswith("has had everything; 2 samples that it may not have are left")


def test_every_reader_of_shares_hears_of_the_end() -> None:
    core = new_core()
    store(core, put_of(numbered(3)))
    core.seal(0.0)
    parts = [ask(core, want(8), (rank, 4))[0] for rank in range(4)]
    assert sorted(id for part in parts for id in part.ids) == sorted(numbered(3)), "fewer than readers"
    waiting = [ask(core, want(8), (rank, 4)) for rank in range(4)]
    assert waiting == [[], [], [], []]
    core.ack("train", list(numbered(3)), 0.0)
    assert all(isinstance(answers[0], QueueDrained) for answers in waiting)


def test_a_closed_queue_answers_all_who_wait() -> None:
    core = new_core(max_rows=1)
    reader, sharer = ask(core, want(1, columns=("x",))), ask(core, want(1, columns=("x",)), (0, 2))
    store(core, put_of({"a": 1}))
    writer = ask_room(core, put_of({"b": 1}))
    core.close()
    assert all(type(answers[0]) is QueueClosed for answers in (reader, sharer, writer))
    with pytest.raises(QueueClosed, match=r"task 'train' gets no \['tokens'\]"):
        ask(core, want(1))


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


def test_segments_that_are_lost_take_their_writers_reservations_with_them() -> None:
    core = new_core()
    stored = store(core, put_of({"a": 1}))
    (writing,) = ask_room(core, put_of({"b": 1}))
    assert core.lose([stored.number, writing.number], "shard-1", 0.0) == ("a",)
    with pytest.raises(LookupError):
        core.commit(writing.number, writing.path, 0.0)
    assert core.stats(0.0)["distqueue/ended/lost:shard-1"] == 1 and not core.ledger.segments


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
        assert core.put(put_of({"a": 1}), 60, file.number, file.path, 0.0) == ()
    assert told == ["put"] and core.stats(0.0)["distqueue/bytes"] == 60
    with pytest.raises(LookupError):
        core.put(put_of({"b": 1}), 60, file.number, "/here/of another life", 0.0)
    assert not core.table.are_live(["b"]).any()


def test_what_is_granted_keeps_nobody_waiting() -> None:
    core = new_core(max_bytes=2 * GRAIN)
    first, second = granted(core), granted(core)
    assert core.grant("here", 100, 0.0) is None, "room is short"
    (writer,) = ask_room(core, put_of({"a": 1}))
    assert isinstance(writer, Segment), "the oldest grant was taken back for it"
    with pytest.raises(LookupError, match="not granted, or taken back"):
        core.put(put_of({"b": 1}), 100, first.number, first.path, 0.0)
    assert core.put(put_of({"b": 1}), 100, second.number, second.path, 0.0) == ()
    assert ("here", first.path) in core.ledger.discards, "its writer may be writing: the file serves nobody else"


def test_a_grant_passes_nobody_who_waits_and_no_bound() -> None:
    core = new_core(max_rows=2)
    files = [granted(core) for _ in range(4)]
    core.put(put_of({"a": 1}), 100, files[0].number, files[0].path, 0.0)
    with pytest.raises(LookupError, match="no room for 2 new samples yet"):
        core.put(put_of({"b": 1, "c": 1}), 100, files[1].number, files[1].path, 0.0)
    waiting = ask_room(core, put_of({"b": 1, "c": 1}))
    assert waiting == [] and core.grant("here", 100, 0.0) is None
    with pytest.raises(LookupError):
        core.put(put_of({"d": 1}), 100, files[2].number, files[2].path, 0.0)
    core.put(put_of({"a": 1}, "reward"), 100, files[3].number, files[3].path, 0.0)
    assert core.table.are_live(["a", "b", "d"]).tolist() == [True, False, False]


def test_a_wrong_put_gives_its_grant_back_and_a_sealed_queue_takes_none() -> None:
    core = new_core()
    store(core, put_of({"a": 1}))
    file, other = granted(core), granted(core)
    with pytest.raises(ValueError, match="sample 'a': column 'tokens' is there already"):
        core.put(put_of({"a": 1}), 100, file.number, file.path, 0.0)
    core.seal(0.0)
    with pytest.raises(ValueError, match="sample 'b': the queue is sealed"):
        core.put(put_of({"b": 1}), 100, other.number, other.path, 0.0)
    assert core.grant("here", 100, 0.0) is None and core.writers.granted == {}
    assert len(core.ledger.segments) == 1


def test_a_grant_is_given_up_after_the_lease() -> None:
    core = new_core()
    file = granted(core)
    ask_room(core, put_of({"a": 1}), now_s=LEASE_S)
    with pytest.raises(LookupError):
        core.put(put_of({"b": 1}), 100, file.number, file.path, LEASE_S)


# ---- waiting


@pytest.mark.parametrize("readers", [None, 512])
def test_what_many_readers_wait_for_is_looked_at_once_a_put(readers: int | None) -> None:
    core = new_core()
    waiting = [ask(core, want(4), None if readers is None else (rank, readers)) for rank in range(512)]
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
        ask(core, want(4 + rank % 2))
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

    first = core.ask(want(1), None, 0.0, told_as("first"))
    core.ask(want(1), None, 1.0, told_as("second"))
    core.readers.leave(first)
    core.ask(want(1), None, 2.0, told_as("first"), (first.number, first.since_s))
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
    assert np.array_equal(core.table.rows_of_segment(whole.number), core.table.find(["b", "c"]))

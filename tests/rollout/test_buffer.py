"""The invariants of `fusion.rollout.buffer`, under random engines."""

import gc
import random
import sys
from dataclasses import replace
from functools import partial

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from fusion.rollout import EngineRoom, RequestBuffer, SuspendedSample
from fusion.rollout import buffer as buffer_module
from fusion.rollout.types import conversation_of, parse_row
from tests.rollout.plain_dispatch import plain_dispatch


def exact_lengths(group):
    return [random.Random(f"{group}/{member}").randint(100, 300) for member in range(3)]


ORDERS = {
    "fifo": lambda entry: entry.position,
    "least_generated": lambda entry: (entry.generated, entry.position),
    "oracle": lambda entry: (entry.generated - exact_lengths(entry.group)[entry.member], entry.position),
}


@pytest.mark.parametrize("order", ORDERS)
def test_a_dispatch_leaves_nothing_for_a_garbage_collection(order):
    """The controller collects seldom: until then, all that were dispatched would stay."""
    buffer = RequestBuffer(0, order, exact_lengths)
    for group in range(3):
        buffer.add(f"g{group}", [f"g{group}/{k}" for k in range(3)], 5, 100)
    gc.collect()
    gc.disable()
    try:
        assert sum(map(len, buffer.dispatch([0, 1], EngineRoom(requests=2)).values())) == 4
        assert gc.collect() == 0
    finally:
        gc.enable()


def by_position(entry):
    return entry.position


@settings(max_examples=60)
@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.sampled_from(sorted(ORDERS)),
    st.randoms(use_true_random=False),
)
def test_random_engines_lose_and_repeat_nothing(engines, group_size, num_probes, order, random):
    new = partial(RequestBuffer, num_probes, order, exact_lengths)
    buffer, added, finished = new(), 0, []
    held: dict[str, int] = {}
    last_engine: dict[str, int] = {}
    rows, cancelled, left_rows, branches = {}, set(), [], {}
    for step in range(80):
        events = ["add", "dispatch", "suspend", "finish", "finish", "remove", "save", "turn", "return", "branch"]
        events += ["leave", "end"]
        away = {entry.id for entry in buffer.of("away")}
        match random.choice(events):
            case "add":
                buffer.add(f"g{added}", [f"g{added}/{k}" for k in range(group_size)], random.randint(1, 9), 100)
                added += 1
            case "dispatch":
                held |= _dispatch(
                    buffer, held, last_engine, engines=engines, order=order, probes=num_probes, random=random
                )
            case "suspend" if held:
                id = random.choice(sorted(held))
                generated = buffer.entries[id].generated + random.randint(0, 5)
                kv_rank = random.choice([None, 0, 1])
                earlier = f"{id}~{generated}" if generated else ""
                _suspend(buffer, held.pop(id), buffer.entries[id].name, generated, earlier, (step, step), kv_rank)
                rows[id] = earlier
            case "turn" if held:
                id = random.choice(sorted(held))
                rows[id] = _end_turn(buffer, held.pop(id), id, random, cancelled, step)
            case "return" if away:
                id, said = random.choice(sorted(away)), random.randint(1, 5)
                generated = buffer.entries[id].generated + said
                buffer.observe_returned(id, said)
                entry = buffer.entries[id]
                assert (entry.state, entry.generated, entry.earlier) == ("waiting", generated, rows[id])
                assert entry.observation == said
            case "branch" if away:
                id = random.choice(sorted(away))
                branches.setdefault(id, []).append(_branch(buffer, id))
                rows.pop(id)
            case "leave" if away:
                id = random.choice(sorted(away))
                engine, name = buffer.entries[id].kv and buffer.entries[id].kv[0], buffer.entries[id].name
                buffer.finish({id: buffer.entries[id].generated})
                finished.append(id)
                assert buffer.take_left_kv() == ({} if engine is None else {engine: [name]}), "its KV is freed"
            case "end" if {entry.group for entry in buffer.entries.values()} - cancelled and random.random() < 0.3:
                _end_group(buffer, cancelled, rows, branches, random)
            case "finish" if held:
                id = random.choice(sorted(held))
                del held[id]
                buffer.finish({id: 7})
                finished.append(id)
            case "remove":
                left = {entry.group for entry in buffer.entries.values() if entry.state != "finished"}
                for group in dict.fromkeys(one.group for one in buffer.entries.values() if one.group not in left):
                    buffer.remove(group)
            case "save" if not held:
                again = new()
                again.load_state_dict(buffer.state_dict())
                assert again.state_dict() == buffer.state_dict()
                assert _priorities(again) == _priorities(buffer), "though they are not saved"
                assert not any(entry.kv for entry in again.entries.values()), "parked KV is in no checkpoint"
                if random.random() < 0.5:
                    buffer, last_engine, cancelled = again, {}, set()
        left = buffer.take_left_rows()
        for row in left:
            id = conversation_of(parse_row(row)[0] if "~" in row else row)
            assert row in (rows.get(id), *branches.get(id, ())) and id.split("/")[0] in cancelled
        left_rows += left
        buffer.take_left_kv()  # of those that came back to a cancelled group
        assert len(left_rows) == len({*left_rows}), "it is told once"
        states = ("waiting", "running", "away", "finished")
        assert all(buffer.num(state) == len(buffer.of(state)) for state in states)
        assert buffer.num_idle == buffer.num("waiting") + buffer.num("away")
    states = {entry.id: entry.state for entry in buffer.entries.values()}
    assert {id for id, state in states.items() if state == "running"} == set(held)
    assert len(finished) == len(set(finished))
    assert all(states.get(id, "finished") == "finished" for id in finished)


def _end_turn(buffer, engine, id, random, cancelled, step):
    """End the turn of a request that an engine has; return its row."""
    generated, name = buffer.entries[id].generated + random.randint(1, 5), buffer.entries[id].name
    row = f"{id}~{generated}"
    buffer.suspend(engine, SuspendedSample(name, generated, row, (step, step), random.choice([None, 0]), turn=True))
    is_cancelled = buffer.entries[id].group in cancelled
    assert buffer.entries[id].state == ("finished" if is_cancelled else "away")
    assert buffer.entries[id].observation == 0
    return row


def _branch(buffer, id):
    """Continue a request that is away in another branch; return the name of the one that has ended."""
    entry, ended = buffer.entries[id], buffer.entries[id].name
    engine = entry.kv and entry.kv[0]
    buffer.branch(id, 8, 20)
    assert (entry.state, entry.generated, entry.earlier, entry.oldest) == ("waiting", 0, "", -1)
    assert entry.name == f"{id}.{entry.branch}" != ended
    assert (entry.prompt_tokens, entry.max_tokens) == (8, 20)
    assert buffer.take_left_kv() == ({} if engine is None else {engine: [ended]}), "its KV is freed"
    return ended


def _dispatch(buffer, held, last_engine, *, engines, order, probes, random):
    """Dispatch to some engines, and check it against plain references; return the engine of each request."""
    waiting = {entry.id: entry.kv for entry in buffer.of("waiting")}
    before = [replace(entry) for entry in buffer.of("waiting")]
    running = sorted(random.sample(range(engines), random.randint(1, engines)))
    loads = {engine: _load(buffer, engine) for engine in running}
    most, had = random.choice([None, random_room(random)]), {n: buffer.num_running_on(n) for n in running}
    slots = random.choice([0, 0, 100]) if most is None else 0
    key = by_position if slots else ORDERS[order]
    expected = plain_dispatch(buffer, running, most, last_engine, key)
    found = buffer.dispatch(running, most, slots=slots)
    given_ = {entry.id: engine for engine, entries in found.items() for entry in entries}
    assert given_ == expected
    assert not set(given_) & set(held)
    name = {id: buffer.entries[id].name for id in waiting}
    gone = {(kv[0], name[id]) for id, kv in waiting.items() if kv and id in given_ and given_[id] != kv[0]}
    assert {(engine, id) for engine, ids in buffer.take_left_kv().items() for id in ids} == gone
    assert not buffer.take_left_kv(), "it is told once"
    if most is None:
        assert set(given_) == set(waiting)
        _check_ways_back(buffer, loads, waiting, given_)
    else:
        in_order = [entry.id for entry in sorted(before, key=key)]
        _check_filled(buffer, in_order, given_, had, most)
        last_engine |= {buffer.entries[id].group: given_[id] for id in in_order if id in given_}
    for entries in found.values():
        assert entries == sorted(entries, key=key), "each engine has its requests in order"
    _check_priorities(buffer, given_, probes)
    return given_


def _end_group(buffer, cancelled, rows, branches, random):
    """End a group, and check what is left of it."""
    group = random.choice(sorted({entry.group for entry in buffer.entries.values()} - cancelled))
    members = [entry for entry in buffer.entries.values() if entry.group == group]
    idle = [entry for entry in members if entry.state in ("waiting", "away")]
    kv = {(entry.kv[0], entry.name) for entry in idle if entry.kv}
    cancelled.add(group)
    buffer.end(group)
    assert all(entry.state in ("running", "finished") for entry in members)
    assert buffer.num_unfinished(group) == sum(entry.state == "running" for entry in members)
    assert {(engine, id) for engine, ids in buffer.take_left_kv().items() for id in ids} == kv
    left = [row for entry in idle for row in (rows.get(entry.id), *branches.get(entry.id, ())) if row]
    assert sorted(buffer.take_left_rows()) == sorted(left)


def random_room(random):
    return EngineRoom(random.randint(1, 6), random.choice([None, random.randint(50, 400)]), random.choice([0, 8]))


def _priorities(buffer):
    return {entry.id: entry.priority for entry in buffer.entries.values()}


def _check_priorities(buffer, ids, num_probes):
    """The first requests of a group come before the first tokens of the others."""
    for id in ids:
        is_behind = int(id.split("/")[1]) >= num_probes > 0 and not buffer.entries[id].generated
        assert buffer.entries[id].priority == is_behind


def _suspend(buffer, engine, id, generated, earlier, versions, kv_rank=None):
    buffer.suspend(engine, SuspendedSample(id, generated, earlier, versions, kv_rank))


def _check_filled(buffer, waiting, given_, had, most):
    assert sorted(given_) == sorted(waiting[: len(given_)]), "in order"
    assert all(buffer.num_running_on(engine) <= max(most.requests, before) for engine, before in had.items())
    if most.kv_tokens is None and len(given_) < len(waiting):
        assert all(buffer.num_running_on(engine) >= most.requests for engine in had), "what waits finds no room"
    for engine in {given_[id] for id in given_} if most.kv_tokens is not None else ():
        held = [entry for entry in buffer.of("running") if entry.engine == engine]
        # Where KV was not bounded before, nothing is reserved for what an engine has.
        assert len(held) == 1 or sum(entry.reserved for entry in held) <= most.kv_tokens


def test_what_finds_no_room_waits_and_goes_where_there_is_some():
    buffer = RequestBuffer()
    buffer.add("a", ["a/0", "a/1"], 5, 10)
    buffer.add("b", ["b/0", "b/1"], 5, 10)
    found = buffer.dispatch([0, 1], EngineRoom(1))
    assert [[entry.id for entry in found[engine]] for engine in (0, 1)] == [["a/0"], ["a/1"]]
    buffer.finish({"a/1": 3})
    found = buffer.dispatch([0, 1], EngineRoom(2))
    assert [[entry.id for entry in found[engine]] for engine in (0, 1)] == [[], ["b/0", "b/1"]]
    _suspend(buffer, 1, "b/1", 2, "b/1~2", (0, 0), 0)
    _suspend(buffer, 1, "b/0", 2, "b/0~2", (0, 0), 0)
    found = buffer.dispatch([0, 1], EngineRoom(2))
    assert len(found[1]) == 2, "to where its KV is, though another has room"


def _load(buffer, engine):
    return sum(entry.prompt_tokens + entry.generated for entry in buffer.of("running") if entry.engine == engine)


def _check_ways_back(buffer, loads, waiting, given_):
    """``loads`` by engine before; ``waiting``: where the KV of each waiting request was; ``given_``: its engine."""
    share = sum(_load(buffer, engine) for engine in loads) / len(loads)
    for engine, load in loads.items():
        back = [id for id, kv in waiting.items() if kv and kv[0] == engine]
        home = [id for id in back if given_[id] == engine]
        assert all(buffer.entries[id].kv == waiting[id] for id in home)
        sizes = [buffer.entries[id].prompt_tokens + buffer.entries[id].generated for id in home]
        if len(home) < len(back):
            assert _load(buffer, engine) >= share, "only an engine that has its share sends its own away"
        # What may have come without KV comes after, to the least loaded: it does not push anybody out
        if sizes and load < share:
            assert load + sum(sizes) < share + max(sizes), "nor takes more of them than the last to reach it"
    for id, engine in given_.items():
        assert buffer.entries[id].kv in (None, waiting[id]) and (buffer.entries[id].kv or (engine,))[0] == engine


def test_siblings_stay_together_and_the_least_loaded_engine_comes_first():
    buffer = RequestBuffer()
    buffer.add("a", ["a/0", "a/1"], 50, 10)
    assert [entry.id for entry in buffer.dispatch([0, 1])[0]] == ["a/0", "a/1"]
    buffer.add("b", ["b/0", "b/1"], 30, 10)
    buffer.add("c", ["c/0", "c/1"], 20, 10)
    found = buffer.dispatch([0, 1])
    assert [entry.id for entry in found[1]] == ["b/0", "b/1", "c/0", "c/1"] and not found[0]


def test_a_suspended_request_goes_on_elsewhere_with_what_it_has():
    buffer = RequestBuffer()
    buffer.add("a", ["a/0"], 5, 10)
    buffer.dispatch([3])
    _suspend(buffer, 3, "a/0", 4, "a/0~4", (1, 2))
    (entry,) = buffer.dispatch([7])[7]
    assert (entry.generated, entry.earlier, entry.oldest, entry.newest) == (4, "a/0~4", 1, 2)
    with pytest.raises(AssertionError, match="had 4 tokens and has 3"):
        _suspend(buffer, 7, "a/0", 3, "a/0~3", None)
    _suspend(buffer, 7, "a/0", 5, "a/0~5", (1, 3), 2)
    (entry,) = buffer.dispatch([3, 7])[7]
    assert entry.kv == (7, 2), "to where its KV is"
    _suspend(buffer, 7, "a/0", 6, "a/0~6", (1, 4), 2)
    (entry,) = buffer.dispatch([3])[3]
    assert entry.kv is None, "its engine does not run: it does not wait for it"
    buffer.finish({"a/0": 9})
    assert not buffer.num("waiting") and [entry.id for entry in buffer.remove("a")] == ["a/0"]


def test_what_remains_of_a_group_follows_its_siblings():
    buffer = RequestBuffer()
    buffer.add("a", ["a/0", "a/1", "a/2"], 5, 10)
    buffer.add("b", ["b/0"], 5, 10)
    found = buffer.dispatch([0, 1], EngineRoom(1))
    assert [[entry.id for entry in found[engine]] for engine in (0, 1)] == [["a/0"], ["a/1"]]
    buffer.finish({"a/0": 3, "a/1": 3})
    found = buffer.dispatch([0, 1], EngineRoom(1))
    assert [[entry.id for entry in found[engine]] for engine in (0, 1)] == [["b/0"], ["a/2"]], "on 1, as a/1 before"


def test_a_state_of_an_earlier_format_is_restored():
    buffer, again = RequestBuffer(), RequestBuffer()
    buffer.add("a", ["a/0", "a/1"], 5, 10)
    buffer.dispatch([0])
    _suspend(buffer, 0, "a/0", 4, "a/0~4", (1, 2))
    buffer.finish({"a/1": 7})
    again.load_state_dict([entry | {"suspensions": 1} for entry in buffer.state_dict()])
    assert again.state_dict() == buffer.state_dict()
    assert [entry.id for entry in again.dispatch([0])[0]] == ["a/0"]


@pytest.mark.parametrize("order", ["context", "history"])
def test_a_restored_buffer_knows_the_lengths_of_finished_siblings(order):
    buffer, room = RequestBuffer(order=order), EngineRoom(100, chunk_tokens=4)
    for group in ("e0-0", "e0-1"):
        buffer.add(group, [f"{group}/{member}" for member in range(4)], 5, 100)
    buffer.dispatch([0], room)
    buffer.finish({"e0-0/2": 10, "e0-0/3": 11, "e0-1/2": 50, "e0-1/3": 60})
    for entry in buffer.of("running"):
        _suspend(buffer, 0, entry.id, 4, f"{entry.id}~4", (0, 0))
    again = RequestBuffer(order=order)
    again.load_state_dict(buffer.state_dict())
    ids = [entry.id for entry in buffer.dispatch([0], room)[0]]
    assert [entry.id for entry in again.dispatch([0], room)[0]] == ids
    assert ids.index("e0-1/1") < ids.index("e0-0/1"), "the longer ones first"
    metrics = again.take_metrics()
    assert metrics == {"rollout/migrations_total": 0}, "what was reported before the restart is not reported again"


def test_the_length_of_a_lost_sample_is_not_known_and_a_group_with_one_teaches_nothing():
    buffer = RequestBuffer(order="history")
    for group in ("e0-0", "e0-1"):
        buffer.add(group, [f"{group}/{member}" for member in range(4)], 5, 100)
    buffer.dispatch([0])
    buffer.finish({f"e0-0/{member}": 10 for member in range(3)})
    buffer.finish({"e0-0/3": 0}, lost=True)
    buffer.finish({f"e0-1/{member}": 20 for member in range(4)})
    assert buffer.take_metrics()["rollout/length_error_mean"] == 0, "of those whose length is known"
    for group in ("e0-0", "e0-1"):
        buffer.remove(group)
    buffer.history.end_step()
    assert not buffer.history.of("0") and list(buffer.history.of("1")) == [20] * 4


@pytest.mark.parametrize("max_requests", [None, 40])
def test_what_an_event_costs_does_not_grow_with_the_requests_under_way(max_requests):
    small, large = (_visits_per_event(num_groups, max_requests) for num_groups in (64, 1024))
    assert large < 2 * small, (small, large)


def _visits_per_event(num_groups, max_requests):
    """Lines of the buffer's code that run for one chunk's end and the dispatch upon it; groups of 16."""
    buffer = RequestBuffer()
    for number in range(num_groups):
        buffer.add(f"g{number}", [f"g{number}/{member}" for member in range(16)], 10, 100)
    buffer.dispatch(range(8), max_requests and EngineRoom(max_requests))
    visits = 0

    def count(frame, event, _):
        nonlocal visits
        visits += event == "line" and frame.f_code.co_filename == buffer_module.__file__
        return count

    running = buffer.of("running")[:50]
    sys.settrace(count)
    try:
        for entry in running:
            _suspend(buffer, entry.engine, entry.id, 4, "", (0, 0), 0)
            buffer.dispatch(range(8), max_requests and EngineRoom(max_requests))
    finally:
        sys.settrace(None)
    return visits / len(running)


def test_kv_of_an_engine_that_has_died_is_neither_looked_for_nor_forgotten_there():
    buffer = RequestBuffer()
    buffer.add("g", ["g/0", "g/1", "g/2"], 3, 100)
    for engine in range(2):
        buffer.dispatch([engine], EngineRoom(1))
    for engine, id in enumerate(("g/0", "g/1")):
        _suspend(buffer, engine, id, 4, f"{id}~4", (0, 0), 0)
    buffer.dispatch([2], EngineRoom(1))  # leaves KV at engine 0
    assert buffer.entries["g/0"].engine == 2
    buffer.forget_kv(0)
    assert not buffer.take_left_kv() and buffer.entries["g/1"].kv == (1, 0)
    buffer.forget_kv(1)
    assert buffer.entries["g/1"].kv is None
    assert [entry.id for entry in buffer.dispatch([1], EngineRoom(2))[1]] == ["g/1", "g/2"]

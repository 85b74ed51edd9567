"""The invariants of `fusion.rollout.kv_pool.pool`, under random events."""

from __future__ import annotations

import time

import hypothesis.strategies as st
from hypothesis import given, settings

from fusion.rollout.kv_pool.pool import PoolPlan, Remove, Spill, Write

IDS = st.sampled_from("abcdefgh")
EVENTS = st.one_of(
    st.tuples(st.just("park"), IDS, st.integers(1, 9)),
    st.tuples(st.just("forget"), st.lists(IDS, max_size=3), st.just(0)),
    st.tuples(st.just("gone"), IDS, st.just(0)),
    st.tuples(st.just("full"), IDS, st.just(0)),
    st.tuples(st.just("clear"), st.just(""), st.just(0)),
)
LIMIT = st.none() | st.integers(0, 20)


def num_entries(plan: PoolPlan) -> int:
    return sum(map(len, plan._entries.values()))


class PlainFiles:
    """Executes commands on lists, oldest first."""

    def __init__(self):
        self.held = {"memory": [], "disk": []}
        self.sizes = {}

    def execute(self, commands, parked=None, nbytes=0):
        evicted = []
        for command in commands:
            match command:
                case Write(id, place):
                    assert id == parked and not any(id in ids for ids in self.held.values())
                    self.held[place].append(id)
                    self.sizes[id] = nbytes
                case Spill(id):
                    assert id == self.held["memory"][0], "what was parked longest ago"
                    self.held["memory"].remove(id)
                    self.held["disk"].append(id)
                case Remove(id, place, was_evicted):
                    assert not was_evicted or id == self.held[place][0]
                    self.held[place].remove(id)
                    evicted += [id] * was_evicted
        return evicted

    def bytes_in(self, place):
        return sum(self.sizes[id] for id in self.held[place])


@settings(max_examples=200)
@given(LIMIT, LIMIT, st.lists(EVENTS, max_size=40))
def test_limits_hold_and_what_is_parked_stays_until_there_is_a_reason(max_memory, max_disk, events):
    plan, files = PoolPlan(max_memory, max_disk), PlainFiles()
    limits = {"memory": max_memory, "disk": max_disk}
    for event, which, nbytes in events:
        before = {place: list(ids) for place, ids in files.held.items()}
        match event:
            case "park":
                commands = plan.park(which, nbytes)
                evicted = files.execute(commands, which, nbytes)
                fits = [place for place in limits if limits[place] is None or nbytes <= limits[place]]
                assert plan.place_of(which) == (fits[0] if fits else None)
                others = {id for ids in before.values() for id in ids} - {which}
                assert {id for ids in files.held.values() for id in ids} - {which} == others - {*evicted}
                if evicted:
                    assert files.bytes_in("disk") + files.bytes_in("memory") + sum(
                        files.sizes[id] for id in evicted
                    ) > min(limit for limit in limits.values() if limit is not None), "not before a limit requires it"
            case "forget":
                files.execute(plan.forget(which))
                assert not any(plan.place_of(id) for id in which)
            case "gone" if plan.place_of(which):
                files.held[plan.place_of(which)].remove(which)
                plan.observe_gone(which)
            case "full" if plan.place_of(which):
                place = plan.place_of(which)
                files.held[place].remove(which)
                plan.observe_full(which)
                limits[place] = files.bytes_in(place)
            case "clear":
                files.execute(plan.clear())
                limits = {"memory": max_memory, "disk": max_disk}
                assert not num_entries(plan)
        for place, ids in files.held.items():
            assert plan.held[place] == files.bytes_in(place)
            assert limits[place] is None or files.bytes_in(place) <= limits[place]
            assert all(plan.place_of(id) == place for id in ids)
        assert num_entries(plan) == sum(map(len, files.held.values()))


def test_what_exceeds_memory_goes_to_disk_and_from_there_out():
    plan = PoolPlan(10, 10)
    assert plan.park("a", 6) == [Write("a", "memory")]
    assert plan.park("b", 6) == [Spill("a"), Write("b", "memory")]
    assert plan.park("c", 6) == [Remove("a", "disk", evicted=True), Spill("b"), Write("c", "memory")]
    assert plan.forget(["b", "x"]) == [Remove("b", "disk")]
    assert plan.park("d", 11) == [], "it fits nowhere"
    assert plan.park("c", 3) == [Remove("c", "memory"), Write("c", "memory")]


def test_an_event_costs_the_same_however_much_is_parked():
    def seconds_of(count):
        plan = PoolPlan(count)
        for number in range(count):
            plan.park(str(number), 1)
        began = time.perf_counter()
        for number in range(count, count + 2000):
            plan.park(str(number), 1)
        return time.perf_counter() - began

    assert seconds_of(100_000) < 10 * min(seconds_of(1000) for _ in range(3))

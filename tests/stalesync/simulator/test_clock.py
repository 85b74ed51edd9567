"""The invariants of `stalesync.simulator.clock`."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.simulator.clock import Clock

TIMES = st.lists(st.floats(0, 100, allow_nan=False), max_size=20)


@given(TIMES, TIMES)
def test_time_never_decreases_and_every_event_is_executed_once_at_its_time(times, delays):
    clock, seen, added = Clock(), [], []

    def add(time, number):
        due = max(time, clock.now)
        added.append(number)
        clock.at(time, lambda: seen.append((clock.now, number, due)))

    for number, time in enumerate(times):
        add(time, number)
    # Events add others, also some for times that are past.
    for number, delay in enumerate(delays):
        clock.at(delay, lambda number=number, delay=delay: add(delay - 3, 1000 + number))
    before = 0.0
    while clock.step():
        assert clock.now >= before
        before = clock.now
    assert sorted(number for _, number, _ in seen) == sorted(added)
    assert all(now == due for now, _, due in seen)


@given(TIMES)
def test_advancing_executes_what_is_due_and_nothing_else(times):
    clock, seen = Clock(), []
    for time in times:
        clock.at(time, lambda time=time: seen.append(time))
    clock.advance_to(50.0)
    assert clock.now == 50.0 and seen == sorted(time for time in times if time <= 50.0)
    clock.advance_to(20.0)
    assert clock.now == 50.0


def test_a_wait_for_what_never_happens_is_noticed():
    with pytest.raises(AssertionError, match="nothing happens"):
        Clock().wait_for(lambda: False)

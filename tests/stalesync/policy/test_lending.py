"""The invariants of `stalesync.policy.lending`, over tails and returns of random lengths."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalesync.policy.lending import GAIN, LENDING_TAIL, PART, Lending

SAMPLES, GROUPS, SLOTS = 100, 25, 16
seconds = st.floats(0.0, 100.0, allow_nan=False)
moment = st.tuples(st.integers(0, SAMPLES), st.integers(0, GROUPS), st.integers(0, 3), seconds)
"""Requests, ready groups, running engines that share no card with the trainer, and how long it lasts"""


@settings(deadline=None)
@given(st.lists(st.tuples(st.lists(moment, max_size=8), seconds, st.integers(0, 20)), max_size=12))
def test_cards_return_once_in_a_tail_that_is_longer_than_the_return_to_engines_that_can_take_all(steps):
    lending, tails, returns, lent = Lending(generates=True, engine_slots=SLOTS, step_samples=SAMPLES), [], [], False
    for moments, return_s, interrupted in steps:
        lending.begin_generation()
        in_tail, tail_s, lent_s, returned = False, 0.0, 0.0, False
        for number, (requests, ready, others, lasts_s) in enumerate(moments):
            if number == interrupted:
                assert lending.interrupt() == pytest.approx(lent_s)
                in_tail, lent_s, returned = False, 0.0, False
            in_tail |= requests <= LENDING_TAIL * SAMPLES
            assert lending.observe_requests(requests) == in_tail
            if in_tail and not returned:
                asked = ready >= PART * GROUPS and requests <= SLOTS * others
                pays = bool(tails and returns) and _mean(tails) > _mean(returns) * (1 if lent else GAIN)
                returned = lending.returns(ready, GROUPS, num_requests=requests, num_others=others)
                assert returned == (asked and pays)
                lent = pays if asked else lent
            lending.observe_seconds(lasts_s)
            tail_s += lasts_s * in_tail
            lent_s += lasts_s * returned
        assert lending.end_generation() == pytest.approx(lent_s)
        if interrupted >= len(moments):
            tails.append(tail_s)
        returns.append(return_s)
        lending.observe_return(return_s)


def _mean(figures):
    """The newest counts 0.3, those before it 0.3 of the rest, and so on; the first one all that is left."""
    mean, *others = figures
    for figure in others:
        mean = 0.7 * mean + 0.3 * figure
    return mean


@given(st.integers(0, SAMPLES), st.integers(0, GROUPS), seconds)
def test_cards_that_only_train_accumulate_as_soon_as_a_part_is_ready(requests, ready, lasts_s):
    lending = Lending(generates=False, engine_slots=1, step_samples=SAMPLES)
    lending.begin_generation()
    assert lending.observe_requests(requests)
    assert lending.returns(ready, GROUPS, num_requests=requests, num_others=0) == (ready >= PART * GROUPS)
    assert lending.has_part(ready, GROUPS) == (ready >= PART * GROUPS)
    lending.observe_seconds(lasts_s)
    assert lending.end_generation() == 0.0, "they are not lent"


def test_a_short_tail_ends_lending_and_one_a_little_longer_than_the_return_does_not_begin_it():
    def decided(tail_s):
        lending.begin_generation()
        lending.observe_requests(0)
        lends = lending.returns(GROUPS, GROUPS, num_requests=0, num_others=1)
        lending.observe_seconds(tail_s)
        lending.end_generation()
        lending.observe_return(1.0)
        return lends

    lending = Lending(generates=True, engine_slots=SLOTS, step_samples=SAMPLES)
    assert [decided(1.5) for _ in range(30)] == [False] * 30
    assert [decided(9.0) for _ in range(3)] == [False, True, True]
    assert [decided(1.5) for _ in range(30)] == [True] * 30
    assert not any([decided(0.5) for _ in range(30)][20:])


def test_the_smallest_step_has_parts_of_one_group():
    assert Lending.has_part(1, 1) and not Lending.has_part(0, 1) and Lending.has_part(1, 20)


def test_the_decision_loads_neither_ray_nor_torch():
    code = "import sys, stalesync.policy.lending; print(sorted({'ray', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""The invariants of `stalesync.policy.staleness`, under a random scheduler."""

import copy
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalesync.policy.staleness import StalenessLedger
from tests.stalesync.plain_ledger import plain_enough, plain_may_advance, plain_ready


@settings(max_examples=40)
@given(st.integers(0, 3), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_random_schedule_keeps_the_bound_and_loses_nothing(max_staleness, groups_per_step, random):
    ledger = StalenessLedger(max_staleness, groups_per_step)
    admitted = 0
    for _ in range(120):
        actions = []
        if ledger.may_admit:
            actions.append("admit")
        if ledger.in_flight:
            actions += ["finish", "fail"]
        if ledger.ready():
            actions += ["train", "filter"]
        if ledger.may_advance and (ledger.trained_now or random.random() < 0.2):
            actions.append("advance")
        assert actions, "deadlock"
        match random.choice(actions):
            case "admit":
                ledger.admit([f"g{admitted}"])
                admitted += 1
            case "finish":
                ledger.finish(random.choice(list(ledger.in_flight)))
            case "fail":
                ledger.fail(random.choice(list(ledger.in_flight)), "reward_raised")
            case "filter":
                ledger.filter(random.choice(list(ledger.finished)), "no_variance")
            case "train":
                ledger.train(ledger.ready()[: random.randint(1, groups_per_step)])
            case "advance":
                ledger.advance()
        _check_answers(ledger)
        assert max(ledger.ages, default=0) <= max_staleness
        assert sum(ledger.ended.values()) + len(ledger.in_flight) + len(ledger.finished) == admitted


@settings(max_examples=60)
@given(st.integers(1, 3), st.integers(1, 6), st.integers(1, 40), st.randoms(use_true_random=False))
def test_steps_of_so_many_tokens_keep_the_bound_and_are_no_larger_than_they_must_be(bound, most, threshold, random):
    ledger = StalenessLedger(bound, most, threshold)
    admitted, sizes = 0, []
    longest = random.choice([2, 10, 60])
    for _ in range(150):
        assert (ledger.may_admit > 0) or ledger.in_flight or ledger.finished, "deadlock"
        if (count := ledger.may_admit) and random.random() < 0.6:
            groups = [f"g{admitted + k}" for k in range(random.randint(1, count))]
            ledger.admit(groups)
            admitted += len(groups)
        elif chosen := ledger.enough():
            _check_minimal(ledger, chosen)
            ledger.train(chosen)
            sizes.append(len(chosen))
            ledger.advance()
        elif ledger.in_flight:
            group = random.choice(list(ledger.in_flight))
            ledger.fail(group, "raised") if random.random() < 0.1 else ledger.finish(group, random.randint(1, longest))
        elif ready := ledger.ready():  # the run has no more prompts: what is there is trained
            ledger.train(ready)
            ledger.advance()
        ledger = _through_json(ledger)
        _check_answers(ledger)
        assert max(ledger.ages, default=0) <= bound and max(sizes, default=0) <= most
        assert sum(ledger.ended.values()) + len(ledger.in_flight) + len(ledger.finished) == admitted
        assert ledger.tokens.keys() == ledger.finished.keys()


def _check_answers(ledger):
    assert ledger.ready() == plain_ready(ledger) and ledger.num_ready == len(ledger.ready())
    assert ledger.enough() == plain_enough(ledger) and ledger.is_enough == bool(ledger.enough())
    assert ledger.may_advance == plain_may_advance(ledger)


def _check_minimal(ledger, chosen):
    assert chosen == ledger.ready()[: len(chosen)], "the oldest first"
    held = sum(ledger.tokens[group] for group in chosen)
    assert held >= ledger.tokens_per_step or len(chosen) == ledger.groups_per_step
    fewer = copy.deepcopy(ledger)
    fewer.train(chosen[:-1])
    lacks = held - ledger.tokens[chosen[-1]] < ledger.tokens_per_step
    assert lacks or not fewer.may_advance, "smaller would have done"
    fewer.train(chosen[-1:])
    assert fewer.may_advance


def _through_json(ledger):
    again = StalenessLedger(ledger.max_staleness, ledger.groups_per_step, ledger.tokens_per_step)
    again.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    return again


@pytest.mark.parametrize("bound", [1, 2])
def test_where_groups_hold_what_a_quarter_of_a_step_needs_steps_are_of_four(bound):
    ledger, sizes = StalenessLedger(bound, 16, 100), []
    for version in range(8):
        ledger.admit([f"{version}-{k}" for k in range(ledger.may_admit)])
        while not (chosen := ledger.enough()):
            ledger.finish(next(iter(ledger.in_flight)), 25)
        sizes.append(len(chosen))
        ledger.train(chosen)
        ledger.advance()
    assert sizes[0] == 16, "of whose lengths nothing is known yet"
    assert sizes[-4:] == [4] * 4 and ledger.expected_groups == 4


def test_older_groups_make_a_step_larger_than_its_tokens_ask_for():
    ledger = StalenessLedger(1, 3, 10)
    ledger.admit([f"g{k}" for k in range(6)])
    ledger.finish("g0", 10)
    assert ledger.enough() == [] and ledger.waits_for_older, "five would be left for three places"
    ledger.finish("g1", 10)
    assert ledger.enough() == []
    ledger.finish("g2", 10)
    assert ledger.enough() == ["g0", "g1", "g2"] and not ledger.waits_for_older


def test_at_zero_a_version_admits_its_own_batch_and_waits_for_all_of_it():
    ledger = StalenessLedger(0, 3)
    assert ledger.may_admit == 3
    ledger.admit(["a", "b", "c"])
    assert ledger.may_admit == 0
    for group in ("a", "b"):
        ledger.finish(group)
    ledger.train(["a", "b"])
    assert not ledger.may_advance and ledger.may_admit == 0
    ledger.fail("c", "timeout")
    assert ledger.may_admit == 1, "a failed group gives its place back"
    assert ledger.advance() == 1
    assert ledger.may_admit == 3
    assert dict(ledger.ended) == {"trained": 2, "failed:timeout": 1} and dict(ledger.ages) == {0: 2}


def test_a_group_is_not_trained_twice_nor_past_its_age():
    ledger = StalenessLedger(1, 1)
    ledger.admit(["a", "b"])
    ledger.finish("a")
    ledger.train(["a"])
    with pytest.raises(KeyError):
        ledger.train(["a"])
    ledger.advance()
    assert not ledger.may_advance, "b would be two versions old"
    ledger.finish("b")
    assert ledger.lag("b") == 1, "it was admitted one version before this one"
    ledger.train(ledger.ready())
    assert ledger.ages[1] == 1


def test_both_gates_close_exactly_where_a_group_could_no_longer_be_trained_in_time():
    ledger = StalenessLedger(1, 1)
    ledger.admit(["a", "b"])
    assert not ledger.may_advance, "one place a version: a and b would both need the last one"
    ledger.finish("a")
    ledger.train(ledger.ready())
    ledger.advance()
    ledger.admit(["c"])
    ledger.finish("c")
    assert ledger.ready() == [], "the only place left is b's, though c is done first"
    ledger.finish("b")
    assert ledger.ready() == ["b"]


def test_the_next_groups_are_expected_in_the_versions_that_have_places_for_them():
    ledger = StalenessLedger(1, 3)
    assert ledger.next_steps(6) == [0, 0, 0, 1, 1, 1]
    ledger.admit("abcdef")
    for group in "abc":
        ledger.finish(group)
    ledger.train("abc")
    ledger.advance()
    assert ledger.next_steps(3) == [2, 2, 2]
    ledger.fail("d", "reward_raised")
    assert ledger.next_steps(3) == [1, 2, 2], "the first one takes the place of the failed one"

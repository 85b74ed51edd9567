"""The invariants of `stalesync.staleness`, under a random scheduler."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stalesync.staleness import StalenessLedger


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3), st.integers(1, 5), st.randoms(use_true_random=False))
def test_a_random_schedule_keeps_the_bound_and_loses_nothing(max_staleness, groups_per_step, random):
    ledger = StalenessLedger(max_staleness, groups_per_step)
    admitted = 0
    for _ in range(120):
        actions = []
        if ledger.may_admit():
            actions.append("admit")
        if ledger.in_flight:
            actions += ["finish", "fail"]
        if ledger.ready():
            actions += ["train", "filter"]
        if ledger.may_advance() and (ledger.trained_now or random.random() < 0.2):
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
        assert max(ledger.ages, default=0) <= max_staleness
        assert sum(ledger.ended.values()) + len(ledger.in_flight) + len(ledger.finished) == admitted


def test_at_zero_a_version_admits_its_own_batch_and_waits_for_all_of_it():
    ledger = StalenessLedger(0, 3)
    assert ledger.may_admit() == 3
    ledger.admit(["a", "b", "c"])
    assert ledger.may_admit() == 0
    for group in ("a", "b"):
        ledger.finish(group)
    ledger.train(["a", "b"])
    assert not ledger.may_advance() and ledger.may_admit() == 0
    ledger.fail("c", "timeout")
    assert ledger.may_admit() == 1, "a failed group gives its place back"
    assert ledger.advance() == 1
    assert ledger.may_admit() == 3
    assert dict(ledger.ended) == {"trained": 2, "failed:timeout": 1} and dict(ledger.ages) == {0: 2}


def test_a_group_is_not_trained_twice_nor_past_its_age():
    ledger = StalenessLedger(1, 1)
    ledger.admit(["a", "b"])
    ledger.finish("a")
    ledger.train(["a"])
    with pytest.raises(KeyError):
        ledger.train(["a"])
    ledger.advance()
    assert not ledger.may_advance(), "b would be two versions old"
    ledger.finish("b")
    ledger.train(ledger.ready())
    assert ledger.ages[1] == 1


def test_both_gates_close_exactly_where_a_group_could_no_longer_be_trained_in_time():
    ledger = StalenessLedger(1, 1)
    ledger.admit(["a", "b"])
    assert not ledger.may_advance(), "one place a version: a and b would both need the last one"
    ledger.finish("a")
    ledger.train(ledger.ready())
    ledger.advance()
    ledger.admit(["c"])
    ledger.finish("c")
    assert ledger.ready() == [], "the only place left is b's, though c is done first"
    ledger.finish("b")
    assert ledger.ready() == ["b"]

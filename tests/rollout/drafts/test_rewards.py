"""The invariants of `fusion.rollout.drafts.rewards`."""

from hypothesis import given
from hypothesis import strategies as st

from fusion.rollout.drafts.rewards import MAX_WEIGHT, NEUTRAL, reward_by_request, weights_of

REWARDS = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), max_size=8)


@given(REWARDS)
def test_a_better_rewarded_response_has_no_smaller_weight(rewards):
    weights = weights_of(rewards)
    assert len(weights) == len(rewards) and all(1 <= weight <= MAX_WEIGHT for weight in weights)
    known = sorted((reward, weight) for reward, weight in zip(rewards, weights, strict=True) if reward is not None)
    assert [weight for _, weight in known] == sorted(weight for _, weight in known)
    assert all(weight == NEUTRAL for reward, weight in zip(rewards, weights, strict=True) if reward is None)
    if not known or known[0][0] == known[-1][0]:
        assert {*weights} <= {NEUTRAL}
    elif known[-1][0] / 2 > known[0][0] / 2:  # further apart than the smallest float
        assert (known[0][1], known[-1][1]) == (1, MAX_WEIGHT)


@given(st.lists(st.none() | st.floats(-100, 100, width=16), max_size=8), st.integers(-8, 8))
def test_the_unit_of_rewards_does_not_matter(rewards, exponent):
    scaled = [None if reward is None else reward * 2.0**exponent for reward in rewards]
    assert weights_of(scaled) == weights_of(rewards)


def test_right_and_wrong_answers():
    assert weights_of([0.0, 1.0, None, 0.0]) == [1, 4, 2, 1]
    assert weights_of([1.0, 1.0]) == weights_of([None, None]) == [2, 2]
    assert reward_by_request(("e0-3", (0.5, None))) == {"e0-3/0": 0.5, "e0-3/1": None}

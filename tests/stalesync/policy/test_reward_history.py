"""The invariants of `stalesync.policy.reward_history`."""

import json
import math

import hypothesis.strategies as st
from hypothesis import given

from fusion.inference.request import NO_REWARDS
from stalesync.policy.reward_history import RewardHistory

GROUPS = st.tuples(st.integers(0, 3), st.sampled_from("abcdef"))
"""Epoch and row"""
REWARDS = st.lists(st.none() | st.floats(), min_size=1, max_size=12)


@given(st.lists(st.tuples(GROUPS, REWARDS), max_size=30), st.integers(1, 6), st.randoms())
def test_a_row_has_the_rewards_of_its_last_group_and_the_oldest_rows_are_dropped(groups, max_rows, draw):
    history, last = RewardHistory(max_rows), {}
    for (epoch, row), rewards in groups:
        group = f"e{epoch}-{row}"
        items = [(f"{group}/{number}", reward) for number, reward in enumerate(rewards)]
        draw.shuffle(items)
        history.observe(dict(items))
        last[row] = group, tuple(r if r is not None and math.isfinite(r) else None for r in rewards)
    newest = list(dict.fromkeys(row for (_, row), _ in reversed(groups)))[:max_rows]
    for row in "abcdef":
        assert history.of(f"e9-{row}") == (last[row] if row in newest else NO_REWARDS)
        if row in newest:
            assert history.of(last[row][0]) == NO_REWARDS, "its own rewards tell a group nothing"
    again = RewardHistory(max_rows)
    again.load_state_dict(json.loads(json.dumps(history.state_dict(), allow_nan=False)))
    for one in (again, history):
        one.observe({"e0-z/0": 1.0})
    assert json.dumps(again.state_dict()) == json.dumps(history.state_dict()), "and drops the same row next"

"""The invariants of `fusion.rollout.length_history`."""

import json

import hypothesis.strategies as st
from hypothesis import given

from fusion.rollout.length_history import LengthHistory

ROWS = st.sampled_from("abcdef")
LENGTHS = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4)


@given(st.lists(st.tuples(ROWS, LENGTHS), max_size=30), st.integers(1, 6))
def test_a_row_has_the_lengths_of_its_last_group_and_the_oldest_rows_are_dropped(groups, max_rows):
    history = LengthHistory(max_rows)
    for row, lengths in groups:
        history.observe(row, lengths)
    newest = list(dict.fromkeys(row for row, _ in reversed(groups)))[:max_rows]
    last = dict(groups)
    assert {row: list(history.of(row)) for row in "abcdef"} == {
        row: last[row] if row in newest else [] for row in "abcdef"
    }
    again = LengthHistory(max_rows)
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    again.observe("z", [1])
    history.observe("z", [1])
    assert again.state_dict() == history.state_dict(), "and drops the same row next"
    assert list(again.state_dict()) == list(history.state_dict())

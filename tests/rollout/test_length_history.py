"""The invariants of `fusion.rollout.length_history`."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fusion.rollout.length_history import HALF_LIFE, MIN_RESPONSES, LengthHistory

ROWS = st.sampled_from("abcdef")
LENGTHS = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=8)


@given(st.lists(st.tuples(ROWS, LENGTHS), max_size=30), st.integers(0, 6))
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
    assert list(again.state_dict()["rows"]) == list(history.state_dict()["rows"])
    assert again.runaway_share == history.runaway_share


@given(st.lists(LENGTHS, max_size=20), st.integers(0, HALF_LIFE))
def test_the_share_of_runaways_is_that_of_all_groups_by_age(groups, others):
    history = LengthHistory(0)
    groups = [[100] * MIN_RESPONSES, *groups, *[[1]] * others]
    for lengths in groups:
        history.observe("r", lengths)
    weights = [0.5 ** (age / HALF_LIFE) for age in reversed(range(len(groups)))]
    medians = [sorted(lengths)[len(lengths) // 2] if len(lengths) > 3 else float("inf") for lengths in groups]
    runaways = [sum(one > 4 * median for one in lengths) for lengths, median in zip(groups, medians, strict=True)]
    counted = sum(weight * len(lengths) for weight, lengths in zip(weights, groups, strict=True))
    share = sum(weight * count for weight, count in zip(weights, runaways, strict=True)) / max(counted, MIN_RESPONSES)
    assert history.runaway_share == pytest.approx(share)


def test_a_history_of_an_earlier_format_is_read():
    history = LengthHistory()
    history.load_state_dict({"3": [4, 5]})
    assert list(history.of("3")) == [4, 5] and history.runaway_share == 0

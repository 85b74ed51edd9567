"""The invariants of `fusion.rollout.length_history`."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fusion.rollout.length_history import HALF_LIFE, MIN_RESPONSES, LengthHistory

ROWS = st.sampled_from("abcdef")
LENGTHS = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=8)


def record(history, groups, random=None):
    """Ends a step of these groups, in any order."""
    order = [*enumerate(groups)]
    if random:
        random.shuffle(order)
    for position, (row, lengths) in order:
        history.observe(position, row, lengths)
    history.end_step()


@given(
    st.lists(st.lists(st.tuples(ROWS, LENGTHS), max_size=8), max_size=5),
    st.integers(0, 6),
    st.randoms(use_true_random=False),
)
def test_a_row_has_the_lengths_of_its_last_group_and_the_oldest_rows_are_dropped(steps, max_rows, random):
    history, plain = LengthHistory(max_rows), LengthHistory(max_rows)
    for groups in steps:
        record(history, groups, random)
        record(plain, groups)
    assert history.state_dict() == plain.state_dict(), "whichever ends first"
    groups = [group for step in steps for group in step]
    newest = list(dict.fromkeys(row for row, _ in reversed(groups)))[:max_rows]
    last = dict(groups)
    assert {row: list(history.of(row)) for row in "abcdef"} == {
        row: last[row] if row in newest else [] for row in "abcdef"
    }
    again = LengthHistory(max_rows)
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    record(again, [("z", [1])])
    record(history, [("z", [1])])
    assert again.state_dict() == history.state_dict(), "and drops the same row next"
    assert list(again.state_dict()["rows"]) == list(history.state_dict()["rows"])
    assert again.runaway_share == history.runaway_share


def test_what_has_ended_is_known_from_the_next_step_on():
    history = LengthHistory()
    history.observe(0, "a", [5])
    assert not history.of("a") and history.runaway_share == 0
    history.end_step()
    assert list(history.of("a")) == [5]


def test_a_group_that_has_ended_since_the_last_step_is_part_of_the_state():
    history, again = LengthHistory(), LengthHistory()
    record(history, [("a", [1])])
    for position, row, length in ((7, "b", 3), (5, "b", 2)):
        history.observe(position, row, [length])
    again.load_state_dict(json.loads(json.dumps(history.state_dict())))
    for one in (history, again):
        one.observe(0 if one is again else 9, "a", [4])  # a resumed run counts positions from 0 again
        one.end_step()
    assert again.state_dict() == history.state_dict() and list(again.of("b")) == [3] and list(again.of("a")) == [4]


@given(st.lists(LENGTHS, max_size=20), st.integers(0, HALF_LIFE))
def test_the_share_of_runaways_is_that_of_all_groups_by_age(groups, others):
    history = LengthHistory(0)
    groups = [[100] * MIN_RESPONSES, *groups, *[[1]] * others]
    record(history, [("r", lengths) for lengths in groups])
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

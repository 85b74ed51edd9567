"""Where simulated lengths come from."""

from __future__ import annotations

import json

import pytest

from stalesync.prompts.lengths import ForcedLengths
from stalesync.simulator.lengths import DrawnLengths, TraceLengths


def test_drawn_lengths_are_those_of_a_run_and_do_not_depend_on_how_many_are_asked_for():
    forced = ForcedLengths(3, 100.0, 4000)
    one, other = DrawnLengths(forced, 4, 7), DrawnLengths(forced, 4, 7)
    together = one.next(6)
    assert together == other.next(2) + other.next(4)
    assert all(prompt.response_tokens == forced.of_members(prompt.group, range(4)) for prompt in together)


def test_the_spread_is_what_is_asked_for():
    alike = ForcedLengths(0, 100.0, 4000, (0.0, 0.0, 0.0))
    assert alike.of_groups(["a", "b"], range(3)) == [[100] * 3] * 2
    runaways = ForcedLengths(0, 100.0, 4000, (0.0, 0.0, 0.5))
    lengths = [one for own in runaways.of_groups([f"g{n}" for n in range(200)], range(4)) for one in own]
    assert {*lengths} == {100, 4000} and 0.4 < lengths.count(4000) / len(lengths) < 0.6


def written(tmp_path, *rows):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_a_trace_is_read_in_order_and_repeated_under_other_names(tmp_path):
    path = written(
        tmp_path,
        {"step": 1, "group": "a", "ended": "trained", "prompt_tokens": 3, "response_tokens": [5, 900]},
        {"step": 1, "group": "b", "ended": "failed:lost"},
        {"group": "c", "response_tokens": [7, 8]},
    )
    trace = TraceLengths.read(path, prompt_tokens=11, max_response_tokens=100)
    taken = trace.next(3)
    assert [(one.group, one.prompt_tokens, one.response_tokens) for one in taken] == [
        ("a", 3, [5, 100]),
        ("c", 11, [7, 8]),
        ("a~1", 3, [5, 100]),
    ]
    assert trace.group_size == 2


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (["no JSON"], "line 1: expected a JSON object with group and response_tokens"),
        (["[]"], "line 1: expected a JSON object"),
        ([{"group": "a", "response_tokens": [1]}, {"group": "b", "response_tokens": "12"}], "line 2: expected a JSON"),
        ([{"group": "a", "response_tokens": [0]}], "line 1: expected a JSON object"),
        (
            [{"group": "a", "response_tokens": [1]}, {"group": "b", "response_tokens": [1, 2]}],
            "line 2: has 2 responses",
        ),
        ([{"group": "a", "ended": "trained"}], "no line has response_tokens"),
    ],
)
def test_a_trace_that_is_not_one_is_refused_with_its_line(rows, error, tmp_path):
    with pytest.raises(ValueError, match=error):
        TraceLengths.read(written(tmp_path, *rows), prompt_tokens=1, max_response_tokens=9)


def test_a_trace_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        TraceLengths.read(tmp_path / "none", prompt_tokens=1, max_response_tokens=9)

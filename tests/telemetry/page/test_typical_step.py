"""A typical step: which one it is, and that its lanes hold all time of all cards."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry.page.typical_step import PIECES, aligned, is_bubble, typical_step
from fusion.telemetry.timeline import Span
from tests.telemetry.page.runs import activities

KINDS = ["prefill", "decode", "train", "optimizer", "switch/reshard", "wait_data", "wait_weights"]


def spans_of(card, kinds, lengths, gap=0):
    now, spans = 0, []
    for kind, length in zip(kinds, lengths, strict=True):
        spans.append(Span(card, kind, kind, now, now + length))
        now += length + gap
    return spans


@given(
    cards=st.lists(
        st.lists(st.tuples(st.sampled_from(KINDS), st.integers(1, 10**10)), min_size=1, max_size=20),
        min_size=1,
        max_size=4,
    ),
    gap=st.integers(0, 10**9),
    updates=st.integers(1, 2),
)
def test_invariants(cards, gap, updates):
    spans = [
        span
        for index, card in enumerate(cards)
        for span in spans_of(f"card {index}", [kind for kind, _ in card], [length for _, length in card], gap)
    ]
    drawn = typical_step(spans, updates)
    if drawn is None:
        counts = [sum(kind == "optimizer" for kind, _ in card) for card in cards]
        assert min(filter(None, counts), default=0) < 2 * updates
        return
    assert sum(lane["cards"] for lane in drawn["lanes"]) == len(cards)
    bubbles = 0.0
    for lane in drawn["lanes"]:
        assert len(lane["us"]) == len(lane["parts"]) <= PIECES and sum(lane["us"]) == drawn["us"]
        for us, parts in zip(lane["us"], lane["parts"], strict=True):
            assert sum(share for _, share in parts) == pytest.approx(1, abs=1e-3)
            bubbles += lane["cards"] * us * sum(share for kind, share in parts if is_bubble(kind))
    if drawn["us"] > 10**6:
        assert drawn["bubble"] == pytest.approx(bubbles / drawn["us"] / len(cards), abs=2e-3)


def test_the_typical_step_is_the_median_and_its_lanes_are_by_what_cards_do():
    train = ["train", "optimizer"] * 4
    spans = spans_of("card 0", train, [10, 1, 10, 1, 30, 1, 20, 1])
    spans += spans_of("card 1", ["decode", "wait_data"] * 4, [5, 6, 5, 6, 5, 26, 5, 16])
    drawn = typical_step(spans)
    assert drawn["lanes"][0]["role"] == "train" and drawn["lanes"][1]["role"] == "generate"
    assert drawn["bubble"] == pytest.approx(16 / 42), "of the steps of 11, 31 and 21 ns the last one"
    assert typical_step(spans, updates=4) is None and typical_step(spans[8:]) is None


def test_lanes_of_several_runs_are_on_one_axis():
    runs = [
        {
            "name": name,
            "typical": typical_step([span for card in range(2) for span in activities(f"card {card}", steps)]),
        }
        for name, steps in (("one", 8), ("other", 3))
    ]
    drawn = aligned([*runs, {"name": "without", "typical": None}])
    assert [strip["card"] for strip in drawn["strips"]] == ["one: 2 train and generate", "other: 2 train and generate"]
    assert drawn["wall_us"] == max(run["typical"]["us"] for run in runs)
    assert aligned([{"name": "without", "typical": None}]) is None

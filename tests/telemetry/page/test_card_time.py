from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry import Span, summarize
from fusion.telemetry.page import card_time as module
from fusion.telemetry.page.card_time import card_time
from fusion.telemetry.timeline import natural, starts_of
from tests.telemetry.page.runs import activities

times = st.tuples(st.integers(0, 10**10), st.integers(0, 10**9))
spans = st.lists(
    st.tuples(st.sampled_from(["card 0", "card 1"]), st.sampled_from(["gen", "train", "switch/kv", "prepare"]), times),
    min_size=1,
    max_size=30,
).map(lambda drawn: [Span(card, kind, kind, start, start + length) for card, kind, (start, length) in drawn])


def seconds_by_kind(drawn, index):
    strip = drawn["strips"][index]
    total = {}
    for kind, us in zip(strip["kind"], strip["us"], strict=True):
        main = drawn["strip_kinds"][kind].partition("/")[0]
        total[main] = total.get(main, 0) + us / 1e6
    return total


@given(spans)
def test_strips_fill_the_run_and_agree_with_the_table(spans):
    drawn = card_time(spans)
    for index, row in enumerate(drawn["table"]):
        by_kind, runs = seconds_by_kind(drawn, index), len(drawn["strips"][index]["us"])
        assert sum(drawn["strips"][index]["us"]) == pytest.approx(drawn["wall_us"], abs=1)
        for kind in {*by_kind, *row["seconds"]} - {"idle"}:
            assert by_kind.get(kind, 0) == pytest.approx(row["seconds"].get(kind, 0), abs=1e-6 * (runs + 1))


@given(spans)
def test_the_table_is_the_summary_of_the_run(spans):
    drawn = card_time(spans)
    expected = Counter()
    for card in (card for start in starts_of(spans) for card in summarize(start)):
        expected[card.card] += card.wall_ns
    assert [row["card"] for row in drawn["table"]] == sorted({span.card for span in spans}, key=natural)
    for row in drawn["table"]:
        assert row["wall_s"] == expected[row["card"]] / 1e9
        assert sum(row["seconds"].values()) == pytest.approx(row["wall_s"])
    if any(expected.values()):
        assert sum(kind["share"] for kind in drawn["kinds"]) == pytest.approx(1)


def test_the_time_between_two_starts_of_a_run_is_nobodys():
    def start(at: int, *more: Span) -> list[Span]:
        there = [
            Span("card 10", "prepare", "prepare", at, at + 5),
            Span("card 2", "prepare", "prepare", at + 1, at + 6),
        ]
        return [*there, *more]

    first = start(0, Span("card 10", "train", "train", 8, 20), Span("card 2", "x", "x", 6, 12))
    second = start(1000, Span("card 10", "train", "train", 1006, 1010))
    drawn = card_time(second + first)
    two, ten = drawn["table"]
    assert (two["card"], ten["card"]) == ("card 2", "card 10")
    assert two["wall_s"] == ten["wall_s"] == pytest.approx(30e-9)
    assert ten["seconds"] == pytest.approx({"idle": 4e-9, "prepare": 10e-9, "train": 16e-9})
    assert two["seconds"] == pytest.approx({"idle": 14e-9, "prepare": 10e-9, "x": 6e-9})


def test_many_spans_become_few_runs_with_the_same_seconds(monkeypatch):
    monkeypatch.setattr(module, "MIN_RUNS", 50)
    spans = activities("card 0", 200) + activities("card 1", 200)
    drawn = card_time(spans, max_runs=200)
    assert all(len(strip["us"]) <= 100 for strip in drawn["strips"]) and drawn["blur_us"] > 0
    exact = card_time(spans)
    assert exact["blur_us"] == 0 and len(exact["strips"][0]["us"]) > 1000
    for index in range(2):
        assert seconds_by_kind(drawn, index) == pytest.approx(seconds_by_kind(exact, index), abs=1e-3)


def test_of_many_cards_the_least_and_the_most_busy_are_drawn():
    spans = [Span(f"card {rank}", "gen", "gen", 0, 10**9 * (rank + 1)) for rank in range(100)]
    drawn = card_time(spans)
    assert drawn["num_cards"] == 100
    assert [strip["card"] for strip in drawn["strips"]] == [f"card {rank}" for rank in (*range(32), *range(68, 100))]
    assert drawn["kinds"][0]["share"] == pytest.approx(0.505), "of all hundred"


def test_starts_of_a_resumed_run_follow_each_other():
    later = [
        span._replace(start_ns=span.start_ns + 10**12, end_ns=span.end_ns + 10**12) for span in activities("card 0", 1)
    ]
    once, both = card_time(activities("card 0", 1)), card_time(activities("card 0", 1) + later)
    assert both["wall_us"] == pytest.approx(2 * once["wall_us"], abs=1) and both["starts_us"] == [once["wall_us"]]
    assert card_time([]) is None

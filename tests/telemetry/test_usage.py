from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry import Span, Usage, summarize

CARDS = ["card 0", "card 1"]
kinds = st.sampled_from(["decode", "switch", "switch/kv", "wait_data"])
spans = st.lists(
    st.builds(
        lambda card, kind, start, length: Span(card, kind, kind, start, start + length),
        st.sampled_from(CARDS),
        kinds,
        st.integers(0, 900),
        st.integers(1, 300),
    ),
    max_size=20,
)


@given(spans, st.lists(st.integers(1, 1200), min_size=1, max_size=4, unique=True))
def test_counts_follow_each_other_and_add_up(recorded, ends):
    usage, ends = Usage(CARDS, 0), [0, *sorted(ends)]
    usage.add(recorded)
    for start, end in pairwise(ends):
        figures = usage.count(end)
        cards = summarize(recorded, start, end, CARDS)
        assert figures.pop("perf/utilisation") == pytest.approx(sum(card.utilisation for card in cards) / 2)
        assert sum(figures.values()) == pytest.approx((end - start) / 1e9), "the wall clock of the mean card"
    assert usage.count(ends[-1]) == {}


@given(spans, st.lists(st.integers(1, 1200), min_size=1, max_size=6, unique=True), st.integers(1, 1200))
def test_what_is_excluded_is_never_counted(recorded, bounds, first_end):
    usage, bounds = Usage(CARDS, 0), sorted(bounds)
    gaps = [*zip(bounds[::2], bounds[1::2], strict=False)]
    usage.add(recorded)
    for start, end in gaps:
        usage.exclude(start, end)
    kept = [instant for instant in range(1201) if not any(start <= instant < end for start, end in gaps)]
    for start, end in ((0, first_end), (first_end, 1200)):
        figures, left = usage.count(end), [instant for instant in kept if start <= instant < end]
        busy = figures.pop("perf/utilisation", None)
        assert (busy is None) == (not left) and sum(figures.values()) == pytest.approx(len(left) / 1e9)
        if left:
            cards = [summarize(recorded, instant, instant + 1, CARDS) for instant in left]
            assert busy == pytest.approx(sum(card.busy_ns for one in cards for card in one) / 2 / len(left))


def test_a_switch_is_counted_whole_and_waiting_is_no_work():
    usage = Usage(CARDS, 0)
    usage.add([Span("card 0", "switch", "switch", 0, 400), Span("card 0", "kv", "switch/kv", 100, 200)])
    usage.add([Span("card 1", "wait_weights", "wait_weights", 0, 600), Span("card 1", "decode", "decode", 600, 2000)])
    assert usage.count(1000) == pytest.approx(
        {
            "perf/utilisation": 0.4,
            "timing_s/card/decode": 200e-9,
            "timing_s/card/idle": 600e-9,
            "timing_s/card/switch": 200e-9,
        }
    )
    assert usage.count(2000)["perf/utilisation"] == 0.5, "the rest of a span counts later"


@given(
    st.lists(
        st.builds(
            lambda kind, start, length: Span(CARDS[start % 2], kind, kind, start, start + length),
            st.sampled_from(["decode", "prefill", "train", "optimizer", "switch"]),
            st.integers(0, 300),
            st.integers(1, 100),
        ),
        max_size=12,
    ),
    st.integers(0, 200),
    st.integers(201, 400),
)
def test_overlap_is_the_share_of_the_shorter_of_training_and_generation(recorded, gap, end):
    usage = Usage(CARDS, 0)
    usage.add(recorded)
    usage.exclude(gap, gap + 50)
    figures, instants = usage.count(end), {*range(end)} - {*range(gap, gap + 50)}
    train, generate = (
        instants & {now for span in recorded if span.kind in kinds for now in range(span.start_ns, span.end_ns)}
        for kinds in (("train", "optimizer"), ("decode", "prefill"))
    )
    if train and generate:
        shorter, longer = sorted((len(train), len(generate)))
        assert figures["perf/overlap"] == pytest.approx(len(train & generate) / shorter)
        assert figures["timing_s/step_floor"] == pytest.approx(longer / 1e9)
    else:
        assert not {"perf/overlap", "timing_s/step_floor"} & figures.keys()

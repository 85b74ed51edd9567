from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry.page.distributions import MAX_BINS, Distributions, bin_width, summary

lengths = st.lists(st.integers(0, 100_000), min_size=1, max_size=60)


def counted(groups, num_steps=10):
    distributions = Distributions(num_steps)
    for group in groups:
        distributions.add(group)
    return distributions


@given(lengths)
def test_bins_cover_every_length_and_add_up(lengths):
    histogram = counted([{"step": 1, "ended": "trained", "response_tokens": lengths}]).lengths()
    assert sum(histogram["all"]) == len(lengths) and len(histogram["from"]) <= MAX_BINS
    for start, count in zip(histogram["from"], histogram["all"], strict=True):
        assert count == sum(start <= length < start + histogram["width"] for length in lengths)


@given(lengths)
def test_percentiles_and_the_tail_are_exact(lengths):
    ordered = sorted(lengths)
    figures = summary({length: lengths.count(length) for length in lengths})
    assert figures["max"] == ordered[-1] and figures["responses"] == len(lengths)
    for percent in (50, 90, 99):
        value = figures[f"p{percent}"]
        assert value in ordered
        assert 100 * sum(one <= value for one in ordered) >= percent * len(ordered)
        assert 100 * sum(one < value for one in ordered) < percent * len(ordered)
    tail = ordered[-max(1, round(len(ordered) / 10)) :]
    assert figures["tail_share"] == (sum(tail) / sum(ordered) if sum(ordered) else 0)


@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_no_smaller_width_of_the_series_would_do(start, span):
    width = bin_width(start, start + span)
    series = [factor * 10**power for power in range(7) for factor in (1, 2, 5)]
    fits = [one for one in series if (start + span) // one - start // one < MAX_BINS]
    assert width == fits[0]


def test_first_and_last_tenth_of_the_steps():
    groups = [{"step": step, "ended": "trained", "response_tokens": [step]} for step in range(1, 101)]
    figures = counted(groups, num_steps=100).lengths()["summary"]
    assert figures["first"]["max"] == 10 and figures["last"]["mean"] == 95.5 and figures["all"]["responses"] == 100


def test_staleness_and_endings():
    groups = [{"step": 1, "ended": "trained", "lag": lag} for lag in (0, 2, 2)] + [{"step": 1, "ended": "failed:died"}]
    distributions = counted(groups)
    assert distributions.staleness() == {"lag": [0, 1, 2], "groups": [1, 0, 2]}
    assert distributions.ended() == {"trained": 3, "failed:died": 1}
    assert distributions.lengths() is None and counted([]).staleness() is None

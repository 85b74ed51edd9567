import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.telemetry.page.curves import curves, number, short

values = st.one_of(st.none(), st.floats(), st.integers(-(2**60), 2**60), st.text(max_size=3), st.booleans())
rows = st.lists(st.dictionaries(st.sampled_from(["a/mean", "b", "timing_s/step"]), values), max_size=40).map(
    lambda rows: [{"step": index + 1, **row} for index, row in enumerate(rows)]
)


@given(rows)
def test_every_value_is_the_rows_to_six_digits_and_what_is_no_number_is_a_gap(rows):
    drawn = curves(rows, max_points=40)
    assert drawn["step"] == [row["step"] for row in rows] and drawn["every"] == 1
    names = {name for row in rows for name, value in row.items() if name != "step" and number(value) is not None}
    assert drawn["metrics"].keys() == names
    for name, values in drawn["metrics"].items():
        for row, value in zip(rows, values, strict=True):
            expected = number(row.get(name))
            assert (value is None) == (expected is None)
            assert value is None or value == pytest.approx(expected, rel=1e-5, abs=0)


@given(rows, st.integers(1, 12))
def test_more_rows_than_points_are_means_of_consecutive_ones(rows, max_points):
    drawn = curves(rows, max_points)
    every = drawn["every"]
    assert len(drawn["step"]) <= max_points and (every == 1 or len(rows) > max_points)
    for name, values in drawn["metrics"].items():
        for index, value in enumerate(values):
            chunk = [number(row.get(name)) for row in rows[index * every : (index + 1) * every]]
            present = [one for one in chunk if one is not None]
            mean = sum(present) / len(present) if present and math.isfinite(sum(present)) else None
            assert mean is None or value == pytest.approx(mean, rel=1e-5, abs=1e-300)


def test_wall_time_adds_up_the_steps():
    rows = [{"step": 3, "timing_s/step": 1.5}, {"step": 4, "perf/time_per_step": 2.0}, {"step": 5}]
    assert curves(rows)["wall_s"] == [1.5, 3.5, 3.5]
    assert curves(rows)["step"] == [3, 4, 5], "also of a run whose first rows are missing"


def test_a_number_is_short_and_a_whole_one_exact():
    assert short(0.123456789) == 0.123457 and short(1785856.0) == 1785856 and isinstance(short(2.0), int)

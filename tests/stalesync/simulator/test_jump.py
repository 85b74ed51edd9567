"""The invariants of `stalesync.simulator.jump`: a loop over the steps takes the same time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.simulator.jump import Jump

LINES = st.lists(st.tuples(st.floats(0.001, 1.0), st.floats(0, 0.01)), min_size=1, max_size=8)


@given(LINES, st.integers(0, 1000), st.integers(1, 300), st.floats(0, 1000))
def test_a_jump_takes_the_time_of_its_steps(lines, first, count, begins_s):
    fixed, growth = (np.array(values) for values in zip(*lines, strict=True))
    jump = Jump(begins_s, first, count, fixed, growth)
    seconds = [max(a + g * k for a, g in lines) for k in range(first, first + count)]
    ends = [0.0, *np.cumsum(seconds)]
    assert jump.seconds == pytest.approx(ends[-1], rel=1e-9)
    assert sum(piece.count for piece in jump.pieces) == count
    for steps in {0, 1, count // 2, count - 1, count}:
        assert jump.time_of(steps) - begins_s == pytest.approx(ends[steps], rel=1e-9, abs=1e-9)
    for steps in {0, count // 2, count - 1}:
        middle = begins_s + ends[steps] + seconds[steps] / 2
        assert jump.boundary(middle) == steps + 1, "an order counts at the end of the step in which it arrives"
    assert jump.boundary(begins_s) == 0 and jump.boundary(begins_s + 2 * jump.seconds) == count


def test_one_line_is_one_piece_and_a_change_costs_few():
    fixed, growth = np.array([1.0, 0.5]), np.array([0.0, 0.001])
    assert len(Jump(0.0, 0, 400, fixed, growth).pieces) == 1
    assert len(Jump(0.0, 0, 100_000, fixed, growth).pieces) <= 34

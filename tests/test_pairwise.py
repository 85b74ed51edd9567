"""The pairwise choice of cases."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pairwise import choose, pairs_of, thinned

grids = st.integers(1, 4).flatmap(lambda width: st.lists(st.tuples(*[st.integers(0, 3)] * width), max_size=40))


def pairs(cases):
    return {pair for case in cases for pair in pairs_of(case)}


@given(grids)
def test_every_pair_of_the_grid_is_chosen_and_no_case_is_superfluous(cases):
    chosen = choose(cases, lambda case: case)
    assert pairs(chosen) == pairs(cases) and set(chosen) <= set(cases)
    assert all(pairs(chosen[:index] + chosen[index + 1 :]) < pairs(chosen) for index in range(len(chosen)))
    assert chosen == choose(cases, lambda case: case)


def test_a_full_grid_is_thinned_to_little_more_than_its_two_largest_factors():
    grid = list(product(range(3), range(3), range(2), range(2)))
    assert 9 <= len(choose(grid, lambda case: case)) <= 11 < len(grid)


def test_what_is_left_out_is_marked_slow():
    marks = {param.values: bool(param.marks) for param in thinned(list(product("ab", "cd", "ef")), lambda case: case)}
    assert len(marks) == 8 and sum(marks.values()) == 4
    (single,) = thinned(["x"], lambda case: (case,))
    assert single.values == ("x",) and single.marks == () and isinstance(single, type(pytest.param()))


def test_what_is_chosen_may_be_left_to_the_extended_run():
    cases = list(product("ab", "cd", "ef"))
    kept = choose(cases, lambda case: case)
    for param in thinned(cases, lambda case: case, extended=lambda case: case[0] == "a"):
        names = [mark.name for mark in param.marks]
        assert names == (["slow"] if param.values not in kept else ["extended"] if param.values[0] == "a" else [])


def test_what_is_left_out_may_run_with_the_extended():
    params = thinned(list(product("ab", "cd", "ef")), lambda case: case, rest=pytest.mark.extended)
    assert {mark.name for param in params for mark in param.marks} == {"extended"}

from hypothesis import given
from hypothesis import strategies as st

from fusion.rollout import assign_groups


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_every_group_once_and_loads_close(loads, engines):
    groups = {f"g{i}": load for i, load in enumerate(loads)}
    assigned = assign_groups(groups, [0] * engines)
    assert sorted(group for mine in assigned for group in mine) == sorted(groups)
    totals = [sum(groups[group] for group in mine) for mine in assigned]
    assert max(totals) - min(totals) <= max(loads, default=0)
    assert assigned == assign_groups(groups, [0] * engines)


def test_engines_that_have_more_get_less():
    assert assign_groups({"a": 5, "b": 3, "c": 3}, [6, 0]) == [["c"], ["a", "b"]]

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.rollout import PoolRouting, assign_groups
from fusion.rollout.dispatch import REMOTE_PULL, LowestEngine


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


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=6),
    st.integers(0, 7),
    st.integers(0, 40),
)
def test_a_request_goes_to_its_kv_while_the_engines_are_balanced_and_else_to_the_least_loaded(counts, home, spread):
    routing, num_running = PoolRouting(spread, 512), dict(enumerate(counts))
    least = LowestEngine(num_running, num_running.__getitem__).first
    assert counts[least] == min(counts) and least == counts.index(min(counts))
    engine = routing.choose_engine(num_running, kv_home=home, least_loaded=least)
    balanced = home in num_running and num_running[home] <= min(counts) + spread
    assert engine == (home if balanced else least)
    assert routing.pulls(512, kv_home=0, engine=1) and not routing.pulls(511, kv_home=0, engine=1)


@pytest.mark.parametrize("remote", [False, True])
def test_kv_of_another_machine_is_pulled_if_it_may_be_and_is_long_enough(remote):
    routing = PoolRouting(3, 512, [(0, 0), (0, 0), (0, 1), (1, 1)], remote)
    for home, engine in product(range(4), repeat=2):
        least = 512 if {home, engine} <= {0, 1} or home == engine else REMOTE_PULL * 512
        assert not routing.pulls(least - 1, kv_home=home, engine=engine)
        assert routing.pulls(least, kv_home=home, engine=engine) == (remote or least == 512)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.lists(st.integers(0, 4), max_size=60))
def test_requests_with_kv_leave_the_counts_within_the_spread(counts, homes):
    """… if they were: an engine gets none that would make it exceed the least loaded by more than one over it."""
    routing, now = PoolRouting(3, 512), dict(enumerate(counts))
    loaded = LowestEngine(now, now.__getitem__)
    for home in homes:
        engine = routing.choose_engine(now, kv_home=home, least_loaded=loaded.first)
        now[engine] += 1
        assert now[engine] <= min(now.values()) + 4
        assert now[loaded.first] == min(now.values())
    assert sum(now.values()) == sum(counts) + len(homes)

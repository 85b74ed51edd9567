from __future__ import annotations

import statistics

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fusion.training.algorithms.baseline import number_groups, standard_deviation, subtract_mean

REWARDS = st.floats(-1e6, 1e6, allow_subnormal=False)
SAMPLES = st.lists(st.tuples(REWARDS, st.sampled_from("abcd")), max_size=40)


@given(SAMPLES)
def test_both_functions_give_what_they_define_group_by_group(samples):
    rewards, groups = [reward for reward, _ in samples], [group for _, group in samples]
    numbers = number_groups(groups)
    centred = subtract_mean(np.array(rewards), numbers)
    deviations = standard_deviation(centred, numbers)
    for reward, group, difference, deviation in zip(rewards, groups, centred, deviations, strict=True):
        members = [reward for reward, other in samples if other == group]
        if max(members) - min(members) <= 1e-6 * max(1, *map(abs, members)):
            assert difference == deviation == 0
            continue
        scale = 1e-12 * (1 + max(map(abs, members)))
        assert abs(difference - (reward - statistics.fmean(members))) <= scale
        assert abs(deviation - (statistics.stdev(members) if len(members) > 1 else 0)) <= 2 * scale


@given(st.lists(st.tuples(REWARDS, st.integers(1, 9)), min_size=1, max_size=5))
def test_a_group_whose_rewards_are_all_equal_gives_exact_zeros(equal):
    numbers = np.repeat(np.arange(len(equal)), [count for _, count in equal])
    centred = subtract_mean(np.repeat([reward for reward, _ in equal], [count for _, count in equal]), numbers)
    assert not centred.any() and not standard_deviation(centred, numbers).any()


@given(st.lists(st.integers(0, 9)))
def test_groups_are_numbered_in_the_order_in_which_they_first_occur(groups):
    numbers = number_groups(groups).tolist()
    assert list(dict.fromkeys(numbers)) == list(range(len({*groups})))
    assert len({*zip(numbers, groups, strict=True)}) == len({*groups})

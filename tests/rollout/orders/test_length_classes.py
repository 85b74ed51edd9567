"""The invariants of `fusion.rollout.orders.length_classes`, against every other division of the engines."""

from itertools import combinations

import hypothesis.strategies as st
from hypothesis import given, settings

from fusion.rollout.orders.length_classes import (
    ClassWork,
    ExpectedLength,
    HistoPipeSpec,
    equal_shares,
    plan_classes,
    share_engines,
)

LENGTHS = st.lists(
    st.integers(1, 200).map(lambda tokens: ExpectedLength(tokens, 2.0 * tokens)), min_size=1, max_size=40
)
SPECS = st.builds(
    HistoPipeSpec,
    num_engines=st.integers(1, 9),
    engine_slots=st.integers(1, 16),
    group_size=st.integers(1, 4),
    num_classes=st.integers(1, 5),
    search=st.booleans(),
)


@settings(max_examples=100)
@given(LENGTHS, SPECS)
def test_every_class_has_groups_and_engines_in_order_of_length_and_every_engine_a_class(expected, spec):
    plan = plan_classes(expected, spec)
    assert len(plan.shares) <= min(spec.num_classes, spec.num_engines)
    assert sum(plan.shares) == spec.num_engines and min(plan.shares) >= 1
    means = sorted(one.mean for one in expected)
    classes = [plan.class_of(mean) for mean in means]
    assert classes == sorted(classes) and {*classes} == {*range(len(plan.shares))}
    up, down = (
        [plan.class_of_engine(engine, ascending=ascending) for engine in range(spec.num_engines)]
        for ascending in (True, False)
    )
    assert up == [number for number, share in enumerate(plan.shares) for _ in range(share)]
    assert down == up[::-1], "the next step runs in the other direction"


def test_different_lengths_are_divided_evenly():
    expected = [ExpectedLength(tokens, tokens) for tokens in range(1, 13)]
    plan = plan_classes(expected, HistoPipeSpec(8, 4, 1, num_classes=4))
    assert [sum(plan.class_of(one.mean) == number for one in expected) for number in range(4)] == [3] * 4
    assert list(plan.shares) == sorted(plan.shares) and plan.shares[0] < plan.shares[-1], "longer ones get more"


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 200)), min_size=1, max_size=4), st.integers(4, 9), SPECS)
def test_no_other_shares_have_a_shorter_longest_class(work, num_engines, spec):
    curves = [ClassWork(float(max(tokens, longest)), float(longest)).curve(spec) for tokens, longest in work]

    def makespan(shares):
        return max(curve(share) for curve, share in zip(curves, shares, strict=True))

    shares = share_engines(curves, num_engines)
    assert sum(shares) == num_engines and min(shares) >= 1
    cuts = combinations(range(1, num_engines), len(work) - 1)
    others = [[end - begin for begin, end in zip((0, *cut), (*cut, num_engines), strict=True)] for cut in cuts]
    assert makespan(shares) == min(map(makespan, others))
    assert makespan(shares) <= makespan(equal_shares(len(work), num_engines))

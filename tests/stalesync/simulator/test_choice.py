"""The choice of deployment, split and bound: a pure decision over simulated options."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.costmodel.search import DeploymentEstimate
from fusion.model import Parallel
from stalesync.simulator.choice import MARGIN, Option, candidates, choose, with_least_overhead
from stalesync.simulator.outcome import LOSSES


def plan(deployment="colocated", train=8, infer=8, generate_s=10.0, train_s=5.0):
    layouts = Parallel(train), Parallel(infer)
    return DeploymentEstimate(deployment, *layouts, generate_s, train_s, switch_s=0.0, reference_s=0.0)


def option(deployment, bound, speed, train=8, **lost):
    shares = dict.fromkeys(LOSSES, 0.0) | {"waiting": 0.5} | lost
    return Option(plan(deployment, train), bound, speed, 100 / speed, shares)


OPTIONS = st.lists(
    st.builds(
        option,
        st.sampled_from(["colocated", "separate", "hybrid"]),
        st.integers(0, 2),
        st.floats(1, 1000),
        st.integers(2, 8),
    ),
    min_size=1,
    max_size=8,
    unique_by=lambda one: (one.name, one.tokens_per_s),
)


@given(OPTIONS, st.randoms())
def test_no_option_is_much_faster_and_none_with_a_smaller_bound_as_fast(options, random):
    best = choose(options).best
    fastest = max(one.tokens_per_s for one in options)
    assert best in options and fastest <= best.tokens_per_s * (1 + MARGIN)
    assert not any(
        one.tokens_per_s * (1 + MARGIN) >= fastest and one.max_staleness < best.max_staleness for one in options
    )
    shuffled = [*options]
    random.shuffle(shuffled)
    assert choose(shuffled).best.tokens_per_s == best.tokens_per_s


def test_reasons_name_the_runner_up_what_running_ahead_brings_and_what_limits():
    options = [option("separate", 1, 164), option("colocated", 1, 157), option("colocated", 0, 85)]
    choice = choose(options)
    assert choice.best is options[0] and choice.runner_up is options[1]
    reasons = " ".join(choice.reasons)
    assert "1.93 x as fast as colocated at staleness 0, the fastest on-policy" in reasons
    assert "1.04 x as fast as colocated at staleness 1, the runner-up, which is within" in reasons
    assert "50%" in reasons and LOSSES["waiting"] in reasons
    assert choice.best.keys == ["fusion.deployment=separate", "fusion.infer_cards=8", "stalesync.max_staleness=1"]


def test_a_lead_is_stated_for_the_least_overhead_that_a_published_run_implies():
    assert with_least_overhead(option("hybrid", 1, 120), option("separate", 1, 100)).startswith("that is 1.20 x with")
    turned = with_least_overhead(option("hybrid", 1, 90), option("separate", 1, 100))
    assert turned.startswith("that is 0.90 x") and turned.endswith(": which is faster depends on it")


def test_running_ahead_is_not_recommended_where_it_brings_next_to_nothing():
    choice = choose([option("separate", 1, 104), option("colocated", 0, 100)])
    assert choice.best.max_staleness == 0 and "on-policy costs next to nothing" in " ".join(choice.reasons)
    assert choose([option("separate", 1, 110), option("colocated", 0, 100)]).best.max_staleness == 1
    assert choose([option("colocated", 0, 1)]).runner_up is None


def test_splits_are_the_shortest_sum_and_running_ahead_also_the_best_balanced():
    even = plan("separate", 4, 4, generate_s=20.0, train_s=8.0)
    uneven = plan("separate", 2, 6, generate_s=10.0, train_s=16.0)
    alone = plan()
    found = candidates([alone, even, uneven], mean_share=0.25)
    assert found == [(alone, 0), (alone, 1), (uneven, 0), (uneven, 1), (even, 1)]


@pytest.mark.parametrize(("deployment", "cards"), [("colocated", 0), ("separate", 4), ("hybrid", 2)])
def test_the_cards_that_only_generate_are_counted(deployment, cards):
    infer = {"colocated": 8, "separate": 4, "hybrid": 10}[deployment]
    assert plan(deployment, 8, infer).infer_cards == cards

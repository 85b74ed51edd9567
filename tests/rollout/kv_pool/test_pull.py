"""Which KV is pulled from another machine: never for longer than it takes to compute it, by what was measured."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from fusion.rollout.kv_pool.pull import RETRY_EVERY, PullPlan

EVENTS = st.tuples(
    st.sampled_from(["prefill", "pulled", "late", "gone", "wanted"]),
    st.sampled_from(["a", "b"]),
    st.integers(1, 1 << 20),
    st.floats(1e-6, 1e3),
)


@given(st.lists(EVENTS, max_size=60))
def test_nothing_is_awaited_for_longer_than_it_takes_to_compute_it(events):
    plan, rates, gone = PullPlan(), [], set()
    for kind, machine, tokens, seconds in events:
        match kind:
            case "prefill":
                plan.observe_prefill(tokens, seconds)
                rates.append(seconds / tokens)
            case "pulled":
                plan.observe_pulled(machine, tokens, seconds)
            case "late":
                plan.observe_late(machine, tokens, seconds)
            case "gone":
                plan.observe_gone(machine)
                gone.add(machine)
            case "wanted":
                patience_s = plan.patience_s(machine, tokens)
                assert not patience_s or (rates and machine not in gone)
                if rates:
                    assert patience_s == 0 or patience_s == pytest.approx(tokens * plan.prefill_s_per_token)
                    assert min(rates) * 0.999 <= plan.prefill_s_per_token <= max(rates) * 1.001


@given(st.lists(st.tuples(st.integers(1, 10**6), st.floats(1, 9)), min_size=1, max_size=80))
def test_a_slow_machine_is_tried_at_every_so_many_requests_only(wanted):
    plan = PullPlan()
    plan.observe_prefill(1000, 1.0)
    asked = []
    for number, (tokens, slowness) in enumerate(wanted):
        if patience_s := plan.patience_s("a", tokens):
            asked.append(number)
            plan.observe_late("a", tokens, patience_s * slowness)
    assert asked == [*range(0, len(wanted), RETRY_EVERY)]


def test_a_machine_is_asked_again_once_a_try_has_been_fast():
    plan = PullPlan()
    plan.observe_prefill(1000, 1.0)
    plan.observe_pulled("a", 1000, 1.2)
    assert [plan.patience_s("a", 10) > 0 for _ in range(RETRY_EVERY)] == [False] * (RETRY_EVERY - 1) + [True]
    plan.observe_pulled("a", 1000, 0.1)
    assert all(plan.patience_s("a", 10) > 0 for _ in range(40))
    plan.observe_gone("a")
    assert not any(plan.patience_s("a", 10) for _ in range(40)) and plan.patience_s("b", 10) > 0

"""The invariants of `fusion/ep_switch/unit_sources.py`."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from fusion.ep_switch.unit_sources import TrainedPart, plan_return

parts = st.lists(
    st.builds(TrainedPart, wire_bytes=st.integers(0, 1000), master_bytes=st.none() | st.integers(0, 2000)), max_size=8
)
bandwidth = st.floats(0.5, 64)


def seconds(choice, parts, wire_rate, host_rate) -> tuple[float, float]:
    """The two links' times of any choice, counted from scratch."""
    wire, host = 0, 0
    for part, source in zip(parts, choice, strict=True):
        wire += part.wire_bytes if source == "wire" else 0
        host += (part.master_bytes or 0) if source == "host" else 0
    return wire / wire_rate, host / host_rate


def fractional_optimum(parts, wire_rate, host_rate) -> float:
    """By the dual: the largest over λ of the least λ·wire + (1-λ)·host, where every part is chosen for itself."""

    def least(weight: float) -> float:
        def cost(part, source):
            wire, host = seconds([source], [part], wire_rate, host_rate)
            return weight * wire + (1 - weight) * host

        total = 0.0
        for part in parts:
            sources = ["wire"] if part.master_bytes is None else ["wire", "host"]
            total += min(cost(part, source) for source in sources)
        return total

    weights = [0.0, 1.0]
    for part in parts:
        saved, cost = saved_and_cost(part, wire_rate, host_rate)
        if part.master_bytes is not None and saved > 0:
            weights.append(cost / (saved + cost))
    return max(map(least, weights))


def saved_and_cost(part, wire_rate, host_rate) -> tuple[float, float]:
    return part.wire_bytes / wire_rate, (part.master_bytes or 0) / host_rate


@given(parts, bandwidth, bandwidth)
def test_no_worse_than_either_link_alone_and_within_a_part_of_the_optimum(parts, wire, host):
    case = (parts, wire, host)
    plan = plan_return(*case)
    assert plan == plan_return(list(parts), wire, host)
    for part, source in zip(parts, plan.sources, strict=True):
        if part.master_bytes is None or part.wire_bytes == 0:
            assert source == "wire"
    assert (plan.wire_s, plan.host_s) == seconds(plan.sources, *case)
    assert plan.seconds <= max(seconds(["wire"] * len(parts), *case))
    assert plan.seconds <= max(seconds(["wire" if p.master_bytes is None else "host" for p in parts], *case))
    slack = 0.0
    for part in parts:
        if part.master_bytes is not None and part.wire_bytes > 0:
            saved, cost = saved_and_cost(part, wire, host)
            slack = max(slack, saved * cost / (saved + cost))
    optimum = fractional_optimum(*case)
    assert optimum <= plan.seconds * (1 + 1e-9) + 1e-9, "the oracle is a lower bound"
    assert plan.seconds <= optimum + slack + 1e-9 * (1 + optimum)


@given(st.lists(st.builds(TrainedPart, st.integers(1, 50), st.integers(1, 50)), max_size=6), bandwidth, bandwidth)
def test_the_oracle_is_no_more_than_the_best_of_all_choices(parts, wire, host):
    case = (parts, wire, host)
    best = min(max(seconds(choice, *case)) for choice in product(["wire", "host"], repeat=len(parts)))
    assert fractional_optimum(*case) <= best + 1e-9
    assert best <= plan_return(*case).seconds + 1e-9


def test_wire_and_host_share_the_load_by_their_speed():
    parts = [TrainedPart(wire_bytes=100, master_bytes=200)] * 4
    shared = plan_return(parts, 10, 20)
    assert shared.sources == ("host", "host", "wire", "wire") and (shared.wire_s, shared.host_s) == (20, 20)
    slow_host = plan_return(parts, 10, 1)
    assert slow_host.sources == ("wire",) * 4 and slow_host.seconds == 40

"""The invariants of `fusion/offload/plan.py`."""

from __future__ import annotations

from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.offload import Part, plan_return

parts = st.lists(
    st.builds(
        Part,
        wire_bytes=st.integers(0, 1000),
        master_bytes=st.none() | st.integers(0, 2000),
        gather_bytes=st.integers(0, 500),
    ),
    max_size=8,
)
bandwidth = st.floats(0.5, 64)
ahead = st.integers(0, 3000)


def seconds(choice, parts, wire_rate, host_rate, masters_return, wire_ahead, host_ahead) -> tuple[float, float]:
    """The two links' times of any choice, counted from scratch."""
    wire, host = wire_ahead, host_ahead
    for part, source in zip(parts, choice, strict=True):
        wire += part.gather_bytes if source == "host" else part.wire_bytes
        host += (part.master_bytes or 0) if source == "host" or masters_return else 0
    return wire / wire_rate, host / host_rate


def fractional_optimum(parts, wire_rate, host_rate, masters_return, wire_ahead, host_ahead) -> float:
    """By the dual: the largest over λ of the least λ·wire + (1-λ)·host, where every part is chosen for itself."""

    def least(weight: float) -> float:
        def cost(part, source):
            wire, host = seconds([source], [part], wire_rate, host_rate, masters_return, 0, 0)
            return weight * wire + (1 - weight) * host

        total = weight * wire_ahead / wire_rate + (1 - weight) * host_ahead / host_rate
        for part in parts:
            sources = ["wire"] if part.master_bytes is None else ["wire", "host"]
            total += min(cost(part, source) for source in sources)
        return total

    weights = [0.0, 1.0]
    for part in parts:
        saved, cost = saved_and_cost(part, wire_rate, host_rate, masters_return)
        if part.master_bytes is not None and saved > 0:
            weights.append(cost / (saved + cost))
    return max(map(least, weights))


def saved_and_cost(part, wire_rate, host_rate, masters_return) -> tuple[float, float]:
    cost = 0 if masters_return else part.master_bytes or 0
    return (part.wire_bytes - part.gather_bytes) / wire_rate, cost / host_rate


@settings(deadline=None)
@given(parts, bandwidth, bandwidth, st.booleans(), ahead, ahead)
def test_no_worse_than_either_link_alone_and_within_a_part_of_the_optimum(parts, wire, host, anyway, on_wire, on_host):
    case = (parts, wire, host, anyway, on_wire, on_host)
    plan = plan_return(parts, wire, host, masters_return=anyway, wire_bytes_ahead=on_wire, host_bytes_ahead=on_host)
    assert plan == plan_return(
        list(parts), wire, host, masters_return=anyway, wire_bytes_ahead=on_wire, host_bytes_ahead=on_host
    )
    for part, source in zip(parts, plan.sources, strict=True):
        if part.master_bytes is None or part.wire_bytes == 0:
            assert source == "wire"
    assert (plan.wire_s, plan.host_s) == seconds(plan.sources, *case)
    assert plan.seconds <= max(seconds(["wire"] * len(parts), *case))
    assert plan.seconds <= max(seconds(["wire" if p.master_bytes is None else "host" for p in parts], *case))
    slack = 0.0
    for part in parts:
        if part.master_bytes is not None and part.wire_bytes > part.gather_bytes:
            saved, cost = saved_and_cost(part, wire, host, anyway)
            slack = max(slack, saved * cost / (saved + cost))
    optimum = fractional_optimum(*case)
    assert optimum <= plan.seconds * (1 + 1e-9) + 1e-9, "the oracle is a lower bound"
    assert plan.seconds <= optimum + slack + 1e-9 * (1 + optimum)


@settings(deadline=None)
@given(st.lists(st.builds(Part, st.integers(1, 50), st.integers(1, 50)), max_size=6), bandwidth, bandwidth)
def test_the_oracle_is_no_more_than_the_best_of_all_choices(parts, wire, host):
    case = (parts, wire, host, False, 0, 0)
    best = min(max(seconds(choice, *case)) for choice in product(["wire", "host"], repeat=len(parts)))
    assert fractional_optimum(*case) <= best + 1e-9
    assert best <= plan_return(parts, wire, host, masters_return=False).seconds + 1e-9


def test_masters_that_return_anyway_spare_the_wire_and_streamed_ones_share_the_load():
    parts = [Part(wire_bytes=100, master_bytes=200)] * 4
    anyway = plan_return(parts, 10, 20, masters_return=True)
    assert anyway.sources == ("host",) * 4 and (anyway.wire_s, anyway.host_s) == (0, 40)
    shared = plan_return(parts, 10, 20, masters_return=False)
    assert shared.sources == ("host", "host", "wire", "wire") and (shared.wire_s, shared.host_s) == (20, 20)
    slow_host = plan_return(parts, 10, 1, masters_return=False)
    assert slow_host.sources == ("wire",) * 4 and slow_host.seconds == 40

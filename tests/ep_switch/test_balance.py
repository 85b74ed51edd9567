"""Shares of loads against the exact optimum, by enumeration of all sets of ranks."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.ep_switch.balance import TOLERANCE, Deal, shares
from tests.ep_switch.oracle import optimum

RANKS = st.sets(st.integers(0, 7), min_size=1, max_size=5).map(lambda ranks: tuple(sorted(ranks)))


@settings(max_examples=200)
@given(st.dictionaries(RANKS, st.integers(1, 1000), min_size=1, max_size=12))
def test_the_busiest_is_at_the_optimum(demands):
    parts, busiest = shares(demands)
    load = dict.fromkeys(range(8), 0.0)
    for ranks, amount in demands.items():
        assert sum(parts[ranks].values()) == pytest.approx(1.0) and set(parts[ranks]) <= set(ranks)
        for rank, part in parts[ranks].items():
            load[rank] += part * amount
    assert max(load.values()) == pytest.approx(busiest)
    assert busiest <= TOLERANCE * optimum({frozenset(ranks): amount for ranks, amount in demands.items()}) + 1e-6


def test_a_long_chain_settles():
    """Each rank shares with its neighbour only; all the load is at one end."""
    demands = {(i, i + 1): 1.0 for i in range(63)} | {(0,): 30.0}
    parts, busiest = shares(demands)
    assert busiest == pytest.approx(30.0, rel=0.01) and parts[(0, 1)][0] == pytest.approx(0.0, abs=0.01)


def test_whole_pieces_even_out_over_time():
    deal = Deal({(0, 1): {0: 0.25, 1: 0.75}, (1, 2): {1: 0.0, 2: 1.0}}, grain=10.0)
    for _ in range(40):
        for ranks in ((0, 1), (1, 2)):
            ((rank, amount),) = deal.take(ranks, 8.0)
            deal.charge(ranks, rank, amount)
    assert deal.load == {0: 80.0, 1: 240.0, 2: 320.0}


def test_a_large_piece_is_cut():
    deal = Deal({(0, 1): {0: 0.25, 1: 0.75}}, grain=10.0)
    assert deal.take((0, 1), 100.0) == [(0, 25.0), (1, 75.0)]

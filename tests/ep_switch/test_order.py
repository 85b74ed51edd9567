"""The order of slabs: evaluating all that are left at once is evaluating each of them."""

from __future__ import annotations

import pytest

from fusion.ep_switch import demands, order, plan_switch
from fusion.ep_switch.order import _Search
from tests.ep_switch.oracle import choices, random_switch


def seeds(first: int, count: int):
    """The first seeds, and in the extended run those up to ``count``."""
    return pytest.mark.parametrize(
        "seeds", [range(first), pytest.param(range(first, count), marks=pytest.mark.extended)]
    )


def one_by_one(search: _Search, index: int) -> tuple[int, float, tuple[int, ...]]:
    """What taking a slab next means, by its definition: (excess, increase in tightness, slab)."""
    over, real, fluid, opens = -(1 << 62), 0.0, 0.0, False
    for rank, nbytes in search.demands[index].takes:
        over = max(over, search.beyond[rank] + nbytes)
        real += search.weights[rank][0] * nbytes
        fluid += search.weights[rank][1] * nbytes
    for unit, rank, share in search.shares[index]:
        weight = search.weights[rank]
        fluid -= weight[1] * share
        if search.unread[unit] == 1:
            real -= weight[0] * search.size[unit]
        elif unit not in search.owed:
            opens = True
    return max(0, over + opens * search.bucket_bytes), (real + fluid) / search.scale, (index,)


@seeds(10, 40)
def test_the_best_of_all_is_found_at_once(seeds, monkeypatch):
    searches: list[_Search] = []
    step, best = _Search.step, demands.DemandTable.best
    compared = 0

    def noted(search: _Search) -> None:
        searches.append(search)
        step(search)

    def checked(table: demands.DemandTable, *args: object) -> tuple[int, float, tuple[int, ...]]:
        nonlocal compared
        compared += 1
        found = best(table, *args)
        assert found == min(one_by_one(searches[-1], index) for index in searches[-1].left)
        return found

    monkeypatch.setattr(_Search, "step", noted)
    monkeypatch.setattr(demands.DemandTable, "best", checked)
    monkeypatch.setattr(order, "MANY", 2)
    monkeypatch.setattr(order, "WINDOW", 1)
    for seed in seeds:
        plan_switch(*random_switch(choices(seed)))
    assert compared > 20


@pytest.mark.parametrize("many", [0, 1 << 30])
@seeds(4, 10)
def test_slabs_of_many_ranks_are_evaluated_alike(seeds, many, monkeypatch):
    for seed in seeds:
        case = random_switch(choices(seed))
        plan = plan_switch(*case)
        with monkeypatch.context() as patch:
            patch.setattr(order, "MANY", many)
            assert plan_switch(*case) == plan


@seeds(5, 20)
def test_an_evaluation_is_kept_only_while_its_ranks_do_not_change(seeds, monkeypatch):
    for seed in seeds:
        case = random_switch(choices(seed))
        plan = plan_switch(*case)
        with monkeypatch.context() as patch:
            patch.setattr(_Search, "_keep", lambda *_: None)
            assert plan_switch(*case) == plan

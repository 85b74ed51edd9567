"""One rank of a host plans; every rank receives the part that it would compute itself, or all are refused."""

from __future__ import annotations

import os
import signal
from dataclasses import fields
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.ep_switch import Layout, Plan, Switcher, SwitchError, host_plan, plan_switch
from fusion.ep_switch.host_plan import Ends, decode, encode, plan_for_host
from fusion.ep_switch.moves import units_of
from fusion.model import Parallel
from fusion.npu import open_device
from fusion.npu.failures import AbortedOnAllRanks, CollectiveFailed
from tests.ep_switch.oracle import random_switch, random_switch_of_formats
from tests.ep_switch.switching import BUCKET, assert_filled, build_pair
from tests.helpers import processes, run_ranks, tiny_config
from tests.machine import patience

MOE = tiny_config(num_key_value_heads=2)
GRIDS = Parallel(4, 2, 2), Parallel(4, ep=4)


def both_ways(bucket_bytes: int = BUCKET) -> list[Ends]:
    train, infer = (Layout(MOE, grid, (0, 1, 2, 3), bucket_bytes=bucket_bytes) for grid in GRIDS)
    return [(train, infer), (infer, train)]


def plans_of(ends: list[Ends]) -> list[Plan]:
    return [plan_switch(*of_plan, BUCKET) for of_plan in ends]


def assert_part(part: Plan, plan: Plan, rank: int) -> None:
    """The part reports of its rank what the whole plan does, in the same types, and has nothing of other ranks."""
    for one, whole in ((part, plan), (part.in_place(), plan.in_place())):
        assert repr(of_rank(one, rank)) == repr(of_rank(whole, rank))
        assert one.digest == whole.digest and (one.relays, one.parks) == (whole.relays, whole.parks)
        for name in {field.name for field in fields(Plan)} - {"hosted", "shared", "unread", "rounds", "rank", "unites"}:
            assert getattr(one, name) == getattr(whole, name), name
        owners = [unit[0] for unit in (*one.hosted, *one.shared, *one.unread)]
        for round_ in one.rounds:
            owners += [unit[0] for unit in (*round_.allocate_before, *round_.release_after, *round_.restore_before)]
            assert all(rank in (move.source_rank, move.target_rank) for move in round_.moves)
        assert {*owners} <= {rank} == {one.rank}


def of_rank(plan: Plan, rank: int) -> list[Any]:
    """Everything that a rank's switcher, or who asks for its memory, reads of a plan."""
    rounds = [
        (
            *round_.by_peer(rank),
            round_.exchange,
            [units_of(rank, units) for units in (round_.allocate_before, round_.release_after, round_.restore_before)],
        )
        for round_ in plan.rounds
    ]
    figures = [plan.wire_bytes, plan.staging_bytes, plan.received_bytes, plan.bound_bytes, plan.peak_bytes]
    units = [plan.held_bytes, plan.hosted_units, plan.shared_units]
    owned = [units_of(rank, plan.unread), units_of(rank, plan.parked)]
    return [rounds, [figure(rank) for figure in (*figures, *units)], owned, plan.ranks, plan.wire_dtype]


@st.composite
def switches(draw: st.DrawFn) -> Any:
    choose = lambda options: draw(st.sampled_from(list(options)))  # noqa: E731
    return random_switch_of_formats(choose) if draw(st.booleans()) else random_switch(choose, 4)


def check(case: Any, hosts: bool) -> None:
    source, target, *_ = case
    hosted = tuple((rank, 0) for rank in sorted(target.ranks)) if hosts else ()
    plan = plan_switch(*case, hosted=hosted)
    again = plan_switch(*case, hosted=hosted)
    for rank in (*plan.ranks, max(plan.ranks) + 1):
        (part,) = decode(encode([plan], rank), [(source, target)], rank)
        assert_part(part, again, rank)


@settings(max_examples=10)
@given(switches(), st.booleans())
def test_a_part_is_what_its_rank_would_plan(case, hosts):
    check(case, hosts)


@pytest.mark.extended
@settings(max_examples=100)
@given(switches(), st.booleans())
def test_parts_of_more_plans(case, hosts):
    check(case, hosts)


@settings(max_examples=10)
@given(switches())
def test_a_part_of_a_plan_through_host_memory(case):
    with patch("fusion.ep_switch.plan.TRIES", ()):
        check(case, hosts=False)


@pytest.fixture(scope="module")
def encoded() -> bytes:
    """The part of rank 1."""
    return encode(plans_of(both_ways()), 1)


@settings(max_examples=50)
@given(data=st.data())
def test_a_part_that_is_damaged_or_another_one_is_refused(encoded, data):
    ends, part = both_ways(), encoded
    at = data.draw(st.integers(0, len(part) - 1))
    damaged = [part[:at], part + b" ", part[:at] + bytes([part[at] ^ data.draw(st.integers(1, 255))]) + part[at + 1 :]]
    others = [(part, ends[::-1], 1), (part, both_ways(BUCKET + 8), 1), (part, ends[:1], 1), (part, ends, 2)]
    for case in [*((one, ends, 1) for one in damaged), *others]:
        with pytest.raises(
            ValueError, match=rf"a part of a plan, {len(case[0])} bytes: damaged, or not rank {case[2]}'s"
        ):
            decode(*case)
    assert len(decode(part, ends, 1)) == 2


def on_hosts(rank: int, device: Any, hosts: str) -> int:
    """Switch there and back by the parts. How often this process plans."""
    ends, calls = both_ways(), []

    def plan():
        calls.append(rank)
        return plans_of(ends)

    with patch.object(host_plan, "machine", lambda: (hosts[rank],)):
        parts = plan_for_host(plan, ends, rank=rank, group=dist.group.WORLD)
    for part, whole in zip(parts, plans_of(ends), strict=True):
        assert_part(part, whole, rank)
    models = build_pair(*ends[0], device)
    for part, (source, target) in zip(parts, (models, models[::-1]), strict=True):
        Switcher(part, source, target, device=device).run()
        assert_filled(target, via=torch.float32)
    return len(calls)


@pytest.mark.parametrize(("hosts", "planners"), [("aaaa", [1, 0, 0, 0]), ("abba", [1, 1, 0, 0]), ("abcd", [1] * 4)])
def test_the_first_rank_of_each_host_plans(hosts, planners):
    assert run_ranks(on_hosts, 4, hosts) == planners


def test_a_rank_alone_plans_for_itself():
    layout = Layout(MOE, Parallel(), (0,), bucket_bytes=BUCKET)
    (part,) = plan_for_host(lambda: plans_of([(layout, layout)]), [(layout, layout)], rank=0, group=None)
    assert_part(part, *plans_of([(layout, layout)]), rank=0)


def failing(rank: int, _: Any, damage: bool) -> str:
    """The planner of the second host fails, or what it sends to rank 3 arrives damaged."""
    ends = both_ways()

    def plan():
        if rank == 1 and not damage:
            raise ValueError("no such layout")
        return plans_of(ends)

    scattered = host_plan._scattered
    if damage and rank == 3:
        scattered = lambda *args: host_plan_scattered(*args)[:-1]  # noqa: E731
    hosts = patch.object(host_plan, "machine", lambda: ("ab"[rank % 2],))
    with hosts, patch.object(host_plan, "_scattered", scattered), pytest.raises(AbortedOnAllRanks) as caught:
        plan_for_host(plan, ends, rank=rank, group=dist.group.WORLD)
    return str(caught.value)


host_plan_scattered = host_plan._scattered


def test_a_planner_that_fails_is_named_on_all_ranks():
    (message,) = {*run_ranks(failing, 4, False)}
    assert message == "aborted on all cards: rank 1 failed in plan: ValueError: no such layout"


def test_a_damaged_part_is_refused_by_all_ranks():
    (message,) = {*run_ranks(failing, 4, True)}
    assert message.startswith("aborted on all cards: rank 3 failed in plan: ValueError: a part of a plan, ")


def with_layouts_of_its_own(rank: int, _: Any) -> str:
    """Those of rank 2 have other buckets, but the same units."""
    ends = both_ways(BUCKET + 8 * (rank == 2))
    with pytest.raises(AbortedOnAllRanks) as caught:
        plan_for_host(lambda: plans_of(ends), ends, rank=rank, group=dist.group.WORLD)
    return str(caught.value)


def test_a_part_between_other_layouts_is_refused_by_all_ranks():
    (message,) = {*run_ranks(with_layouts_of_its_own, 4)}
    assert "rank 2 failed in plan: ValueError" in message and "not rank 2's between its own layouts" in message


def with_another_planner(rank: int, device: Any) -> str:
    """The two hosts plan with other buckets."""
    ends = both_ways()
    with patch.object(host_plan, "machine", lambda: ("ab"[rank % 2],)):
        part, _ = plan_for_host(
            lambda: [plan_switch(*of_plan, BUCKET * (1 + rank % 2)) for of_plan in ends],
            ends,
            rank=rank,
            group=dist.group.WORLD,
        )
    with pytest.raises(SwitchError) as caught:
        Switcher(part, *build_pair(*ends[0], device), device=device).run()
    return str(caught.value)


def test_hosts_that_plan_otherwise_are_noticed_before_the_first_round():
    (message,) = {*run_ranks(with_another_planner, 4)}
    assert "rank 0 failed in preparation: plans another switch" in message


def bereaved(rank: int, folder: str, early: bool) -> None:
    torch.set_num_threads(1)
    device = open_device("emulated", index=rank)
    store = f"file://{folder}/store"
    dist.init_process_group(device.process_group_backend, init_method=store, rank=rank, world_size=4)
    ends = both_ways()

    def die(*_: object) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 0 and not early:
        host_plan._scattered = die
    try:
        plan_for_host(die if early else lambda: plans_of(ends), ends, rank=rank, group=dist.group.WORLD)
    except CollectiveFailed as error:
        with open(f"{folder}/{rank}", "w") as file:
            file.write(str(error))
    os._exit(0)


@pytest.mark.parametrize("early", [True, False], ids=["while it plans", "before it sends"])
def test_no_rank_waits_for_a_planner_that_was_killed(tmp_path, early):
    ranks = [processes().Process(target=bereaved, args=(rank, str(tmp_path), early)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(patience(100))
        assert not process.is_alive(), "a rank hangs"
    assert all((tmp_path / str(rank)).read_text() for rank in (1, 2, 3))

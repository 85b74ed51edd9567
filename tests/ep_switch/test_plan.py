"""Plans, as the module docstring states them, on random switches: run on element numbers, two rounds in flight."""

from __future__ import annotations

import dataclasses
import os
import random
import subprocess
import sys
from collections import defaultdict
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.ep_switch import Layout, Plan, Topology, plan_switch
from fusion.ep_switch import plan as planning
from fusion.ep_switch.moves import Moves
from fusion.model import Parallel, unit_bytes
from fusion.model.formats import EMBEDDED
from tests.ep_switch.digests import CONFIG, WORLD4, digest_of_plan
from tests.ep_switch.oracle import (
    SIZES,
    STACKED,
    VLLM_ASCEND,
    check_contents,
    check_traffic,
    random_switch,
    random_switch_of_formats,
    random_switch_of_stacks,
    sent_bytes,
    view,
)
from tests.helpers import tiny_config

BUSIEST, SLACK = 1.1, 4


@st.composite
def switches(draw: st.DrawFn):
    return random_switch(lambda options: draw(st.sampled_from(list(options))), draw(st.sampled_from((2, 4, 6, 8))))


@settings(max_examples=5)
@given(switches())
def test_invariants(case):
    check(case)


@pytest.mark.extended
@settings(max_examples=30)
@given(switches())
def test_invariants_of_more(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=200)
@given(switches())
def test_invariants_of_many(case):
    check(case)


@st.composite
def switches_of_formats(draw: st.DrawFn):
    return random_switch_of_formats(lambda options: draw(st.sampled_from(list(options))))


@settings(max_examples=5)
@given(switches_of_formats())
def test_invariants_between_formats(case):
    check(case)


@pytest.mark.extended
@settings(max_examples=30)
@given(switches_of_formats())
def test_invariants_between_formats_of_more(case):
    check(case)


@st.composite
def switches_of_stacks(draw: st.DrawFn):
    return random_switch_of_stacks(lambda options: draw(st.sampled_from(list(options))))


@settings(max_examples=5)
@given(switches_of_stacks())
def test_invariants_between_stacks_of_experts(case):
    check(case)


@pytest.mark.parametrize("bucket_bytes", [2048, 6144])
def test_senders_are_balanced_where_eight_rows_are_due_from_three(bucket_bytes):
    """A share of whole rows would be half of another: rows are cut."""
    config = tiny_config(False, **SIZES, num_hidden_layers=1, num_key_value_heads=2, tie_word_embeddings=True)
    source = Layout(config, Parallel(6, tp=2), tuple(range(6)), torch.float32, bucket_bytes, STACKED)
    target = Layout(config, Parallel(2, tp=2), (0, 1), torch.float32, bucket_bytes, VLLM_ASCEND)
    check((source, target, bucket_bytes, Topology.single_node(), False))


@pytest.mark.extended
@settings(max_examples=30)
@given(switches_of_stacks())
def test_invariants_between_stacks_of_experts_of_many(case):
    check(case)


@pytest.mark.slow
@settings(max_examples=200)
@given(switches_of_formats())
def test_invariants_between_formats_of_many(case):
    check(case)


@pytest.mark.parametrize(
    "seed",
    [5420, *(pytest.param(seed, marks=pytest.mark.extended) for seed in (414, 489, 964, 2977, 3753, 4933, 6011))],
)
def test_an_order_by_clusters_keeps_the_bound_where_stacks_of_experts_are_large(seed, monkeypatch):
    draw = random.Random(seed)
    case = random_switch_of_formats(lambda options: draw.choice(list(options)))
    check(case)
    assert not plan_switch(*case).parked
    monkeypatch.setattr(planning, "TRIES", tuple(one for one in planning.TRIES if one[2] == "slabs"))
    assert plan_switch(*case).parked


def without_an_order(case):
    """Check a plan as if no order had been found that keeps the bound; return it."""
    with patch.object(planning, "TRIES", ()):
        check(case)
        plan = plan_switch(*case)
    return plan


@pytest.mark.parametrize(
    "kind, seed",
    [
        ("formats", 0),
        ("formats", 4),
        ("embedded", 3),
        pytest.param("formats", 2, marks=pytest.mark.extended),
        pytest.param("embedded", 0, marks=pytest.mark.extended),
    ],
)
def test_a_parked_source_keeps_every_invariant(kind, seed):
    """Stacks of experts, relayed elements, a source that is kept; random ones with `-m extended`."""
    draw = random.Random(seed)
    choose = lambda options: draw.choice(list(options))  # noqa: E731
    plan = without_an_order(random_switch_of_formats(choose) if kind == "formats" else random_switch(choose, 4))
    assert plan.parked or plan.keep


@pytest.mark.extended
@settings(max_examples=4)
@given(switches())
def test_a_parked_source_keeps_every_invariant_between_layouts(case):
    without_an_order(case)


@pytest.mark.extended
@settings(max_examples=10)
@given(switches_of_formats())
def test_a_parked_source_keeps_every_invariant_between_formats(case):
    without_an_order(case)


@pytest.mark.slow
@settings(max_examples=200)
@given(switches_of_formats())
def test_a_parked_source_keeps_every_invariant_between_many_formats(case):
    without_an_order(case)


def check(case):
    plan = plan_switch(*case)
    most = check_contents(plan)
    for rank in plan.ranks:
        assert plan.peak_bytes(rank) == most[rank] + sum(plan.wire_bytes(rank))
        assert plan.peak_bytes(rank) <= bound(plan, rank) == plan.bound_bytes(rank)
    check_traffic(plan, BUSIEST)
    check_rounds(plan)
    assert plan_switch(*case) == plan
    check_in_place(plan)


def check_in_place(plan):
    """Check the rounds of an exchange without buffers: all moves once, and weights within the plan's peak."""
    larger = plan.in_place()
    most = check_contents(larger)
    assert len(larger.rounds) == 0 or len(larger.rounds) >= len(plan.rounds) / 4
    assert sorted(move for one in larger.rounds for move in one.moves) == sorted(
        move for one in plan.rounds for move in one.moves
    )
    assert all(most[rank] <= plan.peak_bytes(rank) for rank in plan.ranks)


def bound(plan: Plan, rank: int) -> int:
    before, after = plan.source.nbytes(rank), plan.target.nbytes(rank)
    most = max(before, after)
    if plan.keep:
        sizes = plan.target.unit_nbytes(rank)
        most = before + after - sum(sizes[unit] for unit in plan.shared_units(rank))
    return most + SLACK * plan.bucket_bytes + max(largest_external(end, rank) for end in (plan.source, plan.target))


def largest_external(layout: Layout, rank: int) -> int:
    """Bytes of the largest tensor that another format than the embedded one leaves whole though it does not fit a
    unit, or of the stacks of a layer's experts that do not; as stored, with what aligns their tensors."""
    if layout.format == EMBEDDED or rank not in layout.ranks:
        return 0
    sizes: dict[object, int] = defaultdict(int)
    whole: dict[tuple[int | None, str, bool], int] = defaultdict(int)
    for unit in layout.units(rank):
        ends = [*(start for _, start in unit.entries[1:]), unit.numel]
        for (param, start), end in zip(unit.entries, ends, strict=True):
            stacked = param.stack is not None or "routed_experts" in param.name
            whole[param.layer, param.stack or param.name, stacked] += (end - start) * layout.dtype.itemsize
    for (layer, name, stacked), size in whole.items():
        if size > unit_bytes(layout.bucket_bytes):
            sizes[layer if stacked else name] += size
    return max(sizes.values(), default=0)


def check_rounds(plan: Plan) -> None:
    """Rounds within half a bucket; steps that are the rounds; buffers and traffic that are the rounds' sums."""
    wide = max(plan.source.dtype.itemsize, plan.target.dtype.itemsize)
    wire: dict[int, int] = defaultdict(int)
    received: dict[int, int] = defaultdict(int)
    for round_ in plan.rounds:
        sent: dict[int, int] = defaultdict(int)
        written: dict[int, int] = defaultdict(int)
        all_moves = [*round_.moves]
        for move in all_moves:
            written[move.target_rank] += move.numel
            if not move.local:
                sent[move.source_rank] += move.numel
                received[move.target_rank] += move.numel * plan.wire_dtype.itemsize
        assert max([*sent.values(), *written.values()], default=0) * wide <= plan.bucket_bytes // 2
        for rank, numel in sent.items():
            wire[rank] = max(wire[rank], 2 * numel * plan.wire_dtype.itemsize)
        assert round_.exchange == any(not move.local for move in all_moves)
        by_rank = {rank: round_.by_peer(rank) for rank in plan.ranks}
        for rank, (copied, send, receive) in by_rank.items():
            mine = [*copied, *(m for moves in send.values() for m in moves)]
            assert sorted(mine) == sorted(move for move in all_moves if move.source_rank == rank)
            for peer, moves in receive.items():
                assert by_rank[peer][1][rank] == moves, "both ends in the same order"
    for rank in plan.ranks:
        assert plan.wire_bytes(rank)[0] == wire[rank]
        assert sum(plan.received_bytes(rank).values()) == received[rank]


def test_rounds_in_place_are_larger_where_nothing_is_relayed():
    plan = plan_switch(Layout(CONFIG, Parallel(4, 4), WORLD4), Layout(CONFIG, Parallel(4, ep=4), WORLD4), 1 << 14)
    assert len(plan.in_place().rounds) == -(-len(plan.rounds) // 4)
    relayed = plan_switch(plan.source, plan.target, 1 << 14, Topology(1, 2, 4, (9.0, 9.0, 1.0, 1.0)))
    assert relayed.relays and relayed.in_place() is relayed, "what is relayed arrived two rounds before"


def test_equal_layouts_share_everything():
    layout = Layout(CONFIG, Parallel(4, 2, 2), WORLD4)
    plan = plan_switch(layout, layout, 1 << 14)
    assert not plan.rounds and len(plan.shared_units(0)) == len(layout.units(0))


def test_another_dtype_is_copied_where_it_lies():
    source, target = (Layout(CONFIG, Parallel(4, 2, 2), WORLD4, dtype) for dtype in (torch.float32, torch.bfloat16))
    plan = plan_switch(source, target, 1 << 16)
    assert not plan.shared and all(move.local for round_ in plan.rounds for move in round_.moves)
    assert plan.wire_bytes(0) == (0, 0) and plan.wire_dtype == torch.bfloat16


def test_what_is_hosted_is_taken_but_not_moved():
    source, target = Layout(CONFIG, Parallel(2, 2), (0, 1)), Layout(CONFIG, Parallel(1), (0, 1), bucket_bytes=1 << 14)
    hosted = tuple((0, unit) for unit in range(0, len(target.units(0)), 2))
    plan = plan_switch(source, target, 1 << 14, hosted=hosted)
    written = {(m.target_rank, m.target.unit) for r in plan.rounds for m in r.moves}
    taken = {unit for round_ in plan.rounds for unit in round_.allocate_before}
    shared = {(rank, unit) for rank, unit, _ in plan.shared}
    assert not written & set(hosted) and set(hosted) - shared <= taken
    assert written | set(hosted) | shared == {(rank, i) for rank in (0, 1) for i in range(len(target.units(rank)))}


def test_a_far_group_takes_each_byte_in_once_and_passes_it_on():
    """Two nodes of four; four ranks of the second need all that two of the first have half each of."""
    topology = Topology(1, 4, 8, (100.0, 100.0, 10.0, 10.0))
    source, target = Layout(CONFIG, Parallel(2, 2), (0, 1)), Layout(CONFIG, Parallel(1), (4, 5, 6, 7))
    plan = plan_switch(source, target, 1 << 16, topology, keep=True)
    size, across = target.nbytes(4), [plan.received_bytes(rank)["supernode"] for rank in target.ranks]
    assert sum(across) == pytest.approx(size, rel=0.02), "once in all, alignment aside"
    assert max(across) < 1.1 * size / 4
    sent = sent_bytes(plan)
    passed = [sent[rank, "node"] for rank in target.ranks]
    assert max(passed) < 1.1 * sum(passed) / 4
    assert any(move.relayed for round_ in plan.rounds for move in round_.moves)


def test_links_that_are_nearly_as_fast_are_not_spared():
    topology = Topology(1, 4, 8, (100.0, 100.0, 95.0, 10.0))
    source, target = Layout(CONFIG, Parallel(2, 2), (0, 1)), Layout(CONFIG, Parallel(1), (4, 5, 6, 7))
    plan = plan_switch(source, target, 1 << 16, topology, keep=True)
    assert not any(move.relayed for round_ in plan.rounds for move in round_.moves)


def test_neighbours_in_storage_move_as_one():
    """An expert's gate, up and down lie in one unit on both ends."""
    source, target = Layout(CONFIG, Parallel(2, 1, 2), (0, 1)), Layout(CONFIG, Parallel(2, 1, 2), (2, 3))
    plan = plan_switch(source, target, 1 << 20, keep=True)
    moves = [move for round_ in plan.rounds for move in round_.moves if ".experts." in move.name]
    assert all(len(move.regions) == 3 and move.shape == (3 * 64 * 64,) for move in moves)
    assert len(moves) == CONFIG.num_layers * CONFIG.num_experts


PAIRS = [
    (Parallel(4, 2, 2), Parallel(4, 1, 4)),
    (Parallel(4, 1, 4), Parallel(4, 4, 1)),
    (Parallel(4, 2, pp=2), Parallel(4, 1, 4)),
    (Parallel(4, 4, etp=4), Parallel(4, 1, 4)),
    (Parallel(4, 1, 1, pp=4), Parallel(4, 1, 4)),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
def test_rounds_are_nearly_full(pair):
    """No more than a quarter more rounds than the busiest rank needs at half a bucket each."""
    for one, other in (pair, pair[::-1]):
        source, target = (Layout(CONFIG, grid, WORLD4, bucket_bytes=1 << 16) for grid in (one, other))
        plan = plan_switch(source, target, 1 << 16)
        work: dict[tuple[str, int], int] = defaultdict(int)
        for move in (move for round_ in plan.rounds for move in round_.moves):
            work["write", move.target_rank] += move.numel * 4
            work["send", move.source_rank] += 0 if move.local else move.numel * 4
        assert len(plan.rounds) <= 1.25 * max(work.values()) / (1 << 15) + 3


IN_ANOTHER_PROCESS = """
from tests.ep_switch.digests import digest_of_plan
print(*digest_of_plan())
"""


def test_every_process_makes_the_same_plan():
    """Whatever its hashes of strings are: they differ from those of this process."""
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS],
        env={"PYTHONHASHSEED": seed, "PATH": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [str(part) for part in digest_of_plan()]


def test_the_oracle_finds_a_wrong_plan():
    """It would not be one if it accepted anything."""
    plan = plan_switch(Layout(CONFIG, Parallel(2, 2), (0, 1)), Layout(CONFIG, Parallel(1), (0, 1)), 1 << 16)
    rounds = plan.rounds
    moves = list(rounds[0].moves)
    shifted = moves[0]._replace(source=moves[0].source._replace(offset=moves[0].source.offset + 1))
    wrong_moves = [shifted, *moves[1:]], moves[1:], [moves[0], *moves]
    wrong = [(dataclasses.replace(rounds[0], moves=Moves.of(some)), *rounds[1:]) for some in wrong_moves]
    early = dataclasses.replace(rounds[0], release_after=rounds[0].release_after + rounds[-1].release_after)
    never = dataclasses.replace(rounds[-1], release_after=())
    assert rounds[-1].release_after
    wrong += [(early, *rounds[1:]), (*rounds[:-1], never)]
    for other_rounds in wrong:
        with pytest.raises(AssertionError):
            check_contents(dataclasses.replace(plan, rounds=other_rounds))


def test_places_are_views_of_storage():
    layout = Layout(CONFIG, Parallel(2, 2), (0, 1))
    units = [torch.arange(unit.numel) for unit in layout.units(1)]
    for name, region, place in layout.places(1):
        shape = tuple(stop - start for start, stop in region)
        numbers = view([unit.numpy() for unit in units], place, shape)
        assert torch.equal(place.view(units, shape), torch.from_numpy(numbers.copy())), name

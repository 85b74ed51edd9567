"""The plan's invariants, as its module docstring states them, on random layouts against whole tensors in numpy."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.ep_switch import Layout, Plan, plan_switch
from fusion.ep_switch.layout import intersect, narrow, numel, subtract
from fusion.model import Parallel, Part, global_params
from tests.helpers import tiny_config

SMALL = dict(vocab_size=16, hidden_size=8, intermediate_size=16, head_dim=4, moe_intermediate_size=8)
CONFIGS = [
    tiny_config(**(SMALL | kind))
    for kind in (
        dict(),
        dict(num_experts=4, num_hidden_layers=1, tie_word_embeddings=False),
        dict(experts=False, num_attention_heads=8, num_key_value_heads=2),
        dict(experts=False, num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=False),
    )
]


@st.composite
def layouts(draw: st.DrawFn, config, most_ranks: int = 8) -> Layout:
    def fits(parallel: Parallel) -> bool:
        try:
            parallel.check(config, "parallel")
        except ValueError:
            return False
        return True

    sizes = [1, 2, 4, 8]
    grids = [Parallel(w, tp, ep) for w in sizes for tp in sizes for ep in sizes if w % tp == 0 and w % ep == 0]
    parallel = draw(st.sampled_from([grid for grid in grids if fits(grid)]))
    engines = draw(st.integers(1, most_ranks // parallel.world))
    first = draw(st.integers(0, most_ranks - engines * parallel.world))
    ranks = list(range(first, first + engines * parallel.world))
    if draw(st.booleans()):
        ranks.reverse()
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    return Layout(config, parallel, tuple(ranks), dtype, draw(st.sampled_from([1 << 8, 1 << 12, 1 << 20])))


@st.composite
def switches(draw: st.DrawFn) -> tuple[Layout, Layout, int]:
    config = draw(st.sampled_from(CONFIGS))
    return draw(layouts(config)), draw(layouts(config)), draw(st.sampled_from([64, 1000, 1 << 13, 1 << 20]))


def whole_tensors(config) -> dict[str, torch.Tensor]:
    """Every element of every global tensor is a number of its own."""
    tensors, first = {}, 1
    for name, shape in global_params(config).items():
        size = int(np.prod(shape))
        tensors[name] = torch.from_numpy(np.arange(first, first + size, dtype=np.int64).reshape(shape))
        first += size
    return tensors


def local_tensors(layout: Layout, whole: dict[str, torch.Tensor]) -> dict[int, dict[str, torch.Tensor]]:
    """rank → local tensors, cut out of the whole ones."""
    found: dict[int, dict[str, torch.Tensor]] = {}
    for rank in layout.ranks:
        found[rank] = {}
        for param in layout.params(rank):
            local = found[rank][param.name] = torch.zeros(param.shape, dtype=torch.int64)
            for part in param.parts:
                part.view(local).copy_(whole[part.name][tuple(slice(*span) for span in part.region)])
    return found


@settings(max_examples=40, deadline=None)
@given(switches())
def test_invariants(case):
    source, target, bucket_bytes = case
    plan = plan_switch(source, target, bucket_bytes)
    whole = whole_tensors(source.config)
    have, want = local_tensors(source, whole), local_tensors(target, whole)

    check_every_element_is_written_once(plan, have, want)
    check_only_what_is_missing_travels(plan)
    check_rounds_are_bounded(plan)
    check_storage_order(plan)
    assert plan_switch.__wrapped__(source, target, bucket_bytes) == plan
    assert hash(plan) == hash(plan_switch(source, target, bucket_bytes))


def check_every_element_is_written_once(plan: Plan, have, want) -> None:
    written = {rank: {name: torch.zeros_like(local) for name, local in params.items()} for rank, params in want.items()}
    times = {rank: {name: torch.zeros_like(local) for name, local in params.items()} for rank, params in want.items()}
    for round_ in plan.rounds:
        for move in round_.moves:
            taken = move.source.part.view(have[move.source_rank][move.source.param])
            move.target.part.view(written[move.target_rank][move.target.param]).copy_(taken)
            move.target.part.view(times[move.target_rank][move.target.param]).add_(1)
            assert move.name == move.source.part.name == move.target.part.name
            assert move.region == move.source.part.region == move.target.part.region
    for rank, params in want.items():
        for name, local in params.items():
            assert torch.equal(written[rank][name], local) and bool((times[rank][name] == 1).all())


def check_only_what_is_missing_travels(plan: Plan) -> None:
    travelled: dict[int, int] = defaultdict(int)
    for round_ in plan.rounds:
        for move in round_.moves:
            travelled[move.target_rank] += 0 if move.local else move.numel
    for rank in plan.target.ranks:
        held: dict[str, list] = defaultdict(list)
        for place in plan.source.places(rank):
            held[place.part.name].append(place.part.region)
        missing = 0
        for place in plan.target.places(rank):
            rest = [place.part.region]
            for box in held[place.part.name]:
                hits = [(old, intersect(old, box)) for old in rest]
                rest = [piece for old, hit in hits for piece in (subtract(old, hit) if hit else [old])]
            missing += sum(map(numel, rest))
        assert travelled[rank] == missing


def check_rounds_are_bounded(plan: Plan) -> None:
    itemsize = max(plan.source.dtype.itemsize, plan.target.dtype.itemsize)
    for round_ in plan.rounds:
        sent: dict[int, int] = defaultdict(int)
        written: dict[int, int] = defaultdict(int)
        for move in round_.moves:
            sent[move.source_rank] += 0 if move.local else move.numel * itemsize
            written[move.target_rank] += move.numel * itemsize
        assert max(sent.values()) <= plan.bucket_bytes and max(written.values()) <= plan.bucket_bytes


def check_storage_order(plan: Plan) -> None:
    all_source = {(rank, i) for rank in plan.source.ranks for i in range(len(plan.source.buckets(rank)))}
    live, allocated = all_source - set(plan.unread), set()
    assert len(live) + len(plan.unread) == len(all_source)
    for index, round_ in enumerate(plan.rounds):
        assert not allocated & set(round_.allocate_before)
        allocated |= set(round_.allocate_before)
        reads = {(move.source_rank, move.source.bucket) for move in round_.moves}
        writes = {(move.target_rank, move.target.bucket) for move in round_.moves}
        assert reads <= live and writes <= allocated and set(round_.allocate_before) <= writes
        later = {(m.source_rank, m.source.bucket) for r in plan.rounds[index + 1 :] for m in r.moves}
        assert set(round_.release_after) == reads - later
        live -= set(round_.release_after)
    assert not live
    assert allocated == {(rank, i) for rank in plan.target.ranks for i in range(len(plan.target.buckets(rank)))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_layouts_exchange_nothing(dtype):
    config, parallel, ranks = CONFIGS[0], Parallel(4, 2, 2), (0, 1, 2, 3)
    plan = plan_switch(Layout(config, parallel, ranks), Layout(config, parallel, ranks, dtype), 1 << 14)
    assert all(move.local for round_ in plan.rounds for move in round_.moves)
    assert all(not step.exchange for rank in ranks for step in plan.steps(rank))


def test_replicas_share_the_sending():
    """TP2 on four ranks has two replicas; two further ranks need all of it, half from each pair."""
    config = CONFIGS[2]
    plan = plan_switch(Layout(config, Parallel(4, 2), (0, 1, 2, 3)), Layout(config, Parallel(1), (4, 5)), 1 << 12)
    sent = [sum(m.numel for r in plan.rounds for m in r.moves if m.source_rank == rank) for rank in range(4)]
    assert sum(sent) == 2 * sum(int(np.prod(shape)) for shape in global_params(config).values())
    assert max(sent) < 1.02 * min(sent)


PAIRS = [
    (Parallel(4, 2, 2), Parallel(4, 1, 4)),
    (Parallel(4, 1, 4), Parallel(4, 4, 1)),
    (Parallel(4, 4, 4), Parallel(4, 1, 1)),
    (Parallel(4, 2, 4), Parallel(4, 4, 2)),
    (Parallel(2, 2, 1), Parallel(2, 1, 2)),
    (Parallel(2, 2, 1), Parallel(2, 1, 1)),
]


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}")
@pytest.mark.parametrize("bucket_bytes", [1 << 17, 1 << 18])
def test_peak_stays_within_four_buckets(pair, bucket_bytes):
    """Weights and wire buffers never exceed max(A, B) by more than four of the largest storage units, both ways.

    The shards are 5 to 40 buckets, so a plan that kept both copies would exceed it by far.
    """
    config = tiny_config(num_hidden_layers=6, hidden_size=64, moe_intermediate_size=64, vocab_size=128)
    for one, other in (pair, pair[::-1]):
        source, target = (
            Layout(config, grid, tuple(range(grid.world)), bucket_bytes=bucket_bytes) for grid in (one, other)
        )
        plan = plan_switch(source, target, bucket_bytes)
        for rank in plan.ranks:
            unit = max(bucket_bytes, *source.bucket_nbytes(rank), *target.bucket_nbytes(rank))
            assert plan.peak_bytes(rank) <= max(source.nbytes(rank), target.nbytes(rank)) + 4 * unit


def test_narrowing_a_transposed_expert():
    part = Part("w", ((4, 8), (0, 6)), ((3, 4), (10, 16), (0, 4)), transposed=True)
    stack = torch.arange(5 * 20 * 7).view(5, 20, 7)
    inner = narrow(part, ((5, 7), (2, 6)))
    assert torch.equal(inner.view(stack), part.view(stack)[1:3, 2:6])

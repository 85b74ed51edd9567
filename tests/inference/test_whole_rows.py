"""Small steps of engines on several ranks, with the operators of a card: every rank computes all of its rows, and the
host waits for no layer."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from fusion.inference import EmbeddedEngine, Request
from fusion.model import Mesh, ModelConfig, Parallel, RowSplit, Transformer, load_weights, whole_rows
from fusion.model import parallel as layouts_of_ranks
from fusion.model.collectives import MAX_GATHERED_ROWS, MAX_WHOLE_ROWS, may_be_whole, shard_sizes
from fusion.npu.operators import operators_of
from tests.families import family_checkpoint
from tests.helpers import run_ranks
from tests.inference.engines import by_id, checkpoint, engine, generate, requests
from tests.pairwise import axes, is_wide, thinned
from tests.rollouts import rollout_config

LAYOUTS = [
    Parallel(2, tp=2),
    Parallel(2, tp=2, ep=2),
    Parallel(2, ep=2),
    Parallel(4, ep=4),
    Parallel(4, tp=2, ep=4),
    Parallel(4, tp=4, ep=2),
    Parallel(4, tp=2, ep=2, pp=2),
    Parallel(4, tp=2, ep=2, etp=2),
]


def wanted() -> list[Request]:
    return requests(9, max_tokens=12)


@contextmanager
def with_operators(device: Any, name: str):
    before, device.operators = device.operators, operators_of("emulated", name)
    try:
        yield
    finally:
        device.operators = before


def generate_rank(
    rank: int, device: Any, folder: str, parallel: Parallel, invariant: bool = False, least: int = 16
) -> Any:
    """Returns the outputs, and all plans of the steps' rows. From ``least`` EP ranks on rows are dispatched. In
    float64: ranks that add in another order choose the same experts then."""
    with with_operators(device, "ascend"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(layouts_of_ranks, "MIN_DISPATCH_RANKS", least)
        mesh = Mesh.create(parallel, new_dispatch_group=dist.new_group)
        config = rollout_config(
            max_length=256, max_seqs=8, max_batch_tokens=64, max_kv_tokens=160, batch_invariant=invariant
        )
        model = Transformer(
            ModelConfig.from_hf(folder), mesh, device, torch.float64, batch_invariant=config.engine.batch_invariant
        )
        load_weights(model, folder)
        made, planned = EmbeddedEngine(model, mesh, device, config, seed=5, routing=True), set()
        made.allocate_kv()
        plan = made.forward._plan_rows
        made.forward._plan_rows = lambda *args: planned.add(rows := plan(*args)) or rows
        if rank == 0:
            made.submit(wanted())
        outputs = made.run()
        made.release_kv()
        return outputs, planned


def check(folder: str, parallel: Parallel, least: int = 16) -> list[Any]:
    """Generates as one rank with the plain operators does; returns the results."""
    results = run_ranks(generate_rank, parallel.world, folder, parallel, False, least)
    outputs = [output for mine, _ in results for output in mine]
    alone = generate(engine(torch.float64, routing=True, folder=folder), wanted())
    found, routing = by_id(outputs), {output.request_id: output.routing for output in outputs}
    for output in alone:
        tokens, logprobs = found[output.request_id]
        assert tokens == output.tokens and logprobs == pytest.approx(output.logprobs, abs=1e-5)
        assert torch.equal(routing[output.request_id], output.routing)
    assert all(rows.whole == (parallel.etp == 1) for _, planned in results for rows in planned)
    return results


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
@pytest.mark.parametrize("parallel", thinned(LAYOUTS, axes, extended=is_wide), ids=str)
def test_every_layout_samples_the_same_tokens(parallel):
    check(checkpoint(), parallel)


SHARED = [
    ("qwen2_moe", Parallel(2, tp=2, ep=2)),
    ("deepseek_v3", Parallel(4, tp=2, ep=4)),
    pytest.param("qwen2_moe", Parallel(4, tp=2, ep=4), marks=pytest.mark.extended),
    pytest.param("qwen2_moe", Parallel(2, tp=2), marks=pytest.mark.extended),
    pytest.param("deepseek_v3", Parallel(2, tp=2, ep=2), marks=pytest.mark.extended),
]


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
@pytest.mark.parametrize(("kind", "parallel"), SHARED, ids=str)
def test_shared_experts_are_summed_once(kind, parallel, tmp_path):
    check(family_checkpoint(tmp_path, kind), parallel)


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
@pytest.mark.parametrize(
    ("kind", "parallel"),
    [
        ("qwen3_moe", Parallel(4, tp=2, ep=4)),
        pytest.param("qwen3_moe", Parallel(2, ep=2), marks=pytest.mark.extended),
        pytest.param("deepseek_v3", Parallel(4, tp=2, ep=4), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_operators_dispatch_rows_to_experts(kind, parallel, tmp_path):
    """While all ranks have rows; the others are gathered."""
    for _, planned in check(family_checkpoint(tmp_path, kind), parallel, least=2):
        assert {rows.dispatched for rows in planned} == {True, False}
        assert all(min(rows.by_ep_rank) > 0 for rows in planned if rows.dispatched)


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
def test_no_rows_are_whole_where_bits_must_not_depend_on_the_batch():
    parallel = Parallel(2, tp=2, ep=2)
    for _, planned in run_ranks(generate_rank, 2, checkpoint(), parallel, True):
        assert planned and not any(rows.whole for rows in planned)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Parallel, list[int]]:
    tp, ep = draw(st.sampled_from([(1, 2), (1, 8), (2, 2), (2, 4), (4, 2), (8, 1), (2, 8)]))
    dp = draw(st.integers(1, 3)) * max(1, ep // tp)
    counts = st.lists(st.integers(0, 2 * MAX_WHOLE_ROWS), min_size=dp, max_size=dp)
    return Parallel(tp * dp, tp=tp, ep=ep), draw(counts | st.lists(st.integers(0, 9), min_size=dp, max_size=dp))


@given(layouts(), st.sampled_from([0, 5, 512]))
def test_all_ranks_of_an_ep_group_plan_alike(case, max_dispatched):
    """A plan is bounded, names the shards of the group's ranks in order, and is the same on all that exchange rows.
    Rows are dispatched, in whatever number in total, if each rank has some and none too many."""
    parallel, counts = case
    assert may_be_whole(parallel)
    plans = [whole_rows(parallel, rank, counts, max_dispatched) for rank in range(parallel.world)]
    for axis in ("tp", "ep"):
        for group in parallel.groups(axis):
            assert len({(plans[rank].whole, plans[rank].by_ep_rank, plans[rank].dispatched) for rank in group}) == 1
    for group in parallel.groups("ep"):
        own = [counts[parallel.coordinate("dp", rank)] for rank in group]
        shards = tuple(
            shard_sizes(count, parallel.tp)[parallel.coordinate("tp", rank)]
            for count, rank in zip(own, group, strict=True)
        )
        gathered = sum(shards) if parallel.ep > parallel.tp else own[0]
        dispatched = parallel.ep > parallel.tp and 0 < min(shards) and max(shards) <= max_dispatched
        is_small = max(own) <= MAX_WHOLE_ROWS and (dispatched or gathered <= MAX_GATHERED_ROWS)
        for count, rank in zip(own, group, strict=True):
            spans = is_small and parallel.ep > parallel.tp
            assert plans[rank] == RowSplit(count, is_small, shards if spans else (), dispatched and is_small)


@pytest.mark.parametrize("parallel", [Parallel(), Parallel(4, tp=2, ep=2, etp=2), Parallel(6, tp=2, ep=3)], ids=str)
def test_layouts_whose_groups_do_not_nest_exchange_rows(parallel):
    assert not may_be_whole(parallel)

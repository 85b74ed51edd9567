"""Decode context parallelism: ranks that share the KV of each sequence sample what one rank with all of it does."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distqueue.payload.sweep import memory
from fusion.inference import EmbeddedEngine, Request
from fusion.inference.context import Context
from fusion.model import Mesh, ModelConfig, Parallel, Transformer, load_weights
from fusion.npu import open_device
from fusion.npu.operators import PagedRows, operators_of
from fusion.offload import HostPool
from fusion.rollout.kv_pool.files import KVFiles
from fusion.rollout.kv_pool.pool import KVPoolSpec
from tests.families import family_checkpoint
from tests.helpers import run_ranks, tiny_checkpoint
from tests.inference.engines import requests
from tests.inference.keeping import long, resumed, steps
from tests.inference.pooling import figures, moved
from tests.inference.test_verification import Guesses, truth_of
from tests.rollouts import rollout_config

LIMITS = dict(max_length=256, max_seqs=8, max_batch_tokens=70, block_size=32, temperature=0.0, max_kv_tokens=2048)
TOLERANCE = 1e-5


@cache
def folder(kind: str) -> str:
    """``gqa``: one key head; others: a family with latents."""
    if kind == "gqa":
        return tiny_checkpoint(tempfile.mkdtemp(), num_key_value_heads=1)
    return family_checkpoint(tempfile.mkdtemp(), kind, initializer_range=0.3)


# Pages


@given(st.integers(1, 4), st.sampled_from([1, 2, 16]), st.integers(0, 200))
def test_each_token_is_on_one_rank_and_the_first_tokens_fill_its_first_pages(ranks, page_size, tokens):
    positions = np.arange(tokens)
    own = [Context(ranks, rank, page_size) for rank in range(ranks)]
    holders = np.array([context.is_own(positions) for context in own])
    assert (holders.sum(0) == 1).all()
    assert (holders.argmax(0) == positions // page_size % ranks).all(), "page i on rank i mod c"
    for context, held in zip(own, holders, strict=True):
        for length in range(tokens + 1):
            assert context.count_own(np.array(length)) == held[:length].sum()
        # the place of each token among those of the rank is its page and offset there
        block, offset = np.divmod(positions[held], ranks * page_size)
        assert (block * page_size + offset % page_size == np.arange(held.sum())).all()


@pytest.mark.parametrize("table", ["plain", "cpu", "ascend", "cuda"])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_tables_return_the_log_sum_exp_of_the_scores(table, latent, dtype):
    operators, random_ = operators_of("emulated", table), torch.Generator().manual_seed(3)
    blocks, size, channels, values, heads = 6, 16, 24, 16 if latent else 24, 4
    shape = (blocks, 1, size, channels) if latent else (2 * blocks, 2, size, channels)
    pool = torch.randn(shape, generator=random_).to(dtype)
    q = torch.randn(3, heads, channels, generator=random_).to(dtype)
    lengths, blocks_RB = [1, 20, 33], torch.tensor([[4, 0, 0], [0, 5, 0], [2, 3, 1]])
    rows = PagedRows(
        blocks_RB.flatten(),
        torch.tensor([0, 3, 6]),
        torch.tensor(lengths),
        blocks_RB=blocks_RB.to(torch.int32),
        host_lengths=tuple(lengths),
    )
    width = values if latent else None
    scale = channels**-0.5
    with torch.inference_mode():
        out, lse = operators.partial_attention(q, pool, rows, width, scale)
    areas = operators.areas(pool, width)
    keys = torch.cat([area for area in areas], dim=-1) if latent else pool[:blocks]
    worth = keys[..., :values] if latent else pool[blocks:]
    for row, length in enumerate(lengths):
        k, v = (x[blocks_RB[row]].transpose(1, 2).flatten(0, 1)[:length].double() for x in (keys, worth))
        k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
        scores = torch.einsum("hc,shc->hs", q[row].double(), k) * scale
        wanted = torch.einsum("hs,shv->hv", scores.softmax(-1), v)
        near = 1e-5 if dtype is torch.float32 else 2e-2
        assert (lse[row].double() - scores.logsumexp(-1)).abs().max() < near and lse.dtype == torch.float32
        assert (out[row].double() - wanted).abs().max() < near


def merged_rank(rank: int, device: Any, ranks: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of this rank's heads to all tokens, merged and at once. Rank 0 alone holds a token of each row."""
    mesh, draw = Mesh.create(Parallel(ranks, tp=ranks, dcp=ranks)), torch.Generator().manual_seed(1)
    context, heads, rows, tokens = Context.of(mesh, ranks), 3, 5, 4 * ranks
    q, k, v = (torch.randn(n, ranks * heads, 8, generator=draw).to(dtype) for n in (rows, tokens, tokens))
    q = q * 30  # sums far apart: a rank may weigh nothing beside another
    own = slice(rank * heads, (rank + 1) * heads)
    gathered = context.gather_heads(q[:, own].to(device.torch_device)).cpu()
    assert torch.equal(gathered, q)
    scores = torch.einsum("nhc,shc->nhs", q, k).float()
    held = torch.from_numpy(context.is_own(np.arange(tokens)))
    visible = held.expand(rows, tokens).clone()
    visible[0] = visible[0] & (torch.arange(tokens) == 0)
    part = scores.masked_fill(~visible.unsqueeze(1), -torch.inf)
    out = torch.einsum("nhs,shv->nhv", part.softmax(-1).nan_to_num(), v.float()).to(dtype)
    merged = context.merge(out.to(device.torch_device), part.logsumexp(-1).to(device.torch_device))
    scores[0, :, 1:] = -torch.inf
    whole = torch.einsum("nhs,shv->nhv", scores.softmax(-1), v.float()).to(dtype)
    return merged.cpu(), whole[:, own]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_partial_attention_is_that_to_all_tokens(ranks, dtype):
    for merged, whole in run_ranks(merged_rank, ranks, ranks, dtype):
        torch.testing.assert_close(merged, whole, rtol=1e-2 if dtype is torch.bfloat16 else 1e-5, atol=1e-5)


# Engines


def build(device: Any, folder: str, parallel: Parallel, **options: Any) -> EmbeddedEngine:
    mesh = Mesh.create(parallel)
    store, routing = options.pop("store", None), options.pop("routing", False)
    dtype = options.pop("dtype", torch.float32)
    rollout = rollout_config(**(LIMITS | options))
    loaded = Transformer(ModelConfig.from_hf(folder), mesh, device, dtype)
    load_weights(loaded, folder)
    made = EmbeddedEngine(loaded, mesh, device, rollout, 5, routing, HostPool(device), kv_store=store)
    made.allocate_kv()
    return made


def everyone(parallel: Parallel, outputs: list) -> list:
    found = [None] * parallel.world
    torch.distributed.all_gather_object(found, outputs)
    return [output for mine in found for output in mine]


def submit(made: EmbeddedEngine, wanted: list[Request]) -> None:
    if made.mesh.rank == 0:
        made.submit(wanted)


def together(made: EmbeddedEngine) -> dict[str, Any]:
    """Prompts of several chunks, siblings, and requests that arrive while others decode."""
    wanted, had = [replace(one, params=replace(one.params, temperature=0.0)) for one in requests(9, 20)], {}
    submit(made, wanted[:5])
    outputs = steps(made, 3)
    submit(made, wanted[5:])
    resumed(wanted, everyone(made.mesh.parallel, outputs + made.run()), had)
    return had


def away(made: EmbeddedEngine) -> dict[str, Any]:
    """Suspended twice, with the memory released; the second time under other weights, which come in flight later."""
    wanted = [replace(one, params=replace(one.params, temperature=0.0, stop_token_ids=())) for one in requests(6, 30)]
    had, again = {}, wanted
    for turn in range(2):
        submit(made, again)
        outputs = steps(made, 9) + made.suspend()
        made.release_kv()
        if turn:
            change_weights(made)
        made.allocate_kv()
        made.resume()
        again = resumed(wanted, everyone(made.mesh.parallel, outputs), had)
    submit(made, again)
    outputs = steps(made, 6)
    change_weights(made)
    resumed(wanted, everyone(made.mesh.parallel, outputs + made.run()), had)
    return had


def change_weights(made: EmbeddedEngine) -> None:
    """Other weights, the same in every layout, under the next version."""
    with torch.no_grad():
        for parameter in made.model.parameters():
            parameter.mul_(1.01)
    made.policy_version += 1


def drafted(made: EmbeddedEngine) -> dict[str, Any]:
    """Drafts of the right tokens and of wrong ones, whose paths share blocks."""
    wanted = [replace(one, params=replace(one.params, temperature=0.0)) for one in requests(6, 24)]
    submit(made, wanted)
    plain: dict[str, Any] = {}
    resumed(wanted, everyone(made.mesh.parallel, made.run()), plain)
    made.scheduler.drafter = Guesses(truth_of(plain), children=2, seed=0)
    had: dict[str, Any] = {}
    submit(made, [replace(one, id=one.id) for one in wanted])
    resumed(wanted, everyone(made.mesh.parallel, made.run()), had)
    assert made.status()["accepted_tokens"] > 20
    return had


SCENARIOS = dict(together=together, away=away, drafted=drafted)


def engine_rank(rank: int, device: Any, folder: str, layouts: list[Parallel], scenario: str, options: dict) -> list:
    """What each layout generates, its figures, bytes of its KV cache, and where pages that are not used are NaN."""
    found, options = [], dict(options)
    if table := options.pop("operators", None):
        device = open_device("emulated", index=rank, operators=table)
    for parallel in layouts:
        made = build(device, folder, parallel, **options)
        nbytes = device.memory_by_owner()["kv"]
        for pool in made.cache.pools:
            pool.fill_(torch.nan)
        had = SCENARIOS[scenario](made)
        status = {name: value for name, value in made.status().items() if name != "tokens_per_s"}
        assert made.scheduler.blocks.available == made.scheduler.blocks.count
        found.append((had, status, nbytes, made.parked.blocks_copied_out))
        made.release_kv()
        del made
    return found


def compare(kind: str, scenario: str, parallel: Parallel, **options: Any) -> list:
    layouts = [replace(parallel, dcp=1), parallel]
    results = run_ranks(engine_rank, parallel.world, folder(kind), layouts, scenario, options)
    for (one, status, nbytes, parked), (shared, shared_status, shared_nbytes, shared_parked) in results:
        assert one.keys() == shared.keys() and one
        for id, (tokens, logprobs) in one.items():
            assert shared[id][0] == tokens
            assert max(abs(a - b) for a, b in zip(shared[id][1], logprobs, strict=True)) < TOLERANCE
        assert shared_status == status, "the same schedule"
        assert shared_nbytes * parallel.dcp <= nbytes * 1.02 and shared_nbytes < nbytes
        assert parked == shared_parked
    return results


GQA = [Parallel(2, tp=2, dcp=2), Parallel(4, tp=4, ep=2, dcp=2)]
OTHER = [Parallel(4, tp=4, dcp=4), Parallel(4, tp=2, ep=4, dcp=2), Parallel(4, tp=2, pp=2, dcp=2)]


@pytest.mark.parametrize("parallel", [*GQA, *(pytest.param(one, marks=pytest.mark.extended) for one in OTHER)], ids=str)
def test_grouped_queries_sample_the_same(parallel):
    compare("gqa", "together", parallel)


@pytest.mark.parametrize("kind", [pytest.param("deepseek_v2", marks=pytest.mark.extended), "deepseek_v3"])
def test_latents_sample_the_same(kind):
    compare(kind, "together", Parallel(2, tp=2, dcp=2))


@pytest.mark.parametrize(
    ("suspended", "kind"),
    [
        ("recompute", "gqa"),
        ("keep", "deepseek_v3"),
        pytest.param("recompute", "deepseek_v3", marks=pytest.mark.extended),
        pytest.param("keep", "gqa", marks=pytest.mark.extended),
    ],
)
def test_requests_that_leave_and_weights_that_change_in_flight(kind, suspended):
    results = compare(kind, "away", Parallel(2, tp=2, dcp=2), suspended=suspended)
    for (_, status, _, parked), _ in results:
        assert (parked > 0) == (status["kv_restored_tokens"] > 0) == (suspended == "keep")
        assert (status["recomputed_tokens"] > 0) == (suspended == "recompute")


@pytest.mark.parametrize("kind", ["gqa", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="fused"),
        pytest.param(dict(dtype=torch.float64), id="composed", marks=pytest.mark.extended),
        pytest.param(dict(operators="plain"), id="plain", marks=pytest.mark.extended),
    ],
)
def test_drafts_are_verified_over_shared_kv(kind, options):
    compare(kind, "drafted", Parallel(2, tp=2, dcp=2), **options)


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
@pytest.mark.parametrize("kind", ["gqa", "deepseek_v3"])
@pytest.mark.parametrize(
    "options",
    [
        dict(operators="ascend"),
        pytest.param(dict(operators="plain"), marks=pytest.mark.extended),
        pytest.param(dict(dtype=torch.float64), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_every_table_of_operators(kind, options):
    compare(kind, "together", Parallel(2, tp=2, dcp=2), **options)


def test_late_streams():
    arguments = folder("gqa"), [Parallel(2, tp=2, dcp=2)] * 2, "away", dict(suspended="keep")
    (one, *_), (other, *_) = run_ranks(engine_rank, 2, *arguments, device="adversarial")[0]
    assert one == other


def test_a_rank_stores_its_pages_alone():
    """The keys of a sequence's tokens, in one cache and in a shared one."""
    for pools, own in run_ranks(stored_rank, 2, folder("gqa")):
        for one, shared in pools:
            torch.testing.assert_close(one[own], shared, rtol=1e-4, atol=1e-5)


def stored_rank(rank: int, device: Any, folder: str) -> tuple[list[tuple[torch.Tensor, torch.Tensor]], list[int]]:
    """Return the keys of each layer without sharing, and those on this rank with it; and which tokens the latter are
    of."""
    prompt, kept = tuple(2 + i % 29 for i in range(85)), []
    for dcp in (1, 2):
        made = build(device, folder, Parallel(2, tp=2, dcp=dcp))
        submit(made, [Request("r", prompt, rollout_config().sampling_params(max_tokens=9))])
        steps(made, 4)
        (seq,), cache = made.scheduler.running, made.cache
        count = int(cache.context.count_own(np.array(seq.computed)))
        kept.append([pool[list(seq.blocks)].transpose(1, 2).flatten(0, 1)[:count].cpu() for pool in cache.pools])
        made.suspend()
        made.release_kv()
    return list(zip(*kept, strict=True)), [t for t in range(len(kept[0][0])) if cache.context.is_own(np.array(t))]


# KV that moves between engines


def pooled_rank(rank: int, device: Any, folder: str, root: str, sizes: tuple[int, int]) -> tuple[dict, dict, list]:
    """The same requests in one piece, and in chunks on two engines in turn, with this decode context parallelism."""
    engines = []
    for number, dcp in enumerate(sizes):
        store = KVFiles(KVPoolSpec("run"), number * 2 + rank, Path(root))
        made = build(device, folder, Parallel(2, tp=2, dcp=dcp), store=store, suspended="pool", routing=True)
        engines.append(made)
    wanted = [replace(one, params=replace(one.params, temperature=0.0)) for one in long(6, tokens=28)]
    whole: dict = {}
    submit(engines[0], wanted)
    resumed(wanted, everyone(engines[0].mesh.parallel, engines[0].run()), whole)
    again, had, turn, routes, charged = wanted, {}, 0, {}, []
    while again:
        made, turn = engines[turn % 2], turn + 1
        submit(made, [replace(request, chunk_tokens=12) for request in again])
        outputs = everyone(made.mesh.parallel, made.run())
        charged.append(made.pooled.store.nbytes)
        for output in outputs:
            routes.setdefault(output.request_id, []).append(output.routing)
        again = moved(wanted, outputs, had)
    for id, pieces in routes.items():
        assert len(torch.cat(pieces)) == len(wanted[0].prompt) + len(had[id][0]) - 1
    found = [(figures(made), made.status()["recomputed_tokens"]) for made in engines]
    for made in engines:
        made.pooled.store.close()
        made.release_kv()
    return whole, had, [*found, charged]


def run_pool(sizes: tuple[int, int]) -> list:
    with tempfile.TemporaryDirectory(dir=memory()) as root:
        results = run_ranks(pooled_rank, 2, folder("gqa"), root, sizes)
    whole, had, _ = results[0]
    assert {id: tokens for id, (tokens, _) in had.items()} == {id: tokens for id, (tokens, _) in whole.items()}
    for id, (_, logprobs) in whole.items():
        assert max(abs(a - b) for a, b in zip(had[id][1], logprobs, strict=True)) < TOLERANCE
    return [found for *_, found in results]


def test_pooled_kv_moves_between_engines_of_equal_sharing_each_rank_its_pages():
    bytes_of = {}
    for dcp in (1, 2):
        found = run_pool((dcp, dcp))
        for *engines, _ in found:
            for (hits, pulls, misses, damaged), recomputed in engines:
                assert pulls > 0 == hits == misses == damaged == recomputed
        bytes_of[dcp] = max(found[1][-1])  # rank 1 writes no routing
    assert 0 < bytes_of[2] < 0.6 * bytes_of[1], "files have headers"


def test_pooled_kv_of_another_sharing_is_not_found_and_computed_again():
    for *engines, _ in run_pool((1, 2)):
        for (hits, pulls, misses, damaged), recomputed in engines:
            assert misses > 0 < recomputed and hits == pulls == damaged == 0

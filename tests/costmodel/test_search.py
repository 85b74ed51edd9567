"""What is recommended fits, and is the fastest of what was looked at."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fusion.costmodel.fitting import advice, fitting_settings
from fusion.costmodel.hardware import Figure, hardware_named
from fusion.costmodel.memory import estimate_memory
from fusion.costmodel.presets import load_shape
from fusion.costmodel.roofline import Roofline, attention_pairs
from fusion.costmodel.search import Ranking, keys_of, phase_problems, problems, rank, with_shared_kv
from fusion.costmodel.setup import Setup, TrainingLimits, Workload
from fusion.costmodel.step_time import train_s
from fusion.model import Parallel
from tests.costmodel.counting import counting

ASCEND_910C = hardware_named("ascend_910c")
SHAPES = Path(__file__).resolve().parents[2] / "recipes" / "shapes"


def setup(name: str, dies: int) -> Setup:
    return Setup(load_shape(name, SHAPES).shape, ASCEND_910C, Parallel(dies), Parallel(dies))


def test_ranked_by_the_step_and_all_fit():
    ranking = rank(setup("qwen3_30b_a3b", 32))
    assert all(not pair.problems for pair in ranking.pairs)
    assert [pair.step_s for pair in ranking.pairs] == sorted(pair.step_s for pair in ranking.pairs)
    assert [plan.step_s for plan in ranking.deployments] == sorted(plan.step_s for plan in ranking.deployments)
    names = {plan.deployment for plan in ranking.deployments}
    assert {"colocated", "separate", "hybrid"} == names and ranking.deployments[0].deployment == "colocated"
    for plan in ranking.deployments:
        expected = {"separate": 32 - plan.train.world, "hybrid": 32, "colocated": 32}[plan.deployment]
        assert plan.infer.world == expected
        if plan.deployment == "hybrid":
            engine = max(plan.infer.tp, plan.infer.ep)
            assert plan.train.world % engine == 0 and (32 - plan.train.world) % engine == 0


def test_a_layout_that_is_given_is_kept():
    fixed = Parallel(32, tp=2, ep=8)
    ranking = rank(setup("qwen3_30b_a3b", 32), (fixed, None), num_exact=1)
    assert [pair.setup.train for pair in ranking.pairs] == [fixed] and ranking.num_candidates[0] == 1


def test_what_does_not_fit_is_said_with_numbers():
    ranking = rank(setup("pangu_718b", 32))
    assert not ranking.deployments and ranking.refused["train does not fit into HBM"] > 0
    said = " ".join(ranking.pairs[0].problems)
    assert "train takes" in said and "G of 60.0G a die" in said and "its host has" in said


def test_each_limit_is_a_problem_of_its_own():
    fits = rank(setup("qwen3_30b_a3b", 32), num_exact=1).pairs[0]
    small_host = replace(fits.setup, hardware=replace(ASCEND_910C, host_bytes=Figure(1e9, "test")))
    assert [text.split(" of ")[0] for text in problems(small_host, fits.memory)] == ["the optimizer state"]
    long = replace(fits.setup, workload=replace(fits.setup.workload, longest=10**8))
    assert problems(long, fits.memory) and "the KV cache holds" in problems(long, fits.memory)[0]


LONG = Workload(128 * 16, 2048.0, 32768.0, 131072)


def long_setup(name: str, dies: int, budget: int = 133120) -> Setup:
    return replace(setup(name, dies), workload=LONG, training=TrainingLimits(budget))


@cache
def ranking_of_384(long: bool) -> Ranking:
    return rank((long_setup if long else setup)("pangu_718b", 384))


def test_samples_of_128k_tokens_get_the_least_context_parallelism_with_which_they_fit():
    ranking = ranking_of_384(long=True)
    chosen = ranking.pairs[0].setup
    assert not ranking.pairs[0].problems and chosen.train.cp > 1
    assert f"parallel.train.cp={ranking.deployments[0].train.cp}" in keys_of(ranking.deployments[0])
    for cp in range(1, chosen.train.cp):
        if chosen.train.dp % cp == 0 and replace(chosen.train, cp=cp).misfit(chosen.shape.config) is None:
            fewer = replace(chosen, train=replace(chosen.train, cp=cp))
            assert fewer.train == chosen.train or phase_problems(fewer, estimate_memory(fewer))


def test_where_smaller_micro_batches_do_context_parallelism_is_not_chosen():
    ranking = ranking_of_384(long=False)
    assert {pair.setup.train.cp for pair in ranking.pairs} == {plan.train.cp for plan in ranking.deployments} == {1}


def test_a_given_layout_for_long_samples_is_refused_with_the_context_parallelism_that_fits():
    shared = ranking_of_384(long=True).pairs[0].setup
    alone = replace(shared, train=replace(shared.train, cp=1))
    assert any(
        text.startswith("train takes") and "activations" in text for text in problems(alone, estimate_memory(alone))
    )
    settings = fitting_settings(alone)
    assert settings is not None and settings["parallel.train.cp"] <= shared.train.cp
    assert f"parallel.train.cp={settings['parallel.train.cp']}" in advice(alone)


def test_activations_are_divided_and_a_step_takes_the_exchange_longer():
    one = replace(long_setup("pangu_718b", 768), train=Parallel(768, tp=4, ep=8, pp=16))
    activations, seconds = {}, {}
    for cp in (1, 2, 4):
        shared = replace(one, train=replace(one.train, cp=cp))
        activations[cp] = estimate_memory(shared).phases["train"]["activations"]
        roofline = Roofline(shared.shape, ASCEND_910C, shared.train)
        tokens = 16 * 133120
        work = tokens, 16 * attention_pairs(133120), 133120
        seconds[cp], exchanged = roofline.train_step_s(*work), counting(roofline, "links").train_step_s(*work)
        assert estimate_memory(shared).phases["train"]["weights"] == estimate_memory(one).phases["train"]["weights"]
        assert estimate_memory(shared).states_bytes == estimate_memory(one).states_bytes
    assert activations[2] < 0.6 * activations[1] and activations[4] < 0.35 * activations[1]
    assert 1 < 2 * seconds[2] / seconds[1] < 1.5 and 1 < 4 * seconds[4] / seconds[1] < 1.5 and exchanged > 0
    flat = replace(one, train=Parallel(768, tp=4, ep=32))  # no bubble, which more micro-batches of a replica shorten
    assert train_s(replace(flat, train=replace(flat.train, cp=4))) > train_s(flat)


def test_a_kv_cache_that_is_shared_holds_as_many_times_the_tokens_and_a_decode_step_reads_that_much_less():
    one = replace(setup("pangu_718b", 768), infer=Parallel(768, tp=8, ep=64))
    tokens, read, links = {}, {}, {}
    for dcp in (1, 2, 8):
        shared = replace(one, infer=replace(one.infer, dcp=dcp))
        sizes, roofline = estimate_memory(shared), Roofline(one.shape, ASCEND_910C, shared.infer)
        tokens[dcp] = sizes.kv_tokens
        hbm, sent_over = (counting(roofline, what).engine_step_s for what in ("hbm", "links"))
        read[dcp], links[dcp] = hbm(64, 64 * 100_000) - hbm(64, 0), sent_over(64, 64 * 100_000)
        assert sizes.phases["infer"]["kv"] == estimate_memory(one).phases["infer"]["kv"]
    for dcp in (2, 8):
        assert abs(tokens[dcp] - dcp * tokens[1]) <= dcp
        assert read[dcp] == pytest.approx(read[1] / dcp)
    row, layers = 64 * 2, one.shape.config.num_layers
    latent = one.shape.config.attention
    sent = latent.num_heads // 8 * (latent.cached_width + latent.kv_rank)  # queries over, outputs back
    assert links[8] - links[1] == row * layers * sent * 7


def test_samples_that_do_not_fit_the_kv_cache_get_the_least_sharing_with_which_they_do():
    """And none where they fit without."""
    ranking = ranking_of_384(long=False)
    assert {plan.infer.dcp for plan in ranking.deployments} == {pair.setup.infer.dcp for pair in ranking.pairs} == {1}
    layout = Parallel(768, tp=8, ep=64)
    alone = replace(ranking.pairs[0].setup, infer=layout)
    room = estimate_memory(alone).kv_tokens
    long = replace(alone, workload=replace(alone.workload, longest=3 * room))
    chosen = with_shared_kv(long, layout)
    assert chosen.dcp == 4 and estimate_memory(replace(long, infer=chosen)).kv_tokens >= 3 * room
    assert "parallel.infer.dcp=4" in advice(long)
    assert with_shared_kv(replace(long, shares_kv=False), layout) == layout
    assert with_shared_kv(replace(long, workload=replace(long.workload, longest=99 * room)), layout) == layout

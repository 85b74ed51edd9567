"""What is recommended fits, and is the fastest of what was looked at."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fusion.costmodel.hardware import Figure, hardware_named
from fusion.costmodel.presets import load_shape
from fusion.costmodel.search import problems, rank
from fusion.costmodel.setup import Setup
from fusion.model import Parallel

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

"""Families train alike in every layout, also where a stage has no sparse layer, and replay the routing of their own."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch

from fusion.model import Parallel
from fusion.training.algorithms import cross_entropy
from tests.families import family_checkpoint
from tests.helpers import run_ranks
from tests.training.ranks import Case, make_engine, my_share, sample_batch, train

BALANCED = {"load_balancing_coef": 0.05, "clip_grad": 1.0, "token_budget": 40}
LAYOUTS = [
    ("glm4_moe", Parallel(3, pp=3)),  # the first stage has no sparse layer
    ("qwen2_moe", Parallel(4, tp=2, ep=2)),
    ("olmoe", Parallel(4, tp=4, ep=2)),  # two ranks share a key/value head
    ("deepseek_v3", Parallel(4, tp=2, ep=2)),
]
EXTENDED = [
    ("glm4_moe", Parallel(8, tp=2, ep=2, pp=2)),
    ("glm4_moe", Parallel(4, tp=2, ep=2, etp=2)),
    ("llama", Parallel(4, tp=2, pp=2)),
    ("qwen2", Parallel(2, tp=2)),
    ("mixtral", Parallel(4, ep=4)),
    ("qwen3_moe", Parallel(3, pp=3)),
    ("deepseek_v2", Parallel(2, tp=2)),  # queries without a latent
    ("deepseek_v2", Parallel(4, ep=4)),
    ("deepseek_v3", Parallel(8, tp=2, ep=2, pp=2)),
    ("deepseek_v3", Parallel(4, tp=2, ep=2, etp=2)),
    ("pangu_ultra_moe", Parallel(4, tp=4, ep=2)),
    ("pangu_ultra_moe", Parallel(4, tp=2, pp=2)),
]


@cache
def checkpoint(kind: str) -> str:
    return family_checkpoint(tempfile.mkdtemp(), kind)


def run(kind: str, layout: Parallel) -> list[dict[str, Any]]:
    return run_ranks(train, layout.world, Case(checkpoint(kind), layout, steps=2, training=BALANCED))


@pytest.mark.parametrize(
    ("kind", "layout"), [*LAYOUTS, *(pytest.param(*case, marks=pytest.mark.extended) for case in EXTENDED)], ids=str
)
def test_a_layout_trains_as_one_rank_does(kind: str, layout: Parallel) -> None:
    """Loss, its parts and the gradient's norm; all ranks report the same."""
    wanted, results = run(kind, Parallel())[0], run(kind, layout)
    for step, metrics in enumerate(results[0]["steps"]):
        assert metrics == pytest.approx(wanted["steps"][step], rel=1e-5, abs=1e-7)
    assert all(result["steps"] == results[0]["steps"] for result in results)
    for name, tensor in wanted["weights"].items():
        torch.testing.assert_close(results[0]["weights"][name], tensor, atol=1e-3, rtol=0, msg=name)


def test_a_correction_bias_is_not_trained() -> None:
    from safetensors.torch import load_file

    before, after = load_file(f"{checkpoint('glm4_moe')}/model.safetensors"), run("glm4_moe", Parallel())[0]["weights"]
    fixed = {name for name in before if torch.equal(before[name], after[name])}
    assert fixed == {name for name in before if name.endswith("e_score_correction_bias")} != set()


def replay(rank: int, device: Any, case: Case) -> dict[str, float]:
    """The metrics of a step whose routing is recorded first, and replayed under the same weights."""
    engine = make_engine(case, device)
    batch = engine.with_own_routing(my_share(sample_batch(case.samples, case.seed), engine))
    assert batch.routing is not None and batch.routing.shape[1] == engine.model.num_sparse_layers
    return engine.forward_backward(batch, cross_entropy)


@pytest.mark.parametrize(
    "layout", [Parallel(), Parallel(3, pp=3), pytest.param(Parallel(2, ep=2), marks=pytest.mark.extended)], ids=str
)
def test_own_routing_is_replayed_without_a_mismatch_where_layers_or_stages_are_dense(layout: Parallel) -> None:
    for metrics in run_ranks(replay, layout.world, Case(checkpoint("glm4_moe"), layout)):
        assert metrics["training/routing_mismatch"] == 0.0


def gradients(rank: int, device: Any, case: Case) -> dict[str, Any]:
    engine = make_engine(case, device)
    metrics = engine.forward_backward(my_share(sample_batch(case.samples, case.seed), engine), cross_entropy)
    views = engine.optimizer.gradients.views
    return {"metrics": metrics} | {name: view.cpu() for name, view in views.items()}


@pytest.mark.parametrize(
    "layout", [Parallel(2, tp=2), pytest.param(Parallel(4, tp=2, ep=2), marks=pytest.mark.extended)], ids=str
)
def test_latents_recomputed_in_the_backward_pass_give_the_same_gradients(layout: Parallel) -> None:
    case = Case(checkpoint("pangu_ultra_moe"), layout)
    plain = run_ranks(gradients, layout.world, case)
    again = run_ranks(gradients, layout.world, case._replace(training={"recompute": True}))
    for one, other in zip(plain, again, strict=True):
        assert one.pop("metrics") == other.pop("metrics")
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
        assert any("q_a_norm" in name for name in one)

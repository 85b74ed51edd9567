"""The load-balancing loss of sequences is DeepSeek-V3's, and alike in every layout and micro-batch."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch

from fusion.model import Parallel
from fusion.npu.operators.gating import choose, probabilities, score
from fusion.training.algorithms import cross_entropy
from fusion.training.loss import LossInput, LossOutput
from tests.families import family_checkpoint
from tests.helpers import run_ranks
from tests.training.ranks import Case, make_engine, sample_batch, train

COEF = 0.05
SEQUENCES = {"load_balancing": "sequence", "load_balancing_coef": COEF}
BALANCE = "actor/load_balancing_loss"


@cache
def checkpoint(kind: str) -> str:
    return family_checkpoint(tempfile.mkdtemp(), kind)


@pytest.mark.parametrize("kind", ["glm4_moe", "qwen3_moe"])
def test_it_is_the_formula_of_each_sequence(kind: str, device: Any) -> None:
    """Equations 17 to 20, from the routers' logits of one sequence after the other."""
    engine = make_engine(Case(checkpoint(kind), training=SEQUENCES | {"token_budget": 40}), device)
    batch = sample_batch(12, 3)
    expected, logits = 0.0, []
    moes = [layer.moe for layer in engine.model.layers.values() if layer.is_sparse]
    for moe in moes:
        of_moe = moe._logits

        def kept(*args: Any, of_moe: Any = of_moe) -> torch.Tensor:
            logits.append((out := of_moe(*args)).detach().cpu())
            return out

        moe._logits = kept  # type: ignore[method-assign]
    for index, length in enumerate(batch.lengths):
        logits.clear()
        engine.logprobs(batch.select([index]))
        for moe, logits_TE in zip(moes, logits, strict=True):
            router, num_experts = moe.spec.router, moe.spec.num_experts
            scores_TE = score(logits_TE, router)
            correction = None if moe.correction is None else moe.correction.detach().cpu()
            chosen = choose(scores_TE, router, correction).flatten()
            load_E = torch.bincount(chosen, minlength=num_experts) * num_experts / (router.top_k * length)
            expected += float((load_E * probabilities(scores_TE, router).mean(0)).sum()) / len(batch.lengths)
    found = engine.forward_backward(batch, cross_entropy)
    assert found[BALANCE] == pytest.approx(expected, rel=1e-5) and expected > 0
    plain = make_engine(Case(checkpoint(kind), training={"load_balancing_coef": 0.0}), device)
    loss = plain.forward_backward(batch, cross_entropy)["actor/loss"]
    assert found["actor/loss"] == pytest.approx(loss + COEF * expected, rel=1e-5)


def run(kind: str, layout: Parallel, **training: Any) -> list[dict[str, Any]]:
    options = SEQUENCES | {"clip_grad": 1.0} | training
    return run_ranks(train, layout.world, Case(checkpoint(kind), layout, steps=2, training=options))


@pytest.mark.parametrize(
    ("kind", "layout", "training"),
    [
        ("glm4_moe", Parallel(4, tp=2, ep=2), {"token_budget": 40}),
        ("glm4_moe", Parallel(3, pp=3), {"token_budget": 40, "recompute": True}),
        pytest.param("qwen2_moe", Parallel(4, tp=4, ep=2), {"token_budget": 25}, marks=pytest.mark.extended),
        pytest.param("deepseek_v3", Parallel(8, tp=2, ep=2, pp=2), {"token_budget": 40}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_a_layout_balances_as_one_rank_does(kind: str, layout: Parallel, training: dict[str, Any]) -> None:
    """Loss and the gradient's norm, of packed micro-batches as of one."""
    wanted, results = run(kind, Parallel())[0], run(kind, layout, **training)
    for step, metrics in enumerate(results[0]["steps"]):
        assert metrics == pytest.approx(wanted["steps"][step], rel=1e-5, abs=1e-7)
        assert metrics[f"0/{BALANCE}"] > 0
    assert all(result["steps"] == results[0]["steps"] for result in results)


def test_its_gradient_moves_probability_away_from_loaded_experts(device: Any) -> None:
    """Trained by this loss alone, the loss falls."""
    case = Case(checkpoint("qwen3_moe"), training=SEQUENCES | {"load_balancing_coef": 1.0, "weight_decay": 0.0})
    engine, found = make_engine(case, device), []
    batch = sample_batch(12, 3)
    for _ in range(8):
        found.append(engine.forward_backward(batch, no_loss)[BALANCE])
        engine.optimizer_step()
    assert found[-1] < 0.95 * found[0]


def no_loss(inputs: LossInput) -> LossOutput:
    return LossOutput(inputs.logprobs * 0.0)

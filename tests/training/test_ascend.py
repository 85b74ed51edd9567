"""A trainer with Ascend's operators, as the emulated card has them, trains as one with the plain ones."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch

from fusion.model import Parallel
from fusion.npu.operators import operators_of
from fusion.training import AlgorithmConfig
from fusion.training.algorithms import make_algorithm
from tests.families import KINDS, family_checkpoint
from tests.helpers import run_ranks
from tests.training.ranks import LONGEST, Case, make_engine, my_share, sample_batch, train

SETTINGS = {"load_balancing_coef": 0.05, "clip_grad": 1.0, "token_budget": 40, "recompute": True}
DEFAULT = [("qwen3_moe", Parallel(2, tp=2, ep=2)), ("glm4_moe", Parallel()), ("deepseek_v3", Parallel())]
EXTENDED = [
    *((kind, Parallel()) for kind in KINDS if (kind, Parallel()) not in DEFAULT),
    ("qwen3_moe", Parallel(4, tp=2, ep=2)),
    ("glm4_moe", Parallel(4, tp=2, ep=2, etp=2)),
    ("deepseek_v3", Parallel(4, tp=2, ep=2, pp=2)),
    ("qwen2_moe", Parallel(4, ep=4)),
    ("llama", Parallel(4)),
    ("qwen3_moe", Parallel(3, pp=3)),
    ("glm4_moe", Parallel(4, tp=2, cp=2)),
    ("deepseek_v3", Parallel(2, cp=2)),
]


@cache
def checkpoint(kind: str) -> str:
    return family_checkpoint(tempfile.mkdtemp(), kind)


def train_with(rank: int, device: Any, operators: str, case: Case) -> dict[str, Any]:
    before, device.operators = device.operators, operators_of("emulated", operators)
    try:
        return {"gradients": gradients(device, case)} | train(rank, device, case)
    finally:
        device.operators = before


def gradients(device: Any, case: Case) -> dict[str, torch.Tensor]:
    """Return this rank's gradients of one batch, which other ranks' are not added to yet."""
    engine, algorithm = make_engine(case, device), make_algorithm(AlgorithmConfig(kl_coef=0.1), LONGEST)
    engine.forward_backward(algorithm.weigh(my_share(sample_batch(case.samples, case.seed), engine)), algorithm.loss)
    return {name: view.cpu() for name, view in engine.optimizer.gradients.views.items()}


def run(kind: str, layout: Parallel, operators: str) -> list[dict[str, Any]]:
    return run_ranks(train_with, layout.world, operators, Case(checkpoint(kind), layout, steps=2, training=SETTINGS))


@pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card")
@pytest.mark.parametrize(
    ("kind", "layout"),
    [*DEFAULT, *(pytest.param(*case, marks=pytest.mark.extended) for case in EXTENDED)],
    ids=str,
)
def test_families_train_alike(kind: str, layout: Parallel) -> None:
    """Gradients, the loss, its parts, the gradient's norm and the weights after two updates."""
    found, wanted = (run(kind, layout, operators) for operators in ("ascend", "plain"))
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours["gradients"].keys() == theirs["gradients"].keys()
        for name, gradient in theirs["gradients"].items():
            assert (ours["gradients"][name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
        for step, metrics in enumerate(ours["steps"]):
            assert metrics == pytest.approx(theirs["steps"][step], rel=2e-5, abs=1e-6)
        for name, tensor in theirs["weights"].items():
            torch.testing.assert_close(ours["weights"][name], tensor, atol=1e-3, rtol=0, msg=name)

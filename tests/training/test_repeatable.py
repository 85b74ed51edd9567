"""No step of a trainer adds floats on a card in an order that may differ between runs."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from fusion.model import Parallel
from fusion.training import AlgorithmConfig, Sequences
from fusion.training.algorithms import make_algorithm
from fusion.training.config import AGGREGATIONS, ALGORITHMS, CORRECTIONS
from tests.atomic_additions import AtomicAdditions
from tests.costmodel.launch_counts import card_with
from tests.families import family_checkpoint
from tests.helpers import run_ranks
from tests.training.ranks import LONGEST, Case, make_engine, sample_batch, share_of, with_policy
from tests.training.test_shared_prefixes import groups

VOCABULARY = 32
TRAINING = {"token_budget": 60, "load_balancing_coef": 0.05, "share_prefixes": "on"}
BY_SEQUENCE = TRAINING | {"load_balancing": "sequence", "recompute": True}


@cache
def checkpoint(kind: str) -> str:
    return family_checkpoint(tempfile.mkdtemp(), kind)


def batch_of(engine: Any, step: int) -> Sequences:
    """Uneven sequences, then some that share rows; with truncated sampling in the first and replayed routing in the
    second step."""
    batch = groups(step)[0] if step else sample_batch(12, 3)
    random, config = torch.Generator().manual_seed(step), engine.model.config
    if step == 0:
        counts = torch.randint(0, 7, (batch.rows,), generator=random, dtype=torch.int32)
        sets = [torch.randperm(VOCABULARY, generator=random)[:count] for count in counts.tolist()]
        for token, ids in zip(batch.tokens.tolist(), sets, strict=True):
            if len(ids) and token not in ids:
                ids[0] = token
        batch = replace(batch, kept_counts=counts, kept_ids=torch.cat(sets).to(torch.int32))
    elif config.num_experts:
        sparse = sum(layer.is_sparse for layer in engine.model.layers.values())
        experts = torch.rand(batch.rows, sparse, config.num_experts, generator=random).topk(config.top_k).indices
        batch = replace(batch, routing=experts.to(torch.uint8))
    return with_policy(share_of(batch, engine.mesh), engine)


def added_by(case: Case, device: Any) -> AtomicAdditions:
    engine = make_engine(case, device)
    algorithm = make_algorithm(AlgorithmConfig(**({"kl_coef": 0.1} | case.algorithm)), LONGEST)

    def with_entropy(tokens: Any) -> Any:
        out = algorithm.loss(tokens)
        return replace(out, loss=out.loss - 0.01 * tokens.entropy)

    with AtomicAdditions() as added:
        for step in range(2):
            batch = batch_of(engine, step)
            engine.forward_backward(algorithm.weigh(batch), with_entropy)
            engine.optimizer_step()
    return added


def on_rank(rank: int, _: Any, case: Case) -> tuple[list[str], list[str]]:
    with card_with("ascend", index=7 - rank) as device:
        added = added_by(case, device)
    return added.found, added.seen


CHOICES = {"name": [*ALGORITHMS], "correction": [*CORRECTIONS], "loss_aggregation": [*AGGREGATIONS]}
ALGORITHM_CASES = [
    {key: values[number % len(values)] for key, values in CHOICES.items()}
    for number in range(max(map(len, CHOICES.values())))
]
"""Every choice of each key once: what a choice computes is its own, whatever the others are"""
pytestmark = pytest.mark.filterwarnings("ignore:.*made nevertheless on the emulated card", "ignore:varlen_attn")


@pytest.mark.parametrize("algorithm", ALGORITHM_CASES, ids=lambda one: "-".join(one.values()))
def test_no_algorithm_correction_or_aggregation_does(algorithm: dict[str, Any]) -> None:
    with card_with("ascend", index=6) as device:
        added = added_by(Case(checkpoint("qwen3_moe"), training=TRAINING, algorithm=algorithm), device)
    assert added.seen and not added.found


@pytest.mark.parametrize("table", ["plain", "ascend", "cuda"])
@pytest.mark.parametrize("kind", ["glm4_moe", "deepseek_v3", pytest.param("qwen2_moe", marks=pytest.mark.extended)])
def test_no_family_does(kind: str, table: str) -> None:
    with card_with(table, index=6) as device:
        dtype = "bfloat16" if table == "cuda" else "float32"
        added = added_by(Case(checkpoint(kind), training=BY_SEQUENCE, dtype=dtype), device)
    assert added.seen and not added.found


@pytest.mark.parametrize(
    "layout",
    [
        Parallel(2, tp=2, ep=2),
        pytest.param(Parallel(4, tp=2, ep=2, cp=2), marks=pytest.mark.extended),
        pytest.param(Parallel(4, tp=2, ep=2, pp=2), marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_no_rank_does(layout: Parallel) -> None:
    case = Case(checkpoint("qwen3_moe"), layout, training=BY_SEQUENCE, lora={"rank": 4, "targets": ["attention"]})
    for found, seen in run_ranks(on_rank, layout.world, case):
        assert seen and not found

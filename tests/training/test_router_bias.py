"""The correction biases balance the experts, alike in every layout, and not at all at the rate 0."""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import Parallel, Routed
from fusion.training.algorithms import cross_entropy
from fusion.training.router_bias import bias_steps
from tests.families import family_checkpoint
from tests.helpers import run_ranks
from tests.training.ranks import Case, make_engine, my_share, sample_batch, share_of, train
from tests.training.test_replay import with_random_routing

RATE = 0.01


@cache
def checkpoint() -> str:
    return family_checkpoint(tempfile.mkdtemp(), "glm4_moe", n_group=1, topk_group=1)


@given(st.lists(st.lists(st.integers(0, 1 << 40), min_size=4, max_size=4), min_size=1, max_size=3))
def test_an_expert_gains_below_the_mean_and_loses_above_it(rows: list[list[int]]) -> None:
    steps = bias_steps(torch.tensor(rows)).tolist()
    for of_layer, steps_of_layer in zip(rows, steps, strict=True):
        for num_rows, one in zip(of_layer, steps_of_layer, strict=True):
            assert one == (4 * num_rows < sum(of_layer)) - (4 * num_rows > sum(of_layer))


def imbalance(rank: int, device: Any, rate: float, steps: int) -> list[float]:
    """By step, the rows of the busiest expert over the mean, in the worst layer; nothing else is trained."""
    trained = {"lr": 0.0, "weight_decay": 0.0, "load_balancing_coef": 0.1}  # a loss that reads the routing
    case = Case(checkpoint(), training={"router_bias_rate": rate} | trained, samples=24)
    engine = make_engine(case, device)
    batch, found = my_share(sample_batch(case.samples, case.seed), engine), []
    counts: list[torch.Tensor] = []
    counted = engine.router_bias.count

    def count(routed: Any) -> None:
        counts.append(torch.stack([layer.stats[0] for layer in routed]).detach().cpu())
        counted(routed)

    engine.router_bias.count = count  # type: ignore[method-assign]
    for _ in range(steps):
        counts.clear()
        engine.forward_backward(batch, cross_entropy)
        engine.optimizer_step()
        rows_SE = torch.stack(counts).sum(0)
        found.append(float((rows_SE.max(-1).values / rows_SE.mean(-1)).max()))
    return found


def test_the_load_balances_within_a_few_steps(device: Any) -> None:
    kept, moved = imbalance(0, device, 0.0, 2), imbalance(0, device, 0.02, 40)
    assert kept[0] == kept[1] == moved[0] > 2
    assert max(moved[-5:]) < 1.5


def biases(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in result["weights"].items() if name.endswith("e_score_correction_bias")}


def run(layout: Parallel, rate: float = RATE, **changes: Any) -> dict[str, Any]:
    case = Case(checkpoint(), layout, {"router_bias_rate": rate, "token_budget": 40}, steps=3, **changes)
    return run_ranks(train, layout.world, case)[0]


def test_the_rate_0_changes_no_bit() -> None:
    from safetensors.torch import load_file

    base = load_file(f"{checkpoint()}/model.safetensors")
    for name, tensor in biases(run(Parallel(), 0.0, dtype="bfloat16")).items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, base[name])


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        (Parallel(4, tp=2, ep=2), {}),
        (Parallel(3, pp=3), {"accumulate": 2}),
        pytest.param(Parallel(4), {}, marks=pytest.mark.extended),
        pytest.param(Parallel(8, tp=2, ep=2, pp=2), {"accumulate": 2}, marks=pytest.mark.extended),
    ],
    ids=str,
)
def test_a_layout_moves_them_as_one_rank_does_to_the_bit(layout: Parallel, changes: dict[str, Any]) -> None:
    wanted, found = biases(run(Parallel(), **changes)), biases(run(layout, **changes))
    assert wanted.keys() == found.keys() != set()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def replicas(rank: int, device: Any, case: Case) -> list[float]:
    engine = make_engine(case, device)
    engine.forward_backward(my_share(sample_batch(case.samples, case.seed), engine), cross_entropy)
    engine.optimizer_step()
    return engine.model.weights.card.cpu().tolist()


def test_every_rank_has_the_biases_of_every_layer() -> None:
    case = Case(checkpoint(), Parallel(3, pp=3), {"router_bias_rate": RATE})
    found = run_ranks(replicas, 3, case)
    assert len(found[0]) == 2 * 8 and found[0] == found[1] == found[2]


def replayed_rows(rank: int, device: Any, case: Case) -> torch.Tensor:
    """The rows of each expert that this rank routes, under a routing nobody would choose."""
    engine, counts = make_engine(case, device), list[Routed]()
    engine.router_bias.count = counts.extend  # type: ignore[method-assign]
    batch = share_of(with_random_routing(sample_batch(24, case.seed), 1, engine.model.num_sparse_layers), engine.mesh)
    engine.forward_backward(batch, cross_entropy)
    return torch.stack([layer.stats[0] for layer in counts]).detach().cpu()


def test_rows_that_no_engine_has_routed_count_where_the_router_sends_them_in_every_layout() -> None:
    training = {"router_bias_rate": RATE, "load_balancing_coef": 0.0}
    wanted, parts = (
        run_ranks(replayed_rows, layout.world, Case(checkpoint(), layout, training))
        for layout in (Parallel(), Parallel(2, ep=2))
    )
    assert torch.equal(torch.stack(parts).sum(0), wanted[0])


def test_an_update_that_is_skipped_moves_no_bias_and_forgets_the_load(device: Any) -> None:
    engine = make_engine(Case(checkpoint(), training={"router_bias_rate": RATE}), device)
    before = engine.model.weights.card.clone()
    engine.forward_backward(my_share(sample_batch(12, 3), engine), cross_entropy)
    engine.optimizer.gradients.flats[0][0] = float("nan")
    engine.optimizer_step()
    assert torch.equal(engine.model.weights.card, before)
    engine.optimizer.gradients.flats[0].zero_()
    engine.optimizer_step()
    assert torch.equal(engine.model.weights.card, before)

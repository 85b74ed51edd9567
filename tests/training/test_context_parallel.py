"""Context parallel: the ranks of a replica share its rows, and compute the gradients and metrics of one card."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from fusion.model import Parallel, local_params, plan_buckets
from fusion.training import AlgorithmConfig
from fusion.training.algorithms import make_algorithm
from fusion.training.config import AGGREGATIONS, ALGORITHMS, CORRECTIONS
from tests.families import family_checkpoint
from tests.helpers import run_ranks, tiny_checkpoint, tiny_config
from tests.training.ranks import LONGEST, Case, make_engine, my_share, sample_batch, share_of

LAYERS = 3
CP2 = Parallel(2, cp=2)
FULL = Parallel(8, tp=2, ep=2, pp=2, cp=2)
LAYOUTS = [Parallel(4, cp=2), FULL]
MORE = [
    Parallel(4, cp=2, ep=2, etp=2),
    Parallel(4, tp=2, cp=2),
    Parallel(4, cp=2, pp=2),
    Parallel(4, cp=4),
    Parallel(4, cp=4, ep=4),
    Parallel(4, cp=2, ep=4),
    Parallel(8, tp=4, cp=2),
]

ALL = [{"name": name} for name in ALGORITHMS]
ALL += [{"correction": name} for name in CORRECTIONS]
ALL += [{"name": name, "loss_aggregation": way} for name in ("grpo", "gspo") for way in AGGREGATIONS]
FEW = [{"name": "gspo", "correction": "mask_sequence"}, {"correction": "tis_sequence", "loss_aggregation": "constant"}]


@cache
def checkpoint(kind: str) -> str:
    folder = tempfile.mkdtemp()
    if kind != "one key head":
        return family_checkpoint(folder, kind, num_attention_heads=8, num_key_value_heads=8)
    return tiny_checkpoint(folder, num_key_value_heads=1, num_hidden_layers=LAYERS, num_attention_heads=8)


class Gradient(NamedTuple):
    """Metrics of a batch and, on each rank, its boxes of the gradients: (name, offset) → shape and values."""

    metrics: dict[str, float]
    boxes: dict[tuple[str, tuple[int, ...]], tuple[tuple[int, ...], torch.Tensor]]


def gradients(rank: int, device: Any, case: Case, settings: list[dict[str, Any]]) -> list[Gradient]:
    """The gradients of a batch under each of some settings of the algorithm, as the optimizer receives them."""
    engine, found = make_engine(case, device), []
    batch = my_share(sample_batch(case.samples, case.seed), engine)
    for setting in settings:
        algorithm = make_algorithm(AlgorithmConfig(**({"kl_coef": 0.1} | setting)), LONGEST)
        metrics = engine.forward_backward(algorithm.weigh(batch), algorithm.loss)
        for states in engine.optimizer_states().values():
            states.zero_()
        engine.optimizer_step()
        chunks = [one for one in engine.chunks(engine.state_dict()) if one.name.startswith("exp_avg/") and one.owned]
        boxes = {(one.name, one.offset): (one.shape, 10 * one.tensor.cpu()) for one in chunks}
        found.append(Gradient(metrics, boxes))
    return found


def whole(ranks: list[Gradient]) -> dict[str, torch.Tensor]:
    """The gradients that the ranks hold in parts."""
    tensors: dict[str, torch.Tensor] = {}
    for gradient in ranks:
        for (name, offset), (shape, part) in gradient.boxes.items():
            box = tuple(slice(start, start + size) for start, size in zip(offset, part.shape, strict=True))
            tensors.setdefault(name, torch.full(shape, torch.nan))[box] = part
    return tensors


def case_of(kind: str, layout: Parallel, **changes: Any) -> Case:
    training = {"lr": 1e-12, "clip_grad": 1e9, "load_balancing_coef": 0.05} | changes
    return Case(checkpoint(kind), layout, training=training)


def check(kind: str, layout: Parallel, settings: list[dict[str, Any]], **training: Any) -> None:
    """Compare a layout with one card that has one micro-batch."""
    (one,) = run_ranks(gradients, 1, case_of(kind, Parallel(), **training | {"token_budget": 1000}), settings)
    results = run_ranks(gradients, layout.world, case_of(kind, layout, **training), settings)
    for setting, wanted, *ranks in zip(settings, one, *results, strict=True):
        for found in ranks:
            assert found.metrics == pytest.approx(wanted.metrics, rel=1e-5, abs=1e-7), setting
        expected, tensors = whole([wanted]), whole(ranks)
        norm = torch.stack([tensor.norm() for tensor in expected.values()]).norm()
        assert tensors.keys() == expected.keys() and norm > 0
        for name, tensor in expected.items():
            assert (tensors[name] - tensor).norm() <= 1e-5 * norm, (setting, name)


@pytest.mark.parametrize("kind", ["one key head", pytest.param("deepseek_v3", marks=pytest.mark.extended)])
def test_every_algorithm_and_aggregation_has_the_gradients_of_one_card(kind: str) -> None:
    check(kind, CP2, ALL)


@pytest.mark.parametrize(
    "layout", [*LAYOUTS, *(pytest.param(layout, marks=pytest.mark.extended) for layout in MORE)], ids=str
)
@pytest.mark.parametrize("kind", ["one key head", pytest.param("deepseek_v3", marks=pytest.mark.extended)])
def test_a_layout_has_the_gradients_of_one_card(kind: str, layout: Parallel) -> None:
    """In micro-batches of which some have fewer rows than ranks, with recomputation."""
    check(kind, layout, FEW, token_budget=20, recompute=True)


def test_latents_are_gathered_in_the_largest_layout() -> None:
    check("deepseek_v3", FULL, FEW, token_budget=40, load_balancing="sequence")


def read(rank: int, device: Any, case: Case) -> tuple[list[int], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which samples this rank's replica has, their log-probabilities and entropies, and the routing of all rows."""
    engine = make_engine(case, device)
    batch = sample_batch(case.samples, case.seed)
    mine = share_of(replace(batch, versions=torch.arange(batch.rows)), engine.mesh)
    routing = engine.with_own_routing(mine).routing
    assert routing is not None and mine.versions is not None
    return mine.versions.tolist(), *engine.logprobs(mine), routing


@pytest.mark.parametrize("layout", [Parallel(4, cp=4), pytest.param(FULL, marks=pytest.mark.extended)], ids=str)
def test_every_rank_has_the_log_probabilities_and_the_routing_of_all_rows(layout: Parallel) -> None:
    case = case_of("one key head", layout, token_budget=20)
    ((_, logprobs, entropy, routing),) = run_ranks(read, 1, case._replace(layout=Parallel()))
    for rank, (rows, *found) in enumerate(run_ranks(read, layout.world, case)):
        layers = layout.layers(LAYERS, layout.coordinate("pp", rank))
        torch.testing.assert_close(found[0], logprobs[rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[1], entropy[rows], atol=1e-5, rtol=1e-5)
        assert found[2].equal(routing[rows][:, layers.start : layers.stop])


def replayed(rank: int, device: Any, case: Case) -> tuple[dict[str, float], torch.Tensor]:
    """Metrics of a step under a routing that no router would choose, and the correction biases after it."""
    engine = make_engine(case, device)
    mesh, config = engine.mesh, engine.model.config
    batch = my_share(sample_batch(case.samples, case.seed), engine)
    whole = sample_batch(case.samples, case.seed)
    random = torch.Generator().manual_seed(1)
    shape = whole.rows, config.num_sparse_layers, config.num_experts
    experts = torch.rand(shape, generator=random).topk(config.top_k).indices.to(torch.uint8)
    layers = config.sparse(mesh.parallel.layers(config.num_layers, mesh.pp_rank))
    routing = share_of(replace(whole, routing=experts[:, layers.start : layers.stop]), mesh).routing
    metrics = engine.forward_backward(replace(batch, routing=routing), make_algorithm(AlgorithmConfig(), LONGEST).loss)
    return metrics | engine.optimizer_step(), engine.model.weights.card.cpu()


@pytest.mark.parametrize("layout", [Parallel(4, tp=2, cp=2), pytest.param(FULL, marks=pytest.mark.extended)], ids=str)
def test_replayed_routing_and_correction_biases_are_those_of_one_card(layout: Parallel) -> None:
    case = case_of("deepseek_v3", layout, token_budget=20, recompute=True, router_bias_rate=0.01)
    ((metrics, biases),) = run_ranks(replayed, 1, case._replace(layout=Parallel()))
    assert metrics["training/routing_mismatch"] > 0.5 and biases.any()
    for found, own in run_ranks(replayed, layout.world, case):
        assert found == pytest.approx(metrics, rel=1e-5, abs=1e-7)
        assert own.equal(biases)


@pytest.mark.parametrize("kind", ["one key head", "deepseek_v3"])
def test_adapters_have_the_gradients_of_one_card(kind: str) -> None:
    case = case_of(kind, CP2)._replace(lora={"rank": 2})
    (one,) = run_ranks(gradients, 1, case._replace(layout=Parallel()), [{}])
    expected, tensors = whole(one), whole([found for (found,) in run_ranks(gradients, 2, case, [{}])])
    assert tensors.keys() == expected.keys() and all("lora" in name for name in tensors)
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("samples", [2, 3])
def test_fewer_samples_than_ranks_and_empty_micro_batches(samples: int) -> None:
    """A sample of two ranks is shorter than what they would split; a replica without a sample takes part."""
    layout = Parallel(4, cp=2)
    case = case_of("one key head", layout, token_budget=8)._replace(samples=samples)
    wanted = case._replace(layout=Parallel())
    (one,) = run_ranks(gradients, 1, wanted, [{}])
    expected, tensors = whole(one), whole([found for (found,) in run_ranks(gradients, 4, case, [{}])])
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("layout", [Parallel(8, tp=2, ep=2), Parallel(8, ep=4, etp=2), Parallel(8, pp=2)], ids=str)
def test_tables_and_shards_do_not_depend_on_it(layout: Parallel) -> None:
    """Also where all data-parallel ranks share one replica."""
    config = tiny_config(num_attention_heads=8)
    for shared in (replace(layout, cp=2), replace(layout, cp=layout.dp)):
        for rank in range(layout.world):
            table, other = (local_params(config, one, rank) for one in (layout, shared))
            assert table == other and plan_buckets(table, layout, 4, 1 << 14) == plan_buckets(other, shared, 4, 1 << 14)

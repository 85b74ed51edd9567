"""A trainer whose experts are imposed: the same in every layout, and its own routing where that is what is imposed."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from fusion.model import Parallel
from fusion.model.gathering import gather_tensors
from fusion.training import AlgorithmConfig, Sequences
from fusion.training.algorithms import cross_entropy, make_algorithm
from fusion.training.replay import new_record
from tests.helpers import run_ranks, tiny_checkpoint
from tests.host_reads import HostReads
from tests.training.ranks import Case, make_engine, sample_batch, share_of, with_policy

LAYERS, EXPERTS, K = 3, 8, 2
MISMATCH = "training/routing_mismatch"
GRPO = make_algorithm(AlgorithmConfig(kl_coef=0.1), 64).loss


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("replay"), num_hidden_layers=LAYERS)


def with_random_routing(batch: Sequences, seed: int, layers: int = LAYERS) -> Sequences:
    random = torch.Generator().manual_seed(seed)
    experts = torch.rand(batch.rows, layers, EXPERTS, generator=random).topk(K).indices
    return replace(batch, routing=experts.to(torch.uint8))


def gradients(engine):
    return [flat.cpu() for flat in engine.gradients().values()]


def replayed(rank, device, case):
    """Metrics of every step and the weights after the last, of a policy trained under a routing nobody would choose."""
    engine = make_engine(case, device)
    mesh, steps = engine.mesh, []
    for step in range(2):
        batch = with_random_routing(sample_batch(case.samples, step), step)
        batch.routing[batch.last_rows()] = 255
        batch = share_of(batch, mesh)
        layers = mesh.parallel.layers(LAYERS, mesh.pp_rank)
        batch = with_policy(replace(batch, routing=batch.routing[:, layers.start : layers.stop]), engine)
        steps.append(engine.forward_backward(batch, GRPO) | engine.optimizer_step())
    return steps, {name: tensor for name, tensor in gather_tensors(engine.model) if tensor is not None}


TRAINING = {"load_balancing_coef": 0.05, "token_budget": 25, "recompute": True}
UNBALANCED = TRAINING | {"load_balancing_coef": 0.0}
"""Where experts are split, the host chooses those of last tokens"""


@cache
def _single(path, balances):
    return run_ranks(replayed, 1, Case(path, training=TRAINING if balances else UNBALANCED))[0]


@pytest.mark.parametrize("balances", [True, False], ids=["balanced", "unbalanced"])
@pytest.mark.parametrize(
    "layout",
    [
        Parallel(2, tp=2),
        pytest.param(Parallel(2, ep=2), marks=pytest.mark.extended),
        Parallel(3, pp=3),
        pytest.param(Parallel(4, tp=2, ep=2, pp=2), marks=pytest.mark.extended),
        pytest.param(Parallel(4, tp=2, ep=2, cp=2), marks=pytest.mark.extended),
        Parallel(4, tp=2, ep=2, etp=2),
    ],
    ids=str,
)
def test_a_layout_trains_under_replay_as_one_rank_does(checkpoint, layout, balances):
    wanted, weights = _single(checkpoint, balances)
    assert wanted[0][MISMATCH] > 0.5
    results = run_ranks(replayed, layout.world, Case(checkpoint, layout, TRAINING if balances else UNBALANCED))
    for steps, _ in results:
        for found, one in zip(steps, wanted, strict=True):
            assert found == pytest.approx(one, rel=1e-5, abs=1e-7)
    for name, tensor in weights.items():
        torch.testing.assert_close(results[0][1][name], tensor, atol=2e-4, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


def read(rank, device, case, layers, replays):
    """How often the host waits for the card in a step: to read from it, and to write to it."""
    engine = make_engine(case, device)
    batch = share_of(sample_batch(case.samples, 3), engine.mesh)
    batch = with_random_routing(batch, 3, layers) if replays else batch
    with HostReads() as reads:
        engine.forward_backward(batch, cross_entropy)
    return len(reads.found), len(reads.sent)


@pytest.mark.parametrize("layout", [Parallel(2, ep=2), Parallel(4, tp=2, ep=2, etp=2)], ids=str)
def test_the_host_waits_for_no_layer_whose_routing_is_replayed(tmp_path, layout):
    """Not in forward, recomputation or backward, though experts are split; while it waits for routers in each layer."""
    paths = {layers: tiny_checkpoint(tmp_path / str(layers), num_hidden_layers=layers) for layers in (1, LAYERS)}
    cases = {layers: Case(path, layout, UNBALANCED) for layers, path in paths.items()}
    replayed, routed = (
        [run_ranks(read, layout.world, case, layers, replays) for layers, case in cases.items()]
        for replays in (True, False)
    )
    assert replayed[0] == replayed[1]
    assert all(more > few for (few, _), (more, _) in zip(*routed, strict=True))
    assert not any(sent for ranks in (*replayed, *routed) for _, sent in ranks), "copies to the card wait for nothing"


@pytest.mark.parametrize("training", [{}, TRAINING], ids=["plain", "micro-batches-recompute-balancing"])
def test_replaying_the_present_routing_changes_no_bit(checkpoint, device, training):
    plain, again = (make_engine(Case(checkpoint, training=training), device) for _ in range(2))
    batch = with_policy(sample_batch(12, seed=3), plain)
    metrics = again.forward_backward(again.with_own_routing(batch), GRPO)
    assert metrics.pop(MISMATCH) == 0
    assert metrics == plain.forward_backward(batch, GRPO), "without a routing there is no such metric either"
    assert all(torch.equal(*pair) for pair in zip(gradients(plain), gradients(again), strict=True))


def test_the_routing_of_before_the_first_step_outlives_it(checkpoint, device):
    """R2: later minibatches go where the policy sent them when the step began."""
    engine = make_engine(Case(checkpoint, training={"lr": 0.05}), device)
    first, later = (engine.with_own_routing(sample_batch(12, seed)) for seed in range(2))
    engine.forward_backward(with_policy(first, engine), GRPO)
    engine.optimizer_step()
    moved = engine.with_own_routing(replace(later, routing=None)).routing
    assert not torch.equal(moved, later.routing)
    went = new_record(later, engine.model)
    engine.logprobs(later, went)
    known = torch.ones(later.rows, dtype=torch.bool)
    known[later.last_rows()] = False
    assert torch.equal(went[known], later.routing[known])
    assert 0 < engine.forward_backward(with_policy(later, engine), GRPO)[MISMATCH] < 1


def test_the_mismatch_is_the_share_of_tokens_that_would_have_gone_elsewhere(tmp_path, device):
    """With one layer, whose router nothing that is replayed comes before."""
    engine = make_engine(Case(tiny_checkpoint(tmp_path, num_hidden_layers=1), training={"token_budget": 25}), device)
    batch = with_policy(sample_batch(12, seed=3), engine)
    own = engine.with_own_routing(batch).routing
    random = with_random_routing(batch, 3).routing[:, :1]
    known = torch.ones(batch.rows, dtype=torch.bool)
    known[batch.last_rows()] = False
    other = (own.sort(-1).values != random.sort(-1).values).any(-1)[known]
    found = engine.forward_backward(replace(batch, routing=random), GRPO)[MISMATCH]
    assert found == pytest.approx(other.float().mean().item()) and 0.5 < found < 1


def test_what_stands_at_a_last_token_is_not_looked_at(checkpoint, device):
    engine, found = make_engine(Case(checkpoint), device), []
    batch = with_random_routing(with_policy(sample_batch(12, seed=3), engine), 5)
    for junk in (0, 255):
        batch.routing[batch.last_rows()] = junk
        found.append((engine.logprobs(batch), engine.forward_backward(batch, GRPO)))
    assert found[0][1] == found[1][1] and torch.equal(found[0][0][0], found[1][0][0])


def test_the_routing_of_another_model_is_refused(checkpoint, device):
    engine = make_engine(Case(checkpoint), device)
    batch = with_random_routing(sample_batch(3, seed=3), 5)
    with pytest.raises(ValueError, match=r"routing has \[2, 2\] \(layers, k\) per token; expected \[3, 2\]"):
        engine.logprobs(replace(batch, routing=batch.routing[:, :2]))
    with pytest.raises(ValueError, match="routing has shape"):
        replace(batch, routing=batch.routing[1:])

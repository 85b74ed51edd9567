"""Only what the policy has sampled is trained: observations are inputs, and no number of theirs reaches a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fusion.model import Head, Mesh, Parallel
from fusion.training import AlgorithmConfig, Sequences
from fusion.training.algorithms import make_algorithm
from fusion.training.config import AGGREGATIONS, ALGORITHMS, CORRECTIONS
from fusion.training.logprobs import vocab_parallel_logprobs
from fusion.training.objective import Objective, Totals
from tests.helpers import run_ranks, tiny_checkpoint, tiny_config
from tests.pairwise import thinned
from tests.training.ranks import LONGEST, Case, make_engine, my_share, with_policy

VOCABULARY = 32
GARBAGE = {"behaviour_logprobs": 3.0, "ref_logprobs": -7.0, "proximal_logprobs": 5.0, "versions": 1}


@st.composite
def conversations(draw: Any, count: int = 4) -> Sequences:
    """Sequences whose responses are sampled and observed tokens in any order, one of them only observed."""
    seed = draw(st.integers(0, 2**16))
    random = torch.Generator().manual_seed(seed)
    masks = draw(st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=count, max_size=count))
    return _batch(masks, random)


def _batch(masks: list[list[bool]], random: torch.Generator) -> Sequences:
    sampled = torch.tensor([token for mask in masks for token in mask])
    prompts = torch.randint(1, 5, (len(masks),), generator=random)
    count = len(sampled)
    batch = Sequences.from_packed(
        prompts,
        [len(mask) for mask in masks],
        prompts=torch.randint(1, VOCABULARY, (int(prompts.sum()),), generator=random),
        responses=torch.randint(1, VOCABULARY, (count,), generator=random),
        advantages=torch.randn(len(masks), generator=random),
        behaviour_logprobs=torch.where(sampled, 0.3 * torch.randn(count, generator=random), 0.0),
        ref_logprobs=torch.where(sampled, 0.3 * torch.randn(count, generator=random), 0.0),
        versions=torch.where(sampled, 2, -1),
        sampled=sampled,
        shares=1 / torch.randint(1, 4, (len(masks),), generator=random),
    )
    expected = [token for size, mask in zip(prompts.tolist(), masks, strict=True) for token in [False] * size + mask]
    assert batch.loss_mask.tolist() == expected, "what the tests below call observed is what was not sampled"
    return replace(batch, version=3)


def changed(batch: Sequences, by: float) -> Sequences:
    """Return the batch with other numbers at all tokens that were not sampled, and other ids after the last sampled
    token of each sequence."""
    observed = ~batch.loss_mask
    columns = {}
    for name, amount in GARBAGE.items():
        if (values := getattr(batch, name)) is not None:
            columns[name] = torch.where(observed, values + values.new_tensor(amount * by), values)
    later = torch.cat([_after_last(mask) for mask in batch.loss_mask.split(batch.lengths)])
    tokens = torch.where(later, (batch.tokens + 1 + int(by)) % VOCABULARY, batch.tokens)
    return replace(batch, held_tokens=tokens, **columns)


def _after_last(mask: torch.Tensor) -> torch.Tensor:
    return mask.flip(0).cumsum(0).flip(0) == 0


def gradients_and_metrics(batch: Sequences, engine: Any, config: dict[str, Any]) -> tuple[list[torch.Tensor], Any]:
    algorithm = make_algorithm(AlgorithmConfig(**({"kl_coef": 0.1} | config)), LONGEST)
    engine.optimizer.zero_gradients()
    metrics = engine.forward_backward(algorithm.weigh(batch.until_trained()), algorithm.loss)
    return [flat.clone().cpu() for flat in engine.gradients().values()], metrics


CONFIGS = st.fixed_dictionaries(
    {
        "name": st.sampled_from([*ALGORITHMS]),
        "loss_aggregation": st.sampled_from(AGGREGATIONS),
        "correction": st.sampled_from([*CORRECTIONS]),
    }
)


@pytest.fixture(scope="module", params=[False, True], ids=["dense", "experts"])
def engine(request, tmp_path_factory, device):
    folder = tmp_path_factory.mktemp("sampled")
    checkpoint = tiny_checkpoint(folder, request.param, num_hidden_layers=1)
    return make_engine(Case(checkpoint, training={"load_balancing_coef": 0.0}), device)


@given(conversations(), CONFIGS, st.integers(1, 9))
def test_no_number_of_an_observation_and_no_id_after_the_last_sampled_token_reaches_a_gradient(
    engine, batch, config, by
):
    batch = with_policy(batch, engine)
    batch = replace(batch, proximal_logprobs=batch.behaviour_logprobs + 0.1)
    gradients, metrics = gradients_and_metrics(batch, engine, config)
    others, other_metrics = gradients_and_metrics(changed(batch, by), engine, config)
    assert all(map(torch.equal, gradients, others)) and metrics == other_metrics
    assert any(flat.any() for flat in gradients) or not batch.loss_mask.any()


@given(conversations(), CONFIGS)
def test_the_logits_that_predict_an_observation_have_no_gradient(batch, config):
    algorithm = make_algorithm(AlgorithmConfig(**({"kl_coef": 0.1} | config)), LONGEST)
    head = Head([torch.eye(VOCABULARY)])
    weighed, rows = algorithm.weigh(batch), batch.trained_rows
    logits_NV = torch.randn(batch.rows, VOCABULARY, generator=torch.Generator().manual_seed(1)).requires_grad_()
    tokens = vocab_parallel_logprobs(logits_NV[rows - 1], head, batch.tokens[rows], Mesh.single())
    weighed = replace(weighed, **{name: 0.1 + weighed.loss_mask for name in ("behaviour_logprobs", "ref_logprobs")})
    totals = Totals(*weighed.loss_totals(), rows=batch.rows, sequences=len(batch.lengths), micro_batches=1)
    objective = Objective(
        algorithm.loss, totals, config=tiny_config(), mesh=Mesh.single(), balancing_coef=0.0, counts_E=None
    )
    objective.of_tokens(weighed, tokens).backward()
    predicts_sampled = torch.zeros(batch.rows, dtype=torch.bool)
    predicts_sampled[rows - 1] = True
    assert logits_NV.grad is not None and not logits_NV.grad[~predicts_sampled].any()


def on_this_layout(rank: int, device: Any, case: Case) -> list[tuple[bool, float, float]]:
    engine, found = make_engine(case, device), []
    random = torch.Generator().manual_seed(5)
    for name, aggregation in zip([*ALGORITHMS][:4], [*AGGREGATIONS, "token_mean"], strict=True):
        masks = [(torch.rand(size, generator=random) < 0.5).tolist() for size in (3, 8, 6, 5)]
        batch = my_share(_batch(masks, random), engine)
        config = {"name": name, "loss_aggregation": aggregation}
        gradients, metrics = gradients_and_metrics(batch, engine, config)
        others, _ = gradients_and_metrics(changed(batch, 2), engine, config)
        norm = engine.optimizer_step()["actor/grad_norm"]
        found.append((all(map(torch.equal, gradients, others)), metrics["actor/loss"], norm))
    return found


LAYOUTS = [Parallel(2, tp=2), Parallel(2, pp=2), Parallel(2, ep=2)]


@pytest.mark.parametrize("layout", thinned(LAYOUTS, lambda layout: (layout.tp, layout.pp)))
def test_every_layout_trains_what_was_sampled(layout, tmp_path):
    training = {"load_balancing_coef": 0.0, "lr": 0.0, "token_budget": 20}
    case = Case(tiny_checkpoint(tmp_path), training=training)
    ranks = run_ranks(on_this_layout, 2, case._replace(layout=layout))
    (single,) = run_ranks(on_this_layout, 1, case)
    assert all(unchanged for rank in ranks for unchanged, _, _ in rank)
    for rank in ranks:
        torch.testing.assert_close([row[1:] for row in rank], [row[1:] for row in single], atol=1e-5, rtol=1e-5)

"""How losses of tokens become the gradient of a global batch, whatever ranks and micro-batches it is divided into."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.model import Mesh
from fusion.training import AlgorithmConfig, Sequences, split_over_ranks
from fusion.training.algorithms import Algorithm, cross_entropy, find_algorithm, make_algorithm
from fusion.training.algorithms.aggregation import weigh
from fusion.training.config import AGGREGATIONS, ALGORITHMS, CORRECTIONS
from fusion.training.logprobs import TokenLogprobs
from fusion.training.objective import Objective, Totals
from tests.helpers import tiny_config
from tests.training.ranks import LONGEST, sample_batch
from tests.training.sequences import sequences_of


def totals_of(parts: list[Sequences]) -> Totals:
    """As the ranks add them up."""
    weights, normalisers = zip(*(part.loss_totals() for part in parts), strict=True)
    return Totals(sum(weights), sum(normalisers), 0, 0, 0)


def gradient(batch: Sequences, logprobs_N: torch.Tensor, loss, weigh_, division: list[list[list[int]]]):
    """Of the loss by every token's log-probability, and the metrics, with ``division`` into ranks and their
    micro-batches of sequences; each rank weighs its own part."""
    leaf = logprobs_N.clone().requires_grad_()
    ranks = [[index for micro_batch in micro_batches for index in micro_batch] for micro_batches in division]
    totals = totals_of([weigh_(batch.select(indices)) for indices in ranks])
    config = tiny_config()
    objective = Objective(loss, totals, config=config, mesh=Mesh.single(), balancing_coef=0.0, counts_E=None)
    for indices, micro_batches in zip(ranks, division, strict=True):
        part = weigh_(batch.select(indices))
        for micro_batch in micro_batches:
            piece = part.select([indices.index(index) for index in micro_batch])
            rows = piece.loss_mask.nonzero().squeeze(1)
            own = leaf[batch.rows_of(micro_batch)][rows]
            objective.of_tokens(piece, TokenLogprobs(own, torch.zeros(len(rows)))).backward()
    return leaf.grad, objective.sums().metrics(0.0)


@st.composite
def divisions(draw, samples: int):
    """Every sequence on one of up to 4 ranks, in micro-batches of any sizes, in any order; some may be empty."""
    order = draw(st.permutations(range(samples)))
    ranks = draw(st.integers(1, 4))
    cuts = sorted(draw(st.lists(st.integers(0, samples), min_size=ranks - 1, max_size=ranks - 1)))
    division = []
    for start, end in zip([0, *cuts], [*cuts, samples], strict=True):
        middle = draw(st.integers(start, end))
        division.append([list(order[start:middle]), list(order[middle:end])])
    return division


def stale_batch(samples: int) -> tuple[Sequences, torch.Tensor]:
    """Uneven sequences, one of them not trained, whose behaviour and proximal policies are near the policy's."""
    batch = sample_batch(samples, seed=4)
    logprobs = -torch.rand(batch.rows, generator=torch.Generator().manual_seed(1)) - 0.1
    assert batch.behaviour_logprobs is not None and batch.ref_logprobs is not None
    return replace(
        batch,
        behaviour_logprobs=logprobs + batch.behaviour_logprobs,
        ref_logprobs=logprobs + batch.ref_logprobs,
        proximal_logprobs=logprobs + 0.5 * batch.behaviour_logprobs,
    ), logprobs


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=3)
@given(division=divisions(samples=9))
def test_the_gradient_does_not_depend_on_how_a_batch_is_divided(name, correction, division):
    batch, logprobs = stale_batch(9)
    config = AlgorithmConfig(name=name, correction=correction, kl_coef=0.1)
    algorithm = make_algorithm(config, LONGEST)
    wanted, metrics = gradient(batch, logprobs, algorithm.loss, algorithm.weigh, [[list(range(9))]])
    found, others = gradient(batch, logprobs, algorithm.loss, algorithm.weigh, division)
    assert wanted.any()
    torch.testing.assert_close(found, wanted, atol=1e-7, rtol=1e-5)
    assert others == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_averages_by_hand(ranks):
    """Two sequences of 1 and 3 trained tokens, at most 5: the derivative of a token's loss by its logprob is -1."""
    batch = sequences_of([[1], [2]], [[3], [4, 5, 6]])
    division = [[share] for share in split_over_ranks(batch.lengths, ranks)]
    shares = {"token_mean": (1 / 4, 1 / 4), "sequence_mean": (1 / 2, 1 / 6), "constant": (1 / 10, 1 / 10)}
    assert set(shares) == set(AGGREGATIONS)
    for aggregation, (short, long) in shares.items():

        def weighed(part: Sequences, how: str = aggregation) -> Sequences:
            return weigh(part, how, 5)

        logprobs = torch.tensor([0.0, -1.0, 0.0, -2.0, -3.0, -4.0])
        found, metrics = gradient(batch, logprobs, cross_entropy, weighed, division)
        torch.testing.assert_close(found, -torch.tensor([0, short, 0, long, long, long]))
        assert metrics["actor/loss"] == pytest.approx(short * 1 + long * 9)


def test_an_observation_changes_no_average():
    """Of two conversations with equally many sampled tokens, one is full of what its environment says."""
    batch = sequences_of([[1], [2]], [[3, 4], [3, 9, 9, 9, 4]])
    mask = torch.tensor([0, 1, 1, 0, 1, 0, 0, 0, 1], dtype=torch.bool)
    batch = replace(batch, loss_mask=mask)
    for aggregation in AGGREGATIONS:

        def weighed(part: Sequences, how: str = aggregation) -> Sequences:
            return weigh(part, how, 5)

        found, _ = gradient(batch, torch.zeros(9), cross_entropy, weighed, [[[0, 1]]])
        share = 1 / 10 if aggregation == "constant" else 1 / 4
        torch.testing.assert_close(found, torch.where(mask, -share, 0.0))


def test_each_algorithm_averages_as_its_paper_says_unless_the_config_chooses():
    own = {name: find_algorithm(name).aggregation for name in ALGORITHMS}
    assert own == {
        "grpo": "token_mean",
        "dr_grpo": "constant",
        "dapo": "token_mean",
        "gspo": "sequence_mean",
        "rloo": "constant",
        "reinforce_plus_plus": "token_mean",
    }
    batch = sequences_of([[1]], [[2, 3]])
    chosen: Algorithm = make_algorithm(AlgorithmConfig(name="dr_grpo", loss_aggregation="sequence_mean"), LONGEST)
    found = chosen.weigh(batch)
    assert found.normaliser is None and found.token_weight.tolist() == [0, 0.5, 0.5]
    assert chosen.weigh(batch.select([])).token_weight.shape == (0,)


@st.composite
def branched(draw, samples: int):
    """How many branches each of the samples has, and a division of all of them."""
    branches = draw(st.lists(st.integers(1, 4), min_size=samples, max_size=samples))
    return branches, draw(divisions(sum(branches)))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=5)
@given(split=branched(samples=4))
def test_a_conversation_in_branches_weighs_as_one_sequence_with_the_tokens_of_all(name, aggregation, split):
    """Each branch is the sequence again, so that the gradient of all of them shows what they weigh together."""
    branches, division = split
    batch, logprobs = stale_batch(4)
    config = AlgorithmConfig(name=name, loss_aggregation=aggregation, kl_coef=0.1)
    algorithm = make_algorithm(config, LONGEST)
    whole, whole_metrics = gradient(batch, logprobs, algorithm.loss, algorithm.weigh, [[[*range(4)]]])
    repeated = [index for index, count in enumerate(branches) for _ in range(count)]
    rows = batch.rows_of(repeated)
    lengths = torch.tensor([batch.lengths[index] for index in repeated])
    of_branch = torch.tensor([1 / branches[index] for index in repeated])
    several = replace(batch.select(repeated), shares=of_branch.repeat_interleave(lengths))
    parts, metrics = gradient(several, logprobs[rows], algorithm.loss, algorithm.weigh, division)
    together = torch.zeros(batch.rows).index_add(0, rows, parts)
    if aggregation == "sequence_mean":
        torch.testing.assert_close(together, whole)
        assert metrics["actor/pg_loss"] == pytest.approx(whole_metrics["actor/pg_loss"], abs=1e-6)
        return
    expected = whole * torch.tensor(branches).repeat_interleave(torch.tensor(batch.lengths))
    if aggregation == "token_mean":
        trained = [float(mask.sum()) for mask in batch.loss_mask.split(batch.lengths)]
        expected *= sum(trained) / sum(count * tokens for count, tokens in zip(branches, trained, strict=True))
    torch.testing.assert_close(together, expected)

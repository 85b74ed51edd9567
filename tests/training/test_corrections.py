from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.training import AlgorithmConfig
from fusion.training.algorithms import make_algorithm
from fusion.training.config import CORRECTIONS
from fusion.training.corrections import MASKED, TRUNCATED, WEIGHT, make_correction
from fusion.training.loss import LossInput

LONGEST = 20


def tokens(ratios: list[float], lengths: list[int], proximal: list[float] | None = None) -> LossInput:
    """Tokens of probability 1/2, advantage 1, whose behaviour policy gave them 1/2 ÷ ratio; the proximal policy that,
    times the number in ``proximal``."""
    behaviour = math.log(0.5) - torch.tensor(ratios).log()
    return LossInput(
        torch.full((len(ratios),), math.log(0.5), requires_grad=True),
        torch.zeros(len(ratios)),
        lengths,
        torch.ones(len(ratios)),
        behaviour,
        proximal_logprobs=None if proximal is None else behaviour + torch.tensor(proximal).log(),
    )


def loss_of(correction: str, batch: LossInput, **keys):
    config = AlgorithmConfig(correction=correction, clip_low=0.2, clip_high=0.3, **keys)
    config.validate()
    out = make_algorithm(config, LONGEST).loss(batch)
    out.loss.sum().backward()
    assert batch.logprobs.grad is not None
    return out.loss.detach(), batch.logprobs.grad, out.metrics


def test_tis_of_tokens_by_hand():
    loss, gradient, metrics = loss_of("tis_token", tokens([1.0, 1.5, 4.0, 0.1], [2, 2]), correction_cap=2.0)
    # The weight is the ratio, cut at 2; the clipped ratio is 1 and its derivative too.
    torch.testing.assert_close(loss, -torch.tensor([1.0, 1.5, 2.0, 0.1]))
    torch.testing.assert_close(gradient, loss)
    assert metrics[TRUNCATED].tolist() == [0, 0, 1, 0]
    torch.testing.assert_close(metrics[WEIGHT], -loss)


def test_tis_of_sequences_by_hand():
    # Products 1.5 · 0.5 = 0.75, and 2 · 4 = 8, cut at 3; a sequence without trained tokens between them.
    loss, gradient, metrics = loss_of("tis_sequence", tokens([1.5, 0.5, 2.0, 4.0], [2, 0, 2]), correction_cap=3.0)
    torch.testing.assert_close(loss, -torch.tensor([0.75, 0.75, 3.0, 3.0]))
    torch.testing.assert_close(gradient, loss)
    assert metrics[TRUNCATED].tolist() == [0, 0, 1, 1]


def test_decoupled_by_hand():
    # proximal / behaviour 2, 2, 8 (cut at 5); current / proximal 0.75 (not cut: the advantage is positive), 1.5 and
    # 1.5, both clipped to 1.3.
    batch = tokens([1.5, 3.0, 12.0], [3], proximal=[2.0, 2.0, 8.0])
    loss, gradient, metrics = loss_of("decoupled", batch, correction_cap=5.0)
    torch.testing.assert_close(loss, -torch.tensor([2 * 0.75, 2 * 1.3, 5 * 1.3]))
    torch.testing.assert_close(gradient, torch.tensor([-1.5, 0.0, 0.0]))
    assert metrics[TRUNCATED].tolist() == [0, 0, 1] and metrics["actor/pg_clipfrac"].tolist() == [0, 1, 1]


def test_decoupled_without_a_proximal_policy_is_tis():
    ratios = [0.3, 1.0, 2.5, 9.0]
    left = loss_of("decoupled", tokens(ratios, [4]), correction_cap=3.0)
    right = loss_of("tis_token", tokens(ratios, [4]), correction_cap=3.0)
    assert torch.equal(left[0], right[0]) and torch.equal(left[1], right[1])


def test_icepop_by_hand():
    loss, gradient, metrics = loss_of(
        "icepop", tokens([0.4, 0.6, 1.0, 1.9, 2.1], [5]), correction_floor=0.5, correction_cap=2.0
    )
    torch.testing.assert_close(loss, -torch.tensor([0.0, 0.6, 1.0, 1.9, 0.0]))
    torch.testing.assert_close(gradient, loss)
    assert metrics[MASKED].tolist() == [1, 0, 0, 0, 1]


def test_masked_sequences_by_hand():
    # Geometric means 1, √6 ≈ 2.4 (above 2), √(1/6) ≈ 0.41 (below 1/2), and 1 with a token of 0.05 (below 0.1).
    ratios = [1.2, 1 / 1.2, 2.0, 3.0, 0.5, 1 / 3, 0.05, 20.0]
    loss, gradient, metrics = loss_of(
        "mask_sequence", tokens(ratios, [2, 2, 2, 2]), correction_cap=2.0, correction_floor=0.1
    )
    torch.testing.assert_close(loss, -torch.tensor([1.2, 1 / 1.2, 0, 0, 0, 0, 0, 0]))
    torch.testing.assert_close(gradient, loss)
    assert metrics[MASKED].tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_where_the_policies_agree_all_corrections_are_the_same(name, correction):
    plain, corrected = (tokens([1.0, 1.0, 1.0], [2, 1], proximal=[1.0, 1.0, 1.0]) for _ in range(2))
    for batch, chosen in ((plain, "none"), (corrected, correction)):
        make_algorithm(AlgorithmConfig(name=name, correction=chosen), LONGEST).loss(batch).loss.sum().backward()
    assert torch.equal(plain.logprobs.grad, corrected.logprobs.grad)
    assert plain.logprobs.grad.tolist() == [-1, -1, -1]


RATIOS = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)


@pytest.mark.parametrize("correction", sorted(set(CORRECTIONS) - {"none"}))
@settings(max_examples=20)
@given(ratios=RATIOS, cap=st.floats(1, 100), cut=st.integers(0, 12))
def test_a_weight_has_no_gradient_and_is_within_its_cap(correction, ratios, cap, cut):
    batch = tokens(ratios, [min(cut, len(ratios)), len(ratios) - min(cut, len(ratios))])
    found = make_correction(AlgorithmConfig(correction=correction, correction_cap=cap))(batch)
    assert found.weight is not None and not found.weight.requires_grad and not found.anchor.requires_grad
    assert found.weight.isfinite().all() and (found.weight >= 0).all() and (found.weight <= cap * (1 + 1e-6)).all()


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_without_behaviour_logprobs_a_correction_says_so(correction):
    batch = replace(tokens([1.0], [1]), behaviour_logprobs=None)
    with pytest.raises(ValueError, match=f"algorithm.correction={correction} needs the column behaviour_logprobs"):
        make_algorithm(AlgorithmConfig(correction=correction), LONGEST).loss(batch)

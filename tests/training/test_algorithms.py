from __future__ import annotations

import math

import pytest
import torch

from fusion.training import AlgorithmConfig
from fusion.training.algorithms import LossInput, make_advantages, make_loss
from fusion.training.algorithms.grpo import group_advantages


def test_advantages_by_hand():
    # Group a: mean 0.5, deviations ±0.5, variance 4 · 0.25 / 3, standard deviation 1 / √3.
    rewards = [1.0, 0.0, 1.0, 0.0, 2.0, 5.0]
    groups = ["a", "a", "a", "a", "b", "b"]
    advantages, trained = group_advantages(rewards, groups)
    half = 0.5 * math.sqrt(3)
    # Group b: mean 3.5, deviations ±1.5, standard deviation 3 / √2.
    wanted = [half, -half, half, -half, -1 / math.sqrt(2), 1 / math.sqrt(2)]
    torch.testing.assert_close(advantages, torch.tensor(wanted), atol=1e-5, rtol=1e-5)
    assert trained.all()
    centred, _ = make_advantages(AlgorithmConfig(normalize_advantages=False))(rewards, groups)
    assert centred.tolist() == [0.5, -0.5, 0.5, -0.5, -1.5, 1.5]


def test_a_group_without_variance_gives_zeros():
    advantages, trained = group_advantages([0.1, 0.1, 0.1, 0.7], ["a", "a", "a", "b"])
    assert advantages.tolist() == [0, 0, 0, 0] and trained.all()


@pytest.mark.parametrize("failed", [None, float("nan")])
def test_a_failed_reward_is_left_out_of_its_group(failed):
    advantages, trained = group_advantages([1.0, failed, 0.0, failed], ["a", "a", "a", "b"], normalize=False)
    assert advantages.tolist() == [0.5, 0.0, -0.5, 0.0]
    assert trained.tolist() == [True, False, True, False]


def tokens(ratios: list[float], advantages: list[float], ref_ratios: list[float] | None = None) -> LossInput:
    """Tokens of probability 1/2 whose behaviour (reference) policy gave them 1/2 ÷ ratio (· ratio)."""
    logprobs = torch.full((len(ratios),), math.log(0.5), requires_grad=True)
    return LossInput(
        logprobs,
        torch.zeros(len(ratios)),
        [len(ratios)],
        torch.tensor(advantages),
        math.log(0.5) - torch.tensor(ratios).log(),
        None if ref_ratios is None else math.log(0.5) + torch.tensor(ref_ratios).log(),
    )


def test_clipped_policy_loss_by_hand():
    config = AlgorithmConfig(clip_low=0.2, clip_high=0.3)
    batch = tokens([1.0, 1.5, 1.5, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0])
    out = make_loss(config)(batch)
    # Only a ratio that went the way the advantage wanted is cut: 1.5 up to 1.3, and 0.5 down to 0.8.
    torch.testing.assert_close(out.loss, torch.tensor([-1.0, -1.3, 1.5, -0.5, 0.8]))
    assert out.metrics["actor/pg_clipfrac"].tolist() == [0, 1, 0, 0, 1]
    torch.testing.assert_close(out.metrics["actor/ppo_kl"], -torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5]).log())
    # Behaviour probabilities 1/2, 1/3, 1/3, 1, 1 against 1/2.
    diff = out.metrics["training/rollout_probs_diff_mean"]
    torch.testing.assert_close(diff, torch.tensor([0.0, 1 / 6, 1 / 6, 0.5, 0.5]))
    out.loss.sum().backward()
    # d(-A r)/d(logprob) = -A r, and nothing where it is clipped.
    torch.testing.assert_close(batch.logprobs.grad, torch.tensor([-1.0, 0.0, 1.5, -0.5, 0.0]))


def test_divergence_from_the_reference_by_hand():
    batch = tokens([1.0, 1.0], [0.0, 0.0], ref_ratios=[1.0, 2.0])
    out = make_loss(AlgorithmConfig(kl_coef=0.5))(batch)
    k3 = 2 - 1 - math.log(2)
    torch.testing.assert_close(out.metrics["actor/kl_loss"], torch.tensor([0.0, k3]))
    torch.testing.assert_close(out.loss, torch.tensor([0.0, 0.5 * k3]))
    out.loss.sum().backward()
    # d(r - 1 - log r)/d(logprob) = 1 - r with r = p_ref / p.
    torch.testing.assert_close(batch.logprobs.grad, torch.tensor([0.0, -0.5]))


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match="kl_coef=0.1 needs the column ref_logprobs"):
        make_loss(AlgorithmConfig(kl_coef=0.1))(tokens([1.0], [1.0]))
    with pytest.raises(ValueError, match="advantages and behaviour_logprobs"):
        make_loss(AlgorithmConfig())(LossInput(torch.zeros(1), torch.zeros(1), [1]))


def test_supervised_loss_is_the_negative_logprob():
    out = make_loss(AlgorithmConfig(name="sft"))(LossInput(torch.tensor([-0.5, -2.0]), torch.zeros(2), [2]))
    assert out.loss.tolist() == [0.5, 2.0]

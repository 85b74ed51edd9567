from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.training import AlgorithmConfig
from fusion.training.algorithms import cross_entropy, make_algorithm
from fusion.training.algorithms.interface import overlong_penalty
from fusion.training.config import ALGORITHMS
from fusion.training.loss import LossInput

LONGEST = 20
REWARDS = [1.0, 0.0, 1.0, 0.0, 2.0, 5.0]
GROUPS = ["a", "a", "a", "a", "b", "b"]


def of(name: str = "grpo", **keys):
    config = AlgorithmConfig(name=name, **keys)
    config.validate()
    return make_algorithm(config, LONGEST)


def advantages(algorithm, rewards=REWARDS, groups=GROUPS, **more) -> torch.Tensor:
    found, trained = algorithm.advantages(rewards, groups, [1] * len(rewards), **more)
    assert found.dtype == torch.float32 and trained.dtype == torch.bool and trained.all()
    return found


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_advantages_normalised_in_the_group_by_hand(name):
    # Group a: mean 0.5, deviations ±0.5, variance 4 · 0.25 / 3, standard deviation 1 / √3.
    half = 0.5 * math.sqrt(3)
    # Group b: mean 3.5, deviations ±1.5, standard deviation 3 / √2.
    wanted = [half, -half, half, -half, -1 / math.sqrt(2), 1 / math.sqrt(2)]
    torch.testing.assert_close(advantages(of(name, overlong_buffer=0)), torch.tensor(wanted), atol=1e-5, rtol=1e-5)
    centred = of(name, overlong_buffer=0, normalize_advantages=False)
    assert advantages(centred).tolist() == [0.5, -0.5, 0.5, -0.5, -1.5, 1.5]


def test_advantages_of_dr_grpo_by_hand():
    assert advantages(of("dr_grpo")).tolist() == [0.5, -0.5, 0.5, -0.5, -1.5, 1.5]


def test_advantages_of_rloo_by_hand():
    # Group a: the others of a 1 are 0, 1, 0 with mean 1/3; the others of a 0 are 1, 1, 0 with mean 2/3.
    # Group b: 2 - 5 and 5 - 2.
    wanted = torch.tensor([2 / 3, -2 / 3, 2 / 3, -2 / 3, -3, 3])
    torch.testing.assert_close(advantages(of("rloo")), wanted)
    assert advantages(of("rloo"), [4.0, 1.0, 3.0], ["alone", "b", "b"]).tolist() == [0, -2, 2]


def test_advantages_of_reinforce_plus_plus_by_hand():
    # All samples together: mean 9 / 6 = 1.5, deviations -0.5, -1.5, -0.5, -1.5, 0.5, 3.5,
    # squares 0.25 + 2.25 + 0.25 + 2.25 + 0.25 + 12.25 = 17.5, variance 17.5 / 5 = 3.5.
    wanted = torch.tensor([-0.5, -1.5, -0.5, -1.5, 0.5, 3.5]) / math.sqrt(3.5)
    torch.testing.assert_close(advantages(of("reinforce_plus_plus")), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_rewards_that_are_all_equal_give_zeros(name):
    found = advantages(of(name, overlong_buffer=0), [0.1, 0.1, 0.1], ["a", "a", "a"])
    assert found.tolist() == [0, 0, 0]


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("failed", [None, float("nan")])
def test_a_failed_reward_enters_no_statistic(name, failed):
    rewards, groups = [1.0, failed, 0.0, 3.0, failed], ["a", "a", "a", "b", "c"]
    known = [index for index, reward in enumerate(rewards) if reward == reward and reward is not None]
    algorithm = of(name)
    found, trained = algorithm.advantages(rewards, groups, [1] * 5)
    assert trained.tolist() == [True, False, True, True, False] and found[[1, 4]].tolist() == [0, 0]
    assert torch.equal(found[known], advantages(algorithm, [rewards[i] for i in known], [groups[i] for i in known]))
    assert algorithm.filter_rule([failed, failed]) is None


REWARD_LISTS = st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 3)), min_size=1, max_size=24)


@pytest.mark.parametrize("name", ALGORITHMS)
@settings(max_examples=20)
@given(drawn=REWARD_LISTS, shift=st.integers(-5, 5), seed=st.integers(0, 99))
def test_advantages_do_not_depend_on_order_or_level_of_rewards(name, drawn, shift, seed):
    rewards, groups = [float(reward) for reward, _ in drawn], [group for _, group in drawn]
    algorithm = of(name)
    found = advantages(algorithm, rewards, groups)
    shifted = advantages(algorithm, [reward + shift for reward in rewards], groups)
    torch.testing.assert_close(shifted, found, atol=1e-4, rtol=1e-4)
    order = torch.randperm(len(drawn), generator=torch.Generator().manual_seed(seed)).tolist()
    permuted = advantages(algorithm, [rewards[i] for i in order], [groups[i] for i in order])
    torch.testing.assert_close(permuted, found[order], atol=1e-5, rtol=1e-5)
    sums = found.sum() if name == "reinforce_plus_plus" else torch.zeros(4).index_add(0, torch.tensor(groups), found)
    torch.testing.assert_close(sums, torch.zeros_like(sums), atol=1e-4, rtol=0)


def test_only_dapo_filters_groups_that_teach_nothing():
    assert of("dapo").filters and of("dapo").filter_rule([1.0, 1.0, None]) == "dynamic_sampling"
    assert of("dapo").filter_rule([1.0, 0.0]) is None and of("dapo").filter_rule([]) is None
    for name in set(ALGORITHMS) - {"dapo"}:
        assert of(name).filter_rule([1.0, 1.0]) is None and not of(name).filters


NOISE = ([0.1 + 0.2, 0.3], [1.0, 1.0 + 1e-7, 1.0 - 5e-7], [1e6, 1e6 + 0.5], [-3e38, -3e38], [1e-7, 0.0])
SIGNAL = ([0.0, 1e-5], [1.0, 1.0 + 3e-6], [1e6, 1e6 + 2], [3e38, -3e38])


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize(("rewards", "equal"), [(r, True) for r in NOISE] + [(r, False) for r in SIGNAL])
def test_rewards_that_differ_by_rounding_are_equal_for_filter_and_advantages(name, rewards, equal):
    found = advantages(of(name, overlong_buffer=0), rewards, ["a"] * len(rewards))
    assert bool(found.any()) != equal
    if name == "dapo":
        assert (of(name).filter_rule(rewards) is not None) == equal


def test_the_penalty_on_overlong_responses_by_hand():
    # The last 4 of 20 tokens: nothing at 16, a quarter a token behind, 1 at 20 and beyond.
    lengths = [1, 16, 17, 18, 20, 25]
    cut = np.array([False] * 4 + [True] * 2)
    assert overlong_penalty(np.array(lengths), 20, 4, cut).tolist() == [0, 0, -0.25, -0.5, -1, -1]
    # With its end token exactly at the limit it has ended: as one with 19 tokens.
    assert overlong_penalty(np.array([19, 20, 20]), 20, 4, np.array([False, False, True])).tolist() == [
        -0.75,
        -0.75,
        -1,
    ]
    ended, _ = of("dapo").advantages([1.0, 1.0], ["a", "a"], [20, 20], cut=[False, True])
    assert ended[0] > 0 > ended[1]
    # A fifth of the longest is DAPO's own buffer: 4 of 20.
    assert of("dapo").shape_rewards([1.0] * 6, lengths).tolist() == [1, 1, 0.75, 0.5, 0, 0]
    assert math.isnan(of("dapo").shape_rewards([None], [20])[0])
    assert of("dapo", overlong_buffer=0).shape_rewards([1.0], [20]).tolist() == [1]
    assert of("grpo").shape_rewards([1.0], [20]).tolist() == [1]
    assert of("grpo", overlong_buffer=10).shape_rewards([1.0], [15]).tolist() == [0.5]


def test_the_divergence_in_the_reward_by_hand():
    algorithm = of("dr_grpo", kl_in="reward", kl_coef=0.5)
    # 1 - 0.5 · 2 = 0 and 0 - 0.5 · (-1) = 0.5: mean 0.25.
    assert advantages(algorithm, [1.0, 0.0], ["a", "a"], reference_kl=[2.0, -1.0]).tolist() == [-0.25, 0.25]
    with pytest.raises(ValueError, match="algorithm.kl_in=reward needs each sample's reference_kl"):
        algorithm.advantages([1.0], ["a"], [1])
    with pytest.raises(ValueError, match="reference_kl has 1 samples; expected 2"):
        algorithm.advantages([1.0, 0.0], ["a", "a"], [1, 1], reference_kl=[2.0])
    with pytest.raises(ValueError, match="reference_kl has a None"):
        algorithm.advantages([1.0, 0.0], ["a", "a"], [1, 1], reference_kl=[2.0, None])
    out = algorithm.loss(tokens([1.0], [1.0], ref_ratios=[2.0]))
    assert out.loss.tolist() == [-1] and "actor/kl_loss" not in out.metrics, "it is not in the loss as well"


def tokens(
    ratios: list[float],
    advantages: list[float],
    ref_ratios: list[float] | None = None,
    lengths: list[int] | None = None,
) -> LossInput:
    """Tokens of probability 1/2 whose behaviour (reference) policy gave them 1/2 ÷ ratio (· ratio)."""
    logprobs = torch.full((len(ratios),), math.log(0.5), requires_grad=True)
    return LossInput(
        logprobs,
        torch.zeros(len(ratios)),
        lengths or [len(ratios)],
        torch.tensor(advantages),
        math.log(0.5) - torch.tensor(ratios).log(),
        None if ref_ratios is None else math.log(0.5) + torch.tensor(ref_ratios).log(),
    )


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "dapo", "rloo", "reinforce_plus_plus"])
def test_clipped_policy_loss_by_hand(name):
    batch = tokens([1.0, 1.5, 1.5, 0.5, 0.5], [1.0, 1.0, -1.0, 1.0, -1.0])
    out = of(name, clip_low=0.2, clip_high=0.3).loss(batch)
    # Only a ratio that went the way the advantage wanted is cut: 1.5 up to 1.3, and 0.5 down to 0.8.
    torch.testing.assert_close(out.loss, torch.tensor([-1.0, -1.3, 1.5, -0.5, 0.8]))
    assert out.metrics["actor/pg_clipfrac"].tolist() == [0, 1, 0, 0, 1]
    torch.testing.assert_close(out.metrics["actor/ratio_mean"], torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5]))
    torch.testing.assert_close(out.metrics["actor/ppo_kl"], -torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5]).log())
    out.loss.sum().backward()
    # d(-A r)/d(logprob) = -A r, and nothing where it is clipped.
    torch.testing.assert_close(batch.logprobs.grad, torch.tensor([-1.0, 0.0, 1.5, -0.5, 0.0]))


def test_the_loss_of_gspo_by_hand():
    # Geometric means √(2 · 0.5) = 1, √(4 · 1) = 2, and 0.5 of one token.
    batch = tokens([2.0, 0.5, 4.0, 1.0, 0.5], [1.0, 1.0, 3.0, 3.0, 1.0], lengths=[2, 2, 0, 1])
    algorithm = of("gspo", clip_low=0.2, clip_high=0.3)
    out = algorithm.loss(batch)
    # The second is above 1.3 with an advantage of 3; the third below 0.8, but its advantage is not against that.
    torch.testing.assert_close(out.loss, torch.tensor([-1.0, -1.0, -3.9, -3.9, -0.5]))
    assert out.metrics["actor/pg_clipfrac"].tolist() == [0, 0, 1, 1, 0]
    out.loss.sum().backward()
    # Straight through: a token's derivative is -A s with the sequence's s, though its own ratio is another.
    torch.testing.assert_close(batch.logprobs.grad, torch.tensor([-1.0, -1.0, 0.0, 0.0, -0.5]))


def test_the_gradient_of_gspo_is_that_of_its_sequence_objective():
    """Mean over tokens of the straight-through form against the paper's min(s A, clip(s) A) of a sequence."""
    batch = tokens([1.1, 0.9, 1.05, 1.3], [2.0] * 4)
    of("gspo").loss(batch).loss.mean().backward()
    plain = batch.logprobs.detach().clone().requires_grad_()
    s = (plain - batch.behaviour_logprobs).mean().exp()
    (-2.0 * s).backward()
    torch.testing.assert_close(batch.logprobs.grad, plain.grad)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_divergence_from_the_reference_by_hand(name):
    batch = tokens([1.0, 1.0], [0.0, 0.0], ref_ratios=[1.0, 2.0])
    out = of(name, kl_coef=0.5).loss(batch)
    k3 = 2 - 1 - math.log(2)
    torch.testing.assert_close(out.metrics["actor/kl_loss"], torch.tensor([0.0, k3]))
    torch.testing.assert_close(out.loss, torch.tensor([0.0, 0.5 * k3]))
    out.loss.sum().backward()
    # d(r - 1 - log r)/d(logprob) = 1 - r with r = p_ref / p.
    torch.testing.assert_close(batch.logprobs.grad, torch.tensor([0.0, -0.5]))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_missing_columns_are_named(name):
    with pytest.raises(ValueError, match="algorithm.kl_coef=0.1 needs the column ref_logprobs"):
        of(name, kl_coef=0.1).loss(tokens([1.0], [1.0]))
    bare = LossInput(torch.zeros(1), torch.zeros(1), [1])
    with pytest.raises(ValueError, match=f"algorithm.name={name} needs the column advantages"):
        of(name).loss(bare)
    unknown = LossInput(torch.zeros(1), torch.zeros(1), [1], advantages=torch.ones(1))
    with pytest.raises(ValueError, match="algorithm.correction=none needs the column behaviour_logprobs"):
        of(name).loss(unknown)


def test_supervised_loss_is_the_negative_logprob():
    out = cross_entropy(LossInput(torch.tensor([-0.5, -2.0]), torch.zeros(2), [2]))
    assert out.loss.tolist() == [0.5, 2.0]

"""How many drafted tokens a step verifies: not fewer expected tokens a second than without, and none where it does not
pay."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.inference.verification import StepCost
from fusion.rollout.drafts.budget import (
    ACCEPTANCE_BINS,
    EXPLORE_EVERY,
    MIN_GAIN,
    MIN_STEPS,
    Acceptance,
    CostFit,
    DraftBudget,
)
from fusion.rollout.drafts.losses import DraftLosses


def measured(decode: float, drafted: float, token: float, fixed: float = 10.0, sequences: int = 8) -> DraftBudget:
    """A budget that has seen steps with these costs, in milliseconds."""
    budget, draw = DraftBudget(), np.random.default_rng(0)
    for _ in range(60):
        with_draft = int(draw.integers(0, sequences + 1))
        tokens = int(draw.integers(with_draft, 8 * with_draft + 1))
        single = sequences - with_draft
        cost = fixed + decode * single + drafted * with_draft + token * tokens
        budget.observe_step(StepCost(single, with_draft, tokens, cost / 1e3))
    budget.losses = DraftLosses()  # to measure them is not counted
    return budget


def drafts(sequences: int, depth: int, probability: float) -> tuple[np.ndarray, np.ndarray]:
    owners = np.repeat(np.arange(sequences), depth)
    return owners, np.tile(probability ** np.arange(1, depth + 1), sequences)


def test_free_tokens_are_all_taken_and_dear_ones_not_at_all():
    owners, probabilities = drafts(8, 7, 0.9)
    assert measured(1.0, 1.0, 0.001).choose(owners, probabilities, 8).all()
    assert not measured(1.0, 1.0, 5.0).choose(owners, probabilities, 8).any()


def test_between_them_the_most_probable_are_taken():
    owners, probabilities = drafts(8, 7, 0.8)
    chosen = measured(1.0, 1.0, 1.0).choose(owners, probabilities, 8)
    assert 0 < chosen.sum() < len(chosen)
    assert probabilities[chosen].min() >= probabilities[~chosen].max()


@given(
    costs=st.tuples(*(st.floats(0.01, 5.0) for _ in range(3))),
    probability=st.floats(0.05, 0.99),
    depth=st.integers(1, 8),
)
def test_no_other_number_of_tokens_has_more_a_second(costs, probability, depth):
    budget = measured(*costs)
    owners, probabilities = drafts(8, depth, probability)
    count = int(budget.choose(owners, probabilities, 8).sum())
    order = np.argsort(-probabilities, kind="stable")
    gains = probabilities[order]

    def rate(taken: int) -> float:
        drafted = len(set(owners[order[:taken]]))
        cost = budget._nearest(3).of(np.array(8.0 - drafted), np.array(float(drafted)), np.array(float(taken)))
        return (8 + gains[:taken].sum()) / float(cost)

    best = max(rate(taken) for taken in range(len(order) + 1))
    assert rate(count) >= rate(0)
    assert rate(count) >= best / MIN_GAIN - 1e-9 if count == 0 else rate(count) == pytest.approx(best)


@given(
    sequences=st.lists(st.tuples(st.booleans(), st.floats(0.05, 0.99)), min_size=8, max_size=8),
    token=st.floats(0.01, 3.0),
)
def test_tokens_of_urgent_sequences_come_first_and_no_draft_is_slower_than_none(sequences, token):
    budget, owners = measured(1.0, 1.0, token), np.repeat(np.arange(8), 6)
    probabilities = np.concatenate([share ** np.arange(1, 7) for _, share in sequences])
    urgent = np.array([is_urgent for is_urgent, _ in sequences])[owners]
    chosen = budget.choose(owners, probabilities, 8, urgent=urgent)
    weighted = probabilities * np.where(urgent, 2.0, 1.0)
    if 0 < chosen.sum() < len(chosen):
        assert weighted[chosen].min() >= weighted[~chosen].max()
    drafted, fit = len(set(owners[chosen])), budget._nearest(3)
    with_drafts, without = ((8 - drafted, drafted, chosen.sum()), (8, 0, 0))
    seconds, plain_seconds = (float(fit.of(*(np.array(float(x)) for x in counts))) for counts in (with_drafts, without))
    assert (8 + probabilities[chosen].sum()) / seconds >= 8 / plain_seconds - 1e-9
    for owner in range(8):
        taken = np.flatnonzero(chosen[owners == owner])
        assert taken.tolist() == list(range(len(taken))), "no token before the one that it follows"


def test_drafts_that_do_not_pay_are_tried_again_now_and_then():
    budget = measured(1.0, 1.0, 5.0)
    owners, probabilities = drafts(8, 4, 0.5)
    asked, verified = 0, 0
    for _ in range(4 * EXPLORE_EVERY):
        if not budget.skips(8):
            asked += 1
            verified += bool(budget.choose(owners, probabilities, 8).any())
    assert 1 <= verified <= 4 and asked < 80


def test_where_there_are_no_drafts_they_are_looked_up_in_every_fourth_step():
    budget, nothing = DraftBudget(), (np.zeros(0, np.int64), np.zeros(0))
    asked = [not budget.skips(8) and not budget.choose(*nothing, 8).any() for _ in range(400)]
    assert asked[0] and 100 <= sum(asked) <= 104
    owners, probabilities = drafts(8, 8, 0.9)
    later = [not budget.skips(8) and budget.choose(owners, probabilities, 8).any() for _ in range(20)]
    assert any(later[:4])


@pytest.mark.parametrize("sequences", [1, 8, 64])
def test_drafts_that_are_never_right_cost_less_than_a_twentieth(sequences):
    """Although the index is sure of them, and a drafted token costs as much as a decoded one."""
    budget, seconds, steps = DraftBudget(), 0.0, 2000
    owners, probabilities = drafts(sequences, 8, 0.99)
    for _ in range(steps):
        chosen = np.zeros(len(owners), bool)
        if not budget.skips(sequences):
            chosen = budget.choose(owners, probabilities, sequences)
        drafted, tokens = len(set(owners[chosen])), int(chosen.sum())
        if tokens:
            budget.acceptance.observe(np.ones(drafted), np.zeros(drafted, bool))
        owners, probabilities = drafts(sequences, 8, budget.acceptance.by_share()[-1])
        cost = (10.0 + sequences + tokens) / 1e3
        budget.observe_step(StepCost(sequences - drafted, drafted, tokens, cost))
        seconds += cost
    assert seconds <= 1.05 * steps * (10.0 + sequences) / 1e3


@pytest.mark.parametrize("sequences", [1, 4, 64])
@pytest.mark.parametrize("token", [0.0, 0.2])
def test_drafts_that_pay_are_verified_in_most_steps_from_the_first_on(sequences, token):
    """A short response ends before a budget that begins with steps without drafts has learned anything."""
    budget, verified = DraftBudget(), 0
    owners, probabilities = drafts(sequences, 8, 0.9)
    for _ in range(40):
        chosen = np.zeros(len(owners), bool)
        if not budget.skips(sequences):
            chosen = budget.choose(owners, probabilities, sequences)
        drafted, tokens = len(set(owners[chosen])), int(chosen.sum())
        verified += tokens >= sequences
        seconds = 0.010 + 0.001 * (sequences + token * tokens)
        accepted = int(probabilities[chosen].sum())
        budget.observe_step(StepCost(sequences - drafted, drafted, tokens, seconds, accepted))
    assert verified >= 36


def test_a_size_that_is_never_measured_drafts_only_at_first():
    budget = DraftBudget()  # every step also prefills, say
    owners, probabilities = drafts(32, 4, 0.9)
    verified = [bool(budget.choose(owners, probabilities, 32).any()) for _ in range(100) if not budget.skips(32)]
    assert sum(verified) == MIN_STEPS and len(verified) < 20


@pytest.mark.parametrize("weights", [(10.0, 1.0, -3.0, 1.5), (10.0, 1.0, 5.0, -0.5)])
def test_where_drafts_are_alike_only_the_cost_of_draft_and_tokens_together_counts(weights):
    fit = CostFit()
    fit.weights = np.array(weights)
    assert fit.expected(4, 4, 16) == pytest.approx(14 + 12) == float(fit.of(*np.array([4.0, 4.0, 16.0])))
    assert fit.expected(4, 4, 40 if weights[3] < 0 else 4) == pytest.approx(14), "a draft saves no time by its cost"


def test_the_costs_of_a_draft_and_of_a_token_are_told_apart():
    """Both are explored: many short drafts, and few long ones."""
    budget, owners = DraftBudget(), np.repeat(np.arange(16), 8)
    for _ in range(MIN_STEPS):
        chosen = budget.choose(owners, np.tile(0.9 ** np.arange(1, 9), 16), 16)
        drafted, tokens = len(set(owners[chosen])), int(chosen.sum())
        budget.observe_step(StepCost(16 - drafted, drafted, tokens, 0.010 + 0.002 * drafted + 0.0005 * tokens))
    fit = budget._nearest(4)
    few, many = (float(fit.of(np.array(16.0 - d), np.array(d), np.array(16.0))) for d in (2.0, 16.0))
    assert few == pytest.approx(0.022, rel=0.05) and many == pytest.approx(0.050, rel=0.05)


@pytest.mark.parametrize("sequences", [1, 16])
def test_the_fit_stays_sound_over_many_noisy_steps(sequences):
    fit, draw = CostFit(), np.random.default_rng(0)
    for step in range(2000):
        tokens = 4 * sequences if step % 200 == 0 else 0
        drafted = sequences if tokens else 0
        seconds = (0.010 + 0.001 * sequences + 0.0002 * tokens) * draw.lognormal(0, 0.1)
        fit.observe(StepCost(sequences - drafted, drafted, tokens, seconds))
        if step % 100 == 99:
            assert np.linalg.eigvalsh(fit._covariance).min() > 0
            plain = float(fit.of(np.array(float(sequences)), np.array(0.0), np.array(0.0)))
            assert plain == pytest.approx(0.010 + 0.001 * sequences, rel=0.2)


def test_no_more_tokens_are_taken_than_there_is_room_for():
    owners, probabilities = drafts(8, 7, 0.9)
    budget = measured(1.0, 1.0, 0.001)
    chosen = budget.choose(owners, probabilities, 8, max_tokens=10)
    assert chosen.sum() == 10 and probabilities[chosen].min() >= probabilities[~chosen].max()


def test_acceptance_is_what_was_observed():
    acceptance, draw = Acceptance(), np.random.default_rng(0)
    assert np.diff(acceptance.by_share()).min() > 0, "the share itself, at first"
    for _ in range(400):
        shares = draw.random(50)
        acceptance.observe(shares, draw.random(50) < shares**2)
    given_ = (np.arange(ACCEPTANCE_BINS) + 0.5) / ACCEPTANCE_BINS
    assert acceptance.by_share() == pytest.approx(given_**2, abs=0.15)
    acceptance.observe(np.array([]), np.array([]))


def test_one_slow_look_up_does_not_count_for_many():
    fit = CostFit()
    for _ in range(20):
        fit.observe(StepCost(8, 0, 0, 0.010, 0, 0.0))
        fit.observe(StepCost(0, 8, 16, 0.0126, 11, 0.0005))
    before = fit.drafting_s
    counted = fit.observe(StepCost(0, 8, 16, 1.0121, 11, 1.0))
    assert counted < 0.05 and fit.drafting_s < 1.1 * before

"""Drafting costs a run little where it does not pay, whatever each step costs."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fusion.inference.verification import StepCost
from fusion.rollout.drafts.budget import DraftBudget
from fusion.rollout.drafts.losses import CREDIT_STEPS, MAX_LOSS, DraftLosses

SECONDS = st.floats(1e-4, 10.0)


@given(steps=st.lists(st.tuples(SECONDS, st.floats(-1.0, 10.0)), min_size=1, max_size=300))
def test_what_is_lost_is_bounded_whatever_each_step_costs(steps):
    """``steps``: of each the seconds without drafts, and how many times as much it takes longer if it drafts."""
    losses, lost, longest, dearest = DraftLosses(), 0.0, 0.0, 0.0
    for plain, factor in steps:
        cost = max(factor, -0.9) * plain if losses.allows else 0.0
        losses.observe(plain + cost, cost)
        lost, longest, dearest = lost + cost, max(longest, plain + cost), max(dearest, cost)
        assert lost <= MAX_LOSS * losses.seconds + CREDIT_STEPS * longest + dearest + 1e-9


@given(st.lists(st.tuples(SECONDS, st.floats(-0.9, 0.0)), max_size=100))
def test_where_nothing_is_lost_nothing_is_held_back(steps):
    losses = DraftLosses()
    for plain, factor in steps:
        assert losses.allows
        losses.observe(plain * (1 + factor), plain * factor)


def test_what_was_saved_offsets_later_losses_only_in_part():
    losses = DraftLosses()
    for _ in range(1000):
        losses.observe(0.5, -0.5)
    lost = 0
    while losses.allows and lost < 1000:
        losses.observe(2.0, 1.0)
        lost += 1
    assert 2 * MAX_LOSS * 500 < lost <= 2 * MAX_LOSS * losses.seconds + CREDIT_STEPS * 2.0 + 1


def seconds_of(
    budget: DraftBudget,
    steps: int,
    *,
    sequences: int,
    costs: tuple[float, float, float],
    look_up: float,
    right: float,
    noise: float,
    prefills: float,
) -> tuple[float, float]:
    """Return the seconds of a run, and those of as many tokens without drafts. ``costs``: of a decode, a draft and a
    drafted token, where what a step costs anyway is 1; ``look_up``: of a step that looks for drafts, ``right``: how
    often a token is; ``noise``: of a step; ``prefills``: share of steps that also prefill."""
    draw = np.random.default_rng(0)
    decode, draft, token = costs
    plain = (1.0 + decode * sequences) / 1e3
    taken = without = 0.0
    for _ in range(steps):
        chosen, owners, drafting = np.zeros(8 * sequences, bool), np.repeat(np.arange(sequences), 8), 0.0
        if not budget.skips(sequences):
            drafting = look_up * plain
            path = np.cumprod(np.full(8, budget.acceptance.by_share()[-1]))
            chosen = budget.choose(owners, np.tile(path, sequences), sequences)
        drafted, tokens, accepted = len(set(owners[chosen])), int(chosen.sum()), 0
        for owner in range(sequences if tokens else 0):
            count = int(chosen[owners == owner].sum())
            was_right = draw.random(count) < right
            kept = count if was_right.all() else int(was_right.argmin())
            accepted += kept
            tried = min(kept + 1, count)
            budget.acceptance.observe(np.ones(tried), was_right[:tried])
        added = (draft - decode) * drafted + token * tokens
        prompt = 3 * plain if draw.random() < prefills else 0.0
        seconds = (plain + added / 1e3) * draw.lognormal(0, noise) + drafting + prompt
        cost = StepCost(sequences - drafted, drafted, tokens, seconds, accepted, drafting, prefills=prompt > 0)
        budget.observe_step(cost)
        taken += plain + added / 1e3 + drafting + prompt
        without += plain * (1 + accepted / sequences) + prompt
    return taken, without


@example(sequences=4, decode=0.5, draft=1.0, token=1.0, look_up=1.0, right=0.921875, noise=0.0)  # looking up is dear
@given(
    sequences=st.sampled_from([1, 4, 64]),
    decode=st.floats(0.001, 1.0),
    draft=st.floats(1.0, 3.0),
    token=st.floats(0.001, 3.0),
    look_up=st.floats(0.0, 1.0),
    right=st.floats(0.0, 0.99),
    noise=st.sampled_from([0.0, 0.1]),
)
def test_a_run_never_loses_more_than_a_twentieth_after_its_first_steps(
    sequences, decode, draft, token, look_up, right, noise
):
    costs = decode, draft * decode, token * decode
    taken, without = seconds_of(
        DraftBudget(),
        1000,
        sequences=sequences,
        costs=costs,
        look_up=look_up,
        right=right,
        noise=noise,
        prefills=0.0,
    )
    assert taken <= 1.05 * without


@pytest.mark.parametrize("token", [0.0, 0.2])
@pytest.mark.parametrize("prefills", [0.0, 0.3])
def test_drafts_that_pay_are_not_held_back(token, prefills):
    """Nor by what it costs to look them up."""
    taken, without = seconds_of(
        DraftBudget(),
        300,
        sequences=8,
        costs=(0.05, 0.06, token * 0.05),
        look_up=0.05,
        right=0.9,
        noise=0.1,
        prefills=prefills,
    )
    assert taken <= (0.5 if prefills == 0.0 else 0.7) * without

"""How many drafted tokens a step verifies: those that are probable enough to be worth a row, by how often others were
right."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fusion.rollout.drafts.budget import (
    BUSY_LOOK_EVERY,
    CARD,
    HOST,
    LOOK_EVERY,
    MIN_GAIN,
    MIN_PROBABILITY,
    SHARES,
    Acceptance,
    DraftBudget,
    step_rows,
)

NOTHING = np.zeros(0, np.int64), np.zeros(0)

paths = st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), max_size=6)
"""Of each sequence how probable a token is behind the one before it"""


@given(
    shares=paths,
    others=st.sampled_from([0, 10, 60]),
    rows=st.sampled_from([CARD, HOST]),
    max_tokens=st.integers(0, 30),
    priority=st.lists(st.booleans(), min_size=6, max_size=6),
)
def test_the_most_probable_tokens_of_drafts_that_pay_are_taken_and_none_before_the_one_before_it(
    shares, others, rows, max_tokens, priority
):
    """``others``: sequences that are decoded, too, and have no draft."""
    owners = np.repeat(np.arange(len(shares)), [len(one) for one in shares])
    probabilities = np.concatenate([np.zeros(0), *(np.cumprod(one) for one in shares)])
    urgent, sequences = np.array(priority)[owners], max(1, len(shares) + others)
    budget, (fixed, draft_rows, look_rows) = DraftBudget(rows), rows
    price = budget.row_price(sequences)
    gains = [np.cumprod(one).sum() - price * (len(one) + draft_rows) for one in shares]
    may = np.isin(owners, [owner for owner, gain in enumerate(gains) if gain > 0])
    gain = sum(gain for gain in gains if gain > 0) - look_rows * price * sequences
    enough = probabilities[may].sum() - MIN_GAIN * sequences
    assume(all(abs(number) > 1e-9 for number in (*gains, gain, enough)))
    chosen = budget.choose(owners, probabilities, sequences, max_tokens=max_tokens, urgent=urgent)
    assert not chosen[~may].any()
    assert chosen.sum() == (min(max_tokens, may.sum()) if gain > 0 and enough > 0 else 0)
    weighted = probabilities * np.where(urgent, 2.0, 1.0)
    if 0 < chosen.sum() < may.sum():
        assert weighted[chosen].min() >= weighted[may & ~chosen].max()
    for owner in range(len(shares)):
        mine = chosen[owners == owner]
        assert (np.flatnonzero(mine) == np.arange(mine.sum())).all()
    if 0 < chosen.sum() == may.sum():
        drafts = chosen.sum() + draft_rows * len(set(owners[chosen])) + look_rows * sequences
        tokens = sequences + probabilities[chosen].sum()
        assert tokens / (fixed + sequences + drafts) > sequences / (fixed + sequences)


def test_the_more_sequences_run_the_surer_a_token_must_be():
    least = [DraftBudget().min_probability(count) for count in (1, 16, 64, 256, 4096)]
    assert least[0] == least[1] == MIN_PROBABILITY and least[2:] == pytest.approx([0.2, 0.5, 0.941], abs=1e-3)


@given(
    sequences=st.integers(1, 1000),
    free_rows=st.sampled_from([0.5, 1.0, 2.0]),
    path=st.lists(st.floats(0.05, 0.99), min_size=1, max_size=8),
)
def test_a_row_that_is_verified_promises_more_tokens_a_second_than_a_step_has_without(sequences, free_rows, path):
    """Where a step takes as long as the rows that the budget assumes before its first, or half or twice as many."""
    least = DraftBudget().min_probability(sequences)
    taken = [one for one in np.cumprod(path) if one >= least]
    fixed = 256 * free_rows
    rate = (sequences + sum(taken)) / (fixed + sequences + len(taken))
    without = sequences / (fixed + sequences)
    assert rate >= (without if free_rows >= 1 else 0.97 * without) - 1e-12


@pytest.mark.parametrize("found", [NOTHING, (np.zeros(1, int), np.full(1, 0.5))], ids=["nothing", "little"])
@pytest.mark.parametrize("rows, sequences, every", [(CARD, 8, LOOK_EVERY), (HOST, 64, BUSY_LOOK_EVERY)])
def test_where_nothing_is_worth_its_time_it_is_looked_for_in_every_eighth_step(found, rows, sequences, every):
    """In fewer where looking costs more."""
    budget = DraftBudget(rows)
    looked = [not budget.skips() and not budget.choose(*found, sequences).any() for _ in range(400)]
    assert looked[0] and 400 / every <= sum(looked) <= 400 / every + 6
    some = np.repeat(np.arange(sequences), 8), np.ones(8 * sequences)
    later = [not budget.skips() and budget.choose(*some, sequences).any() for _ in range(40)]
    assert any(later[:every]) and all(later[every:]), "then in every step again"


def depth_of(budget: DraftBudget, sequences: int) -> int:
    """How many tokens of a path are worth a row where the index is sure of all of them."""
    return int((np.cumprod(np.full(32, budget.by_share()[-1])) >= budget.min_probability(sequences)).sum())


@pytest.mark.parametrize("sequences", [1, 16, 256])
def test_drafts_that_are_never_right_are_hardly_verified_and_found_again_when_they_are(sequences):
    """Although the index is sure of them."""
    budget, verified = DraftBudget(), np.zeros(6000)
    for step in range(len(verified)):
        if budget.skips():
            continue
        depth = depth_of(budget, sequences)
        chosen = budget.choose(np.repeat(np.arange(sequences), depth), np.ones(sequences * depth), sequences)
        verified[step] = chosen.sum() / sequences
        if tokens := int(chosen.sum()):
            budget.acceptance.observe(np.ones(tokens), np.full(tokens, step >= 4000))
    assert verified[1000:4000].mean() < 0.05 and verified[1000:4000].any(), "tried now and then"
    assert verified[5500:].mean() > 10


def test_text_that_repeats_is_drafted_far_from_the_first_steps_on():
    budget, depths = DraftBudget(), []
    for _ in range(200):
        assert not budget.skips()
        depths.append(depth_of(budget, 8))
        budget.choose(np.zeros(1, int), np.ones(1), 8)
        budget.acceptance.observe(np.ones(8), np.ones(8, bool))
    assert depths == [32] * 200


def test_acceptance_is_what_was_observed():
    acceptance, draw = Acceptance(), np.random.default_rng(0)
    assert acceptance.by_share() == pytest.approx(SHARES), "the share itself, at first"
    for _ in range(400):
        tokens = draw.random(50)
        acceptance.observe(tokens, draw.random(50) < tokens**2)
    assert acceptance.by_share() == pytest.approx(SHARES**2, abs=0.15)
    acceptance.observe(np.array([]), np.array([]))


def test_an_emulated_card_computes_on_the_host_unless_it_is_paced():
    kinds = ("npu", "cuda", "emulated", "ledger")
    assert [step_rows(kind, paced=False) for kind in kinds] == [CARD, CARD, HOST, HOST]
    assert {step_rows(kind, paced=True) for kind in kinds} == {CARD}


@pytest.mark.parametrize(("rows", "promised", "count"), [(CARD, 0.9, 1), (HOST, 0.9, 0), (HOST, 1.0, 4)])
def test_a_draft_has_to_pay_for_being_planned(rows, promised, count):
    """Of 32 sequences a row takes half a token of a host, and the draft another half."""
    chosen = DraftBudget(rows).choose(np.zeros(count or 1, int), np.full(count or 1, promised), 32)
    assert not chosen.any(), "one draft does not promise enough for a step of 32"
    owners = np.repeat(np.arange(32), count or 1)
    assert DraftBudget(rows).choose(owners, np.full(len(owners), promised), 32).sum() == 32 * count


def test_the_drafts_of_a_step_have_to_pay_for_being_looked_up():
    """Of 32 sequences a look-up takes a fifth of a token of each, 6.4 in all; a draft of four sure tokens gains 1.5."""
    for drafts, verified in ((4, 0), (5, 20)):
        owners = np.repeat(np.arange(drafts), 4)
        assert DraftBudget(HOST).choose(owners, np.ones(len(owners)), 32).sum() == verified

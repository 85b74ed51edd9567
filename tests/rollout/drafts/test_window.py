"""The window of each sequence: it grows while drafts are right, within its bounds."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fusion.rollout.drafts.window import FIRST, MAX_WINDOW, STEP, WindowBudget

drafts = st.tuples(st.sampled_from("abc"), st.integers(1, 32), st.floats(0, 1))


@given(st.lists(drafts, max_size=80))
def test_a_window_grows_by_2_after_a_draft_that_was_right_and_falls_to_2_after_another(done):
    budget, expected = WindowBudget(), dict.fromkeys("abc", FIRST)
    for request, drafted, share in done:
        kept = round(drafted * share)
        budget.observe_draft(request, drafted, kept)
        expected[request] = min(expected[request] + STEP, MAX_WINDOW) if kept == drafted else FIRST
        assert {name: budget.max_depth(name) for name in "abc"} == expected
        assert all(FIRST <= window <= MAX_WINDOW for window in expected.values())
    budget.end("a")
    assert budget.max_depth("a") == FIRST and budget.max_depth("b") == expected["b"]


@given(st.lists(st.lists(st.floats(0, 1), min_size=1, max_size=6), max_size=6), st.integers(0, 30))
def test_the_most_probable_tokens_are_taken_and_none_before_the_one_before_it(shares, max_tokens):
    owners = np.repeat(np.arange(len(shares)), [len(one) for one in shares])
    probabilities = np.concatenate([np.zeros(0), *(np.cumprod(one) for one in shares)])
    chosen = WindowBudget().choose(owners, probabilities, len(shares), max_tokens=max_tokens)
    assert chosen.sum() == min(max_tokens, len(owners))
    if 0 < chosen.sum() < len(owners):
        assert probabilities[chosen].min() >= probabilities[~chosen].max()
    for owner in range(len(shares)):
        mine = chosen[owners == owner]
        assert (np.flatnonzero(mine) == np.arange(mine.sum())).all()

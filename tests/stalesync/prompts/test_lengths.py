"""Lengths that repeat, and are distributed as those of the published trace."""

from __future__ import annotations

from functools import cache
from math import exp

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.inference.config import FORCED_SPREAD
from stalesync.prompts.lengths import ForcedLengths

SIGMA_PROMPT, SIGMA_WITHIN, RUNAWAY = FORCED_SPREAD

GROUPS, MEMBERS = 1500, 8


@cache
def _drawn(median=1160.0, cap=32768, seed=3):
    lengths = ForcedLengths(seed, median, cap)
    return np.array([lengths.of_members(f"e0-{group}", range(MEMBERS)) for group in range(GROUPS)])


@given(st.integers(0, 2**40), st.text(max_size=12), st.integers(0, 64), st.floats(1, 5000), st.integers(1, 60_000))
def test_a_length_repeats_and_keeps_to_the_cap(seed, prompt, member, median, cap):
    first = ForcedLengths(seed, median, cap)(prompt, member)
    again = ForcedLengths(seed, median, cap)
    again(prompt + "x", member + 1)
    assert again(prompt, member) == first and 1 <= first <= cap
    assert again.of_members(prompt, range(member + 3))[member] == first


def test_lengths_depend_on_seed_prompt_and_member():
    lengths = ForcedLengths(3, 1160.0, 32768)
    prompts = {lengths(f"e0-{n}", 0) for n in range(20)}
    members = {lengths("e0-0", n) for n in range(20)}
    seeds = {ForcedLengths(n, 1160.0, 32768)("e0-0", 0) for n in range(20)}
    assert min(len(prompts), len(members), len(seeds)) > 17


def test_a_row_that_comes_back_is_as_long_as_before():
    lengths = ForcedLengths(3, 1160.0, 1 << 40, (0.9, 0.0, 0.0))
    assert lengths("e0-7", 0) == lengths("e1-7", 3) != lengths("e1-8", 0)
    lengths = ForcedLengths(3, 1160.0, 1 << 40, (0.9, 0.25, 0.0))
    assert lengths("e0-7", 0) != lengths("e1-7", 0), "but for what is due to sampling"


def test_moments_are_those_of_the_trace():
    drawn = _drawn()
    capped = drawn == 32768
    assert capped.mean() == pytest.approx(RUNAWAY, abs=0.004)
    assert np.median(drawn) == pytest.approx(1160, rel=0.08)
    usual = drawn[~capped]
    assert np.percentile(usual, 90) == pytest.approx(4115, rel=0.1)
    assert np.percentile(usual, 99) == pytest.approx(10 * 1160, rel=0.2)
    assert usual.mean() == pytest.approx(1160 * exp((SIGMA_PROMPT**2 + SIGMA_WITHIN**2) / 2), rel=0.08)


def test_siblings_are_alike_as_much_as_published():
    """The ICC of log lengths (one-way), 0.73 in the trace."""
    logs = np.log(_drawn())
    between, within = MEMBERS * logs.mean(1).var(ddof=1), logs.var(1, ddof=1).mean()
    assert (between - within) / (between + (MEMBERS - 1) * within) == pytest.approx(0.73, abs=0.04)


def test_short_stand_ins_are_distributed_alike():
    scaled = _drawn(median=1160 / 32, cap=1024)
    assert np.abs(scaled - _drawn() / 32).max() <= 0.5, "the same draws, rounded"

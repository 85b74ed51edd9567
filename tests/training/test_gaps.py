from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.training.gaps import INNER_STEP, LAGS, MAX_GAP, MIN_GAP, RESOLUTION, TOKENS, gap_metrics, gap_sums
from fusion.training.loss import LossInput


def tokens(gaps: list[float], versions: list[int] | None = None, version: int | None = None) -> LossInput:
    """Tokens to which the trainer gives probability 1/2 and the engine less, by so much in the logarithm."""
    half = torch.full((len(gaps),), math.log(0.5))
    lags = None if versions is None else torch.tensor(versions, dtype=torch.int32)
    return LossInput(
        half, half, [len(gaps)], behaviour_logprobs=half - torch.tensor(gaps), versions=lags, version=version
    )


def test_gaps_by_hand_and_by_staleness():
    # Versions 5, 5, 3 in a step that trains version 5: lags 0, 0, 2.
    metrics = gap_metrics(gap_sums(tokens([0.0, 0.2, 0.4], [5, 5, 3], 5), None))
    assert metrics["training/rollout_logprobs_diff_mean"] == pytest.approx(0.2)
    probs = [0.5 * (1 - math.exp(-gap)) for gap in (0.0, 0.2, 0.4)]
    assert metrics["training/rollout_probs_diff_mean"] == pytest.approx(sum(probs) / 3)
    assert metrics["staleness/0/rollout_logprobs_diff_mean"] == pytest.approx(0.1)
    assert metrics["staleness/2/rollout_logprobs_diff_mean"] == pytest.approx(0.4)
    assert metrics["staleness/2/rollout_probs_diff_mean"] == pytest.approx(probs[2])
    assert metrics["staleness/0/token_fraction"] == pytest.approx(2 / 3)
    assert 0.4 <= metrics["staleness/2/rollout_logprobs_diff_p99"] <= 0.4 * RESOLUTION * (1 + 1e-6)
    assert not any(name.startswith("staleness/1/") for name in metrics)


def test_tokens_count_by_their_weights():
    metrics = gap_metrics(gap_sums(tokens([0.1, 0.3]), torch.tensor([3.0, 1.0])))
    assert metrics["training/rollout_logprobs_diff_mean"] == pytest.approx((3 * 0.1 + 0.3) / 4)


def test_without_versions_nothing_is_said_of_staleness():
    for batch in (tokens([0.1]), tokens([0.1], [3]), tokens([0.1], None, 3)):
        assert not any(name.startswith("staleness/") for name in gap_metrics(gap_sums(batch, None)))
    assert gap_metrics(gap_sums(tokens([]), None)) == {}


def test_great_lags_share_a_row():
    metrics = gap_metrics(gap_sums(tokens([0.1, 0.1, 0.1], [0, 1, 30 - LAGS + 1], 30), None))
    assert metrics[f"staleness/{LAGS}+/token_fraction"] == pytest.approx(2 / 3)
    assert metrics[f"staleness/{LAGS - 1}/token_fraction"] == pytest.approx(1 / 3)


def batch_of(start, behaviour, *, lengths, now=None, updated=False, computed=False):
    """Log-probabilities at the step's start, of the engine, and now (default: at the start); ``computed``: the first
    are given separately."""
    start, behaviour = torch.tensor(start), torch.tensor(behaviour)
    now = start if now is None else torch.tensor(now)
    proximal = start if computed else None
    return LossInput(now, now, lengths, behaviour_logprobs=behaviour, proximal_logprobs=proximal, updated=updated)


def test_the_drift_within_a_step_is_not_counted_as_gap():
    start, behaviour, now = [-1.0, -2.0], [-1.0, -2.0], [-0.5, -2.25]
    first = gap_metrics(gap_sums(batch_of(start, behaviour, lengths=[2]), None))
    assert first["training/rollout_logprobs_diff_mean"] == 0 and INNER_STEP not in first
    known = gap_metrics(gap_sums(batch_of(start, behaviour, lengths=[2], now=now, updated=True, computed=True), None))
    assert known["training/rollout_logprobs_diff_mean"] == 0
    assert known[INNER_STEP] == pytest.approx((0.5 + 0.25) / 2)
    unknown = gap_metrics(gap_sums(batch_of(start, behaviour, lengths=[2], now=now, updated=True), None))
    assert unknown == {INNER_STEP: pytest.approx((0.5 + 0.25) / 2)}


def test_the_effective_sample_size_by_hand():
    # Ratios 1, 1, 4 and 1/2 of tokens; 1, 4 and 1/2 of the sequences with tokens.
    logs = [0.0, 0.0, math.log(4), math.log(0.5)]
    metrics = gap_metrics(gap_sums(batch_of(logs, [0.0] * 4, lengths=[2, 0, 1, 1]), None))
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(6.5**2 / (4 * 18.25))
    assert metrics["rollout_corr/rollout_is_seq_eff_sample_size"] == pytest.approx(5.5**2 / (3 * 17.25))
    equal = gap_metrics(gap_sums(batch_of([-0.5] * 4, [-0.75] * 4, lengths=[2, 2]), None))
    assert equal["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1)


def test_the_effective_sample_size_falls_to_one_sample_of_n_where_one_outweighs_all():
    metrics = gap_metrics(gap_sums(batch_of([0.0] * 9 + [15.0], [0.0] * 10, lengths=[1] * 10), None))
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1 / 10, rel=1e-3)


GAPS = st.lists(st.tuples(st.floats(MIN_GAP, MAX_GAP), st.integers(0, 12)), min_size=1, max_size=300)


@settings(max_examples=20)
@given(GAPS, st.integers(0, 300))
def test_sums_of_parts_are_the_sums_of_all(drawn, cut):
    whole = gap_sums(tokens([gap for gap, _ in drawn], [version for _, version in drawn], 12), None)
    parts = [
        gap_sums(tokens([gap for gap, _ in part], [version for _, version in part], 12), None)
        for part in (drawn[:cut], drawn[cut:])
    ]
    torch.testing.assert_close(parts[0][TOKENS] + parts[1][TOKENS], whole[TOKENS], atol=1e-4, rtol=1e-5)


@settings(max_examples=20)
@given(GAPS)
def test_the_p99_is_at_least_the_true_one_and_near_it(drawn):
    gaps = sorted(gap for gap, _ in drawn)
    true = gaps[math.ceil(0.99 * len(gaps)) - 1]
    found = gap_metrics(gap_sums(tokens(gaps), None))["training/rollout_logprobs_diff_p99"]
    # a float32 difference of logarithms near 1/2 has lost some of its last bits
    assert true - 1e-6 <= found <= (true + 1e-6) * RESOLUTION * (1 + 1e-5)

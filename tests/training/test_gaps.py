from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.training.gaps import LAGS, MAX_GAP, MIN_GAP, RESOLUTION, gap_metrics, gap_sums
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


GAPS = st.lists(st.tuples(st.floats(MIN_GAP, MAX_GAP), st.integers(0, 12)), min_size=1, max_size=300)


@settings(max_examples=20)
@given(GAPS, st.integers(0, 300))
def test_sums_of_parts_are_the_sums_of_all(drawn, cut):
    whole = gap_sums(tokens([gap for gap, _ in drawn], [version for _, version in drawn], 12), None)
    parts = [
        gap_sums(tokens([gap for gap, _ in part], [version for _, version in part], 12), None)
        for part in (drawn[:cut], drawn[cut:])
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole, atol=1e-4, rtol=1e-5)


@settings(max_examples=20)
@given(GAPS)
def test_the_p99_is_at_least_the_true_one_and_near_it(drawn):
    gaps = sorted(gap for gap, _ in drawn)
    true = gaps[math.ceil(0.99 * len(gaps)) - 1]
    found = gap_metrics(gap_sums(tokens(gaps), None))["training/rollout_logprobs_diff_p99"]
    # a float32 difference of logarithms near 1/2 has lost some of its last bits
    assert true - 1e-6 <= found <= (true + 1e-6) * RESOLUTION * (1 + 1e-5)

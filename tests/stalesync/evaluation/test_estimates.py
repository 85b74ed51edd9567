"""pass@k and intervals against their definitions."""

import math
import random
import time
from itertools import combinations
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.rewards import RewardOutcome
from stalesync.evaluation.estimates import Estimate, estimate, pass_at_each, student_quantile
from stalesync.evaluation.results import FileResult, estimates_of
from tests.machine import cpu_within


def pass_at_k(num_samples, num_correct, k):
    return pass_at_each(num_samples, num_correct)[k - 1]


correctness = st.lists(st.booleans(), min_size=1, max_size=9)


@given(correctness, st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer(correct, data):
    k = data.draw(st.integers(1, len(correct)))
    subsets = [any(subset) for subset in combinations(correct, k)]
    assert pass_at_k(len(correct), sum(correct), k) == sum(subsets) / len(subsets)


@given(st.integers(1, 300), st.data())
def test_pass_at_k_grows_with_k_and_with_correct_answers(count, data):
    correct, k = data.draw(st.integers(0, count)), data.draw(st.integers(1, count))
    passed = pass_at_k(count, correct, k)
    assert pass_at_k(count, correct, 1) == correct / count
    assert (correct == 0) == (passed == 0) and 0 <= passed <= 1
    assert k == count or pass_at_k(count, correct, k + 1) >= passed
    assert correct == count or pass_at_k(count, correct + 1, k) >= passed


@given(st.integers(1, 300), st.data())
def test_every_pass_at_k_is_that_of_the_formula_to_the_bit(count, data):
    correct = data.draw(st.integers(0, count))
    for k, passed in enumerate(pass_at_each(count, correct), 1):
        assert passed == (math.comb(count, k) - math.comb(count - correct, k)) / math.comb(count, k)


def test_a_thousand_answers_to_hundreds_of_prompts_are_estimated_in_seconds():
    """With the binomials of each k computed anew it takes 4 s on the reference machine."""
    prompts, samples = 330, 1024
    correct = [[float(answer < prompt % samples) for answer in range(samples)] for prompt in range(prompts)]
    outcomes = [[RewardOutcome(reward) for reward in rewards] for rewards in correct]
    start = time.process_time()
    found = estimates_of(outcomes, [[1] * samples] * prompts, 1.0)
    assert cpu_within(time.process_time() - start, 2)
    assert found["reward/pass@1024"].value == pytest.approx(1 - 1 / prompts)


def test_pass_at_k_is_unbiased():
    """Over all outcomes of five answers that are correct with probability p, its mean is 1 - (1 - p)^k."""
    for p in (0.1, 0.5, 0.8):
        for k in range(1, 6):
            chances = [math.comb(5, correct) * p**correct * (1 - p) ** (5 - correct) for correct in range(6)]
            mean = sum(chance * pass_at_k(5, correct, k) for correct, chance in enumerate(chances))
            assert mean == pytest.approx(1 - (1 - p) ** k)


@pytest.mark.parametrize(
    ("freedom", "published"),
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (29, 2.0452), (120, 1.9799)],
)
def test_the_quantiles_are_those_of_the_tables(freedom, published):
    assert student_quantile(freedom) == pytest.approx(published, abs=5e-5)


def test_the_quantiles_fall_to_that_of_the_normal_distribution():
    quantiles = [student_quantile(freedom) for freedom in (*range(1, 40), 400, 4000)]
    assert quantiles == sorted(quantiles, reverse=True)
    assert quantiles[-1] == pytest.approx(NormalDist().inv_cdf(0.975), abs=1e-3)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=30))
def test_an_interval_contains_the_mean_and_is_none_for_one_prompt(values):
    found = estimate(values)
    assert found is not None and found.value == sum(values) / len(values)
    if len(values) == 1:
        assert found == Estimate(values[0])
    else:
        assert found.low <= found.value <= found.high
        assert len({*values}) > 1 or found.low == pytest.approx(found.high, abs=1e-6)
        clipped = estimate(values, within=(-0.1, 0.1))
        assert clipped.low >= -0.1 and clipped.high <= 0.1


def test_nothing_is_estimated_without_a_prompt():
    assert estimate([]) is None and estimates_of([], [], 1.0) == {}


@pytest.mark.parametrize(
    ("num_prompts", "samples", "statistic"),
    [(20, 2, "reward/mean@2"), (30, 4, "reward/mean@4"), (30, 4, "reward/pass@1"), (30, 4, "reward/pass@4")],
)
def test_an_interval_covers_the_mean_of_all_prompts_in_95_of_100_evaluations(num_prompts, samples, statistic):
    """Prompts differ in how often they are solved (uniformly from never to always), and answers are drawn by that. Over
    answers instead of prompts, intervals of mean@4 would cover it in 84 of 100."""
    chance, trials, covered = random.Random(7), 1500, 0
    k = 4 if statistic == "reward/pass@4" else 1
    expected = k / (k + 1)  # the mean of 1 - (1 - p)^k over p from 0 to 1
    for _ in range(trials):
        solved = [chance.random() for _ in range(num_prompts)]
        rewards = [[RewardOutcome(float(chance.random() < p)) for _ in range(samples)] for p in solved]
        found = estimates_of(rewards, [[1] * samples] * num_prompts, 1.0)[statistic]
        covered += found.low <= expected <= found.high
    assert 0.92 <= covered / trials <= 0.98


rewards = st.one_of(st.none(), st.sampled_from([0.0, 0.5, 1.0]))


@given(st.integers(1, 4).flatmap(lambda k: st.lists(st.lists(rewards, min_size=k, max_size=k), min_size=1, max_size=6)))
def test_a_prompt_counts_with_the_answers_that_could_be_scored(by_prompt):
    k = len(by_prompt[0])
    outcomes = [
        [RewardOutcome(reward, None if reward is not None else "raised") for reward in answers] for answers in by_prompt
    ]
    found = estimates_of(outcomes, [[3] * k for _ in by_prompt], pass_reward=0.5)
    scored = [[reward for reward in answers if reward is not None] for answers in by_prompt]
    means = [sum(answers) / len(answers) for answers in scored if answers]
    assert (f"reward/mean@{k}" in found) == bool(means)
    if means:
        assert found[f"reward/mean@{k}"].value == sum(means) / len(means)
    for j in range(1, k + 1):
        enough = [answers for answers in scored if len(answers) >= j]
        passed = [
            sum(any(reward >= 0.5 for reward in subset) for subset in combinations(answers, j))
            / math.comb(len(answers), j)
            for answers in enough
        ]
        one = found.get(f"reward/pass@{j}")
        assert (one is not None) == bool(enough)
        assert one is None or one.value == pytest.approx(sum(passed) / len(passed))
    assert found[f"response_length/mean@{k}"].value == 3


def test_of_several_terms_each_has_a_mean_and_the_first_tells_which_answer_is_correct():
    def outcome(exact, brief):
        return RewardOutcome(exact + 2 * brief, terms={"exact": exact, "brief": brief})

    failed = RewardOutcome(None, "raised")
    outcomes = [[outcome(1.0, -0.5), outcome(0.0, 0.0)], [outcome(0.0, 1.0), failed], [failed, failed]]
    found = estimates_of(outcomes, [[1, 1]] * 3, pass_reward=1.0)
    assert {name: one.value for name, one in found.items()} == {
        "reward/mean@2": (0.0 + 2.0) / 2,
        "reward/exact/mean@2": (0.5 + 0.0) / 2,
        "reward/brief/mean@2": (-0.25 + 1.0) / 2,
        "reward/pass@1": (0.5 + 0.0) / 2,
        "reward/pass@2": 1.0,
        "response_length/mean@2": 1.0,
    }
    result = FileResult(3, "aime", "math", "d", prompts=3, samples=2, failed=3, estimates=found)
    metrics = result.metrics()
    assert metrics["val-aux/aime/reward/exact/mean@2"] == 0.25
    assert {"val-core/aime/reward/mean@2", "val-aux/aime/reward/brief/mean@2/low"} <= metrics.keys()

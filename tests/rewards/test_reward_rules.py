import json
import time
from pathlib import Path

import pytest

from fusion.rewards import RewardConfig, RewardPool, RewardSample
from fusion.rewards.arithmetic import arithmetic
from fusion.rewards.math import MAX_PARSED, math_answer

GSM8K = Path(__file__).parents[2].parent / "shared/data/gsm8k_test.jsonl"


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("12", "12", 1.0),
        (" 12\n", "12", 1.0),
        ("012", "12", 0.0),
        ("12 12", "12", 0.0),
        ("", "12", 0.0),
        ("a:0+1=01,a1;#0a1", "#0a1", 1.0),
        ("#0a1", "#0a1", 1.0),
        ("a:0+1=01,a1;0a1", "#0a1", 0.0),
        ("#0a1#0a2", "#0a2", 0.0),
        ("#0a1b", "#0a1", 0.0),
    ],
)
def test_arithmetic(response, answer, reward):
    assert arithmetic("", response, answer) == reward


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("She earns 9 * 2 = 18.\n#### 18", "#### 18", 1.0),
        ("She earns 9 * 2 = 18.\n#### 19", "9 * 2 = 18\n#### 18", 0.0),
        ("so the answer is \\boxed{18}", "#### 18", 1.0),
        ("It costs $70,000.", "#### 70000", 1.0),
        ("70000", "#### 70,000", 1.0),
        ("the answer is $\\frac{2}{4}$", "0.5", 1.0),
        ("$x = 1 + y$", "y+1", 1.0),
        ("\\boxed{(1,2)}", "(1,2)", 1.0),
        ("\\boxed{(2,1)}", "(1,2)", 0.0),
        ("\\boxed{-3}", "$-3$", 1.0),
        ("I do not know", "#### 18", 0.0),
        ("", "#### 18", 0.0),
    ],
)
def test_math(response, answer, reward):
    assert math_answer("", response, answer) == reward


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("7" * 400_000, 0.0),
        ("\\boxed{" + "7" * 16_000 + "}", 0.0),
        ("1 " * 200_000 + "is \\boxed{12}", 1.0),
        ("so \\boxed{\\frac{24}{2}}, " + "as x is x, " * 40_000, 1.0),
        ("x is x, " * 50_000 + "so $y = 12$", 1.0),
        ("\\boxed{" * 60_000, 0.0),
        ("\\boxed{13} " + "x is x, " * 5_000 + "so \\boxed{12}", 1.0),
        ("\\boxed{12} " + "x is x, " * 5_000 + "so \\boxed{13}", 0.0),
        ("x+x,\n" * 5_000 + "so\n$12$", 1.0),
        ("\u7b97\u51fa" * 20_000 + "\uff0c\u7b54\u6848\u662f$12$", 1.0),
        ("0" * 30_000 + "12", 0.0),
        ("12 " + "0" * MAX_PARSED, 0.0),
        ("so 9" + "12" + "," * (MAX_PARSED - 2), 0.0),
        ("9" * 9 + "12 " + "x is x, " * (MAX_PARSED // 8 - 1) + "x is", 0.0),
    ],
    ids=lambda value: str(value)[:12],
)
def test_math_reads_a_response_of_128k_tokens(response, reward):
    assert math_answer("", response, "12") == reward


def test_the_time_of_math_does_not_grow_with_a_long_response():
    def seconds(num_numbers: int) -> float:
        began_s = time.process_time()
        assert math_answer("", "1 " * num_numbers, "12") == 0.0
        return time.process_time() - began_s

    seconds(100)  # imports
    assert seconds(64 * MAX_PARSED) < 3 * seconds(MAX_PARSED)


def test_an_empty_reference_answer_is_an_error_of_the_data():
    with pytest.raises(ValueError, match="is empty"):
        math_answer("", "18", "#### ")


@pytest.mark.skipif(not GSM8K.exists(), reason="the GSM8K rows are not part of the project")
def test_math_agrees_with_gsm8k_on_its_own_solutions():
    rows = [json.loads(line) for line in GSM8K.read_text().splitlines()[:100]]
    right = [RewardSample(r["question"], r["answer"], r["answer"]) for r in rows]
    wrong = [RewardSample(r["question"], r["answer"] + "1", r["answer"]) for r in rows]
    with RewardPool(RewardConfig(name="math", workers=1)) as pool:
        assert [o.reward for o in pool.score(right)] == [1.0] * len(rows)
        assert [o.reward for o in pool.score(wrong)] == [0.0] * len(rows)

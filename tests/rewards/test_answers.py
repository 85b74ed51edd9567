import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.rewards import ReferenceAnswer, RewardConfig, RewardPool, RewardSample, check_answers
from fusion.rewards.answers import call_once, equal_as_text, expected_response, is_damaged, is_prose
from fusion.rewards.arithmetic import arithmetic
from fusion.rewards.math import math_answer
from stalesync.prompts import DataConfig, PromptSource, make_tokenizer

PROSE = ["Paris", "see solution", "B", "(B)", "\\text{True}", "New York City", "中文学校"]
MATHEMATICS = [
    "14",
    "\\frac{1}{2}",
    "(1,2)",
    "x+1",
    "12 apples",
    "1,000",
    "\\{1,2\\}",
    "50\\%",
    "\\$18",
    "infinity",
    "ab",
]


@pytest.mark.parametrize("answer", [*PROSE, *MATHEMATICS, "n/a", "18 dollars"])
def test_a_reference_answer_in_a_box_is_right_and_another_one_is_wrong(answer):
    expected = expected_response("math", answer)
    assert math_answer("", f"So it is {expected}.", answer) == 1.0
    assert math_answer("", "So it is \\boxed{987}.", answer) == 0.0


@pytest.mark.parametrize("answer", PROSE)
def test_prose_is_compared_as_text(answer):
    assert is_prose(answer)
    response = f"#### {answer.upper().replace('TEXT', 'text')} ."
    assert math_answer("", response, answer) == math_answer("", f"\\boxed{{ {answer} }}", answer) == 1.0


@pytest.mark.parametrize("answer", MATHEMATICS)
def test_mathematics_is_not_taken_for_prose(answer):
    assert not is_prose(answer)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("\\boxed{irsPa}", "Paris"),  # a product of the same letters
        ("\\boxed{[1,2]}", "(1,2)"),
        ("\\boxed{23}", "2*3"),
        ("\\boxed{x2}", "x²"),
        ("", "\\boxed{}"),
        ("\\boxed{A}", "B"),
    ],
)
def test_texts_that_only_look_alike_are_wrong(response, answer):
    assert not equal_as_text(response, answer)
    assert math_answer("", response, answer) == 0.0


@given(st.text(), st.text())
def test_text_equality_is_symmetric_and_ignores_case_and_space(one, other):
    assert equal_as_text(one, other) == equal_as_text(other, one) or not (one and other)
    assert not equal_as_text(one, "") and not equal_as_text("", other)


@given(st.text("ab \n"))
def test_space_within_a_text_is_one_space(text):
    assert equal_as_text(f"  {text} b\n", " ".join(f"{text} b".split()).upper())


@pytest.mark.parametrize("damage", ["\ufffd", "\x00", "\x0c", "\ud83d"])
def test_damaged_output_is_wrong(damage):
    assert is_damaged(damage)
    # math-verify would take the number beside what it cannot read.
    assert math_answer("", "14, so \\boxed{14}", "14") == 1.0
    assert math_answer("", f"14, so \\boxed{{{damage}8}}", "14") == 0.0
    assert arithmetic("", f"{damage}#14", "#14") == 0.0
    assert expected_response("math", f"{damage}8") is expected_response("arithmetic", damage) is None


@pytest.fixture(scope="module")
def pools():
    with RewardPool(RewardConfig("math", workers=1)) as math, RewardPool(RewardConfig(workers=1)) as arithmetic:
        yield {"math": math, "arithmetic": arithmetic}


def answers_of(*texts):
    return [ReferenceAnswer(f"row {index}", text) for index, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("rule", "bad"),
    [("math", ["", "#### ", "\\boxed{}", "\x0crac{1}{2}", "\ufffd8"]), ("arithmetic", ["", "#1#2", "\x00"])],
)
def test_answers_that_can_never_be_right_are_named(pools, rule, bad):
    assert check_answers([pools[rule]], answers_of("#12", "x y")) == []
    for text in bad:
        (line,) = check_answers([pools[rule]], answers_of("12", text, "13"))
        assert f"{rule} can never match 1 of 3 reference answers" in line and f"row 1: {text!r}" in line
    every = f"{len(bad)} of {len(bad)}"
    with pytest.raises(ValueError, match=f"{rule} can never match {every} .* row 0: .*data.answer_field"):
        check_answers([pools[rule]], answers_of(*bad))


def test_prose_is_mentioned_and_how_it_is_compared(pools):
    (line,) = check_answers([pools["math"]], answers_of("1", "see solution", "n/a", "Paris", "B", "Rome"))
    assert "4 of 6 reference answers as text: row 1: 'see solution', row 3: 'Paris', row 4: 'B' and 1 more" in line
    assert check_answers([pools["arithmetic"]], answers_of("Paris")) == []


def test_rows_are_spread_over_the_file_and_a_user_s_reward_is_not_asked(pools, tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1", "answer": "#### 1" if index < 96 else ""} for index in range(128)]
    file.write_text("\n".join(map(json.dumps, rows)))
    source = PromptSource(DataConfig(source=str(file)), make_tokenizer(), seed=0)
    before = source.state_dict()
    (line,) = check_answers([pools["math"]], source.reference_answers(64))
    assert "16 of 64" in line and "row 96: ''" in line and source.state_dict() == before
    judge = SimpleNamespace(kind="custom")  # has no `score`
    assert check_answers([judge], source.reference_answers(64)) == []
    assert len(source.reference_answers(1000)) == 128


RESULTS = """
from pathlib import Path

def one(prompt, response, answer):
    return {value}

def batch(prompts, responses, answers, a):
    return [{value} for _ in prompts]

def group(prompt, response, answer, other_responses):
    return {value} if other_responses == [response] * 3 else 1 / 0

def no_list(prompts, responses, answers):
    return {value}
"""


@pytest.mark.parametrize("name", ["one", "batch", "group", "no_list"])
@pytest.mark.parametrize(
    ("value", "called"),
    [("0.5", ": 0.5 in "), ("1 / 0", "failed (raised)"), ("'yes'", None), ("None", None), ("{'points': 1}", None)],
)
def test_a_function_that_returns_no_reward_is_refused_by_its_first_call_and_a_failure_is_a_warning(
    tmp_path, caplog, name, value, called
):
    (file := tmp_path / "own.py").write_text(RESULTS.replace("{value}", value))
    sample = RewardSample("p", "", "gold", {"a": "field"})
    if name == "no_list" and called != "failed (raised)":
        called = None
    with RewardPool(RewardConfig("custom", path=f"{file}:{name}", workers=1)) as pool:
        if called is not None:
            assert called in call_once(pool, sample, group_size=4)
            assert ("ZeroDivisionError" in caplog.text) == (called == "failed (raised)")
            return
        key = rf"^a term: reward.path='.*own.py:{name}': custom of 'gold', .* is 'gold': it returned .*expected"
        with pytest.raises(ValueError, match=key):
            call_once(pool, sample, group_size=4, key="a term: ")

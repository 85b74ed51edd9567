"""How a user's function is called: which fields of the data row it gets, and which functions are refused."""

import pytest

from fusion.rewards import RewardConfig, RewardPool, RewardSample, check_required_fields
from fusion.rewards.config import RewardSpec
from fusion.rewards.loaded import OTHERS
from fusion.rewards.user import load_user_function


def load(tmp_path, source):
    (file := tmp_path / "rewards.py").write_text(source)
    return load_user_function(f"{file}:score")


@pytest.mark.parametrize(
    ("parameters", "required"),
    [
        ("prompt, response, answer", ()),
        ("prompt, response, answer, **fields", ()),
        ("prompt, response, answer, level, source='web'", ("level",)),
        ("p, r, a, /, level, *, unit", ("level", "unit")),
        ("*texts, unit", ("unit",)),
        ("prompt, *texts, unit, **fields", ("unit",)),
        ("prompt, response, answer, level=1, *more, **fields", ()),
    ],
)
def test_parameters_without_default_are_required(tmp_path, parameters, required):
    assert load(tmp_path, f"def score({parameters}): return 0.0").required_fields == required


def test_a_field_with_the_name_of_a_positional_argument_is_not_passed_twice(tmp_path):
    loaded = load(tmp_path, "def score(question, completion, gold, **fields): return (gold, fields)")
    fields = {"question": "raw", "answer": "raw", "level": 3}
    assert loaded.score("q", "c", "g", **fields) == ("g", {"answer": "raw", "level": 3})
    assert not loaded.required_fields and not loaded.scores_batch and not loaded.asks


def test_a_null_leaves_a_default_and_is_passed_where_there_is_none(tmp_path):
    score = load(tmp_path, "def score(p, r, a, level=1, *, unit, **fields): return (level, unit, fields)").score
    assert score("", "", "", level=None, unit=None, x=None) == (1, None, {"x": None})
    assert score("", "", "", level=2, unit="m") == (2, "m", {})


@pytest.mark.parametrize(
    ("parameters", "batch", "group", "required"),
    [
        ("prompts, responses, answers", True, False, ()),
        ("prompts, responses, answers, level, **fields", True, False, ("level",)),
        ("prompts, responses, answers, other_responses", True, True, ()),
        ("prompt, response, answer, *, other_responses, unit", False, True, ("unit",)),
        ("prompt, response, answer, other_responses=()", False, True, ()),
        ("prompt, response, answer, **fields", False, False, ()),
        ("prompt, responses, answer", False, False, ()),
    ],
)
def test_names_of_parameters_tell_what_a_function_asks_for(tmp_path, parameters, batch, group, required):
    loaded = load(tmp_path, f"def score({parameters}): return 0.0")
    assert (loaded.scores_batch, OTHERS in loaded.asks, loaded.required_fields) == (batch, group, required)


def test_in_a_batch_a_default_is_kept_where_the_field_of_every_row_is_null(tmp_path):
    score = load(tmp_path, "def score(prompts, responses, answers, level='low', unit=1): return (level, unit)").score
    assert score(["", ""], ["", ""], ["", ""], level=[None, None], unit=[None, "m"]) == ("low", [None, "m"])


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("async def score(prompt, response, answer): return 0.0", "asynchronous or a generator"),
        ("def score(prompt, response, answer): yield 0.0", "asynchronous or a generator"),
        ("class S:\n async def __call__(self, *texts): return 0.0\nscore = S()", "asynchronous or a generator"),
        ("def score(a, b, c, d, /): return 0.0", "d has no name"),
        ("def score(*, prompt, response, answer): return 0.0", r"takes \(\*, prompt, response, answer\)"),
        ("score = 3", "defines no function 'score'"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(tmp_path, source, message):
    with pytest.raises(ValueError, match=f"reward.path=.*{message}"):
        load(tmp_path, source)


def test_a_pool_reports_the_fields_its_reward_requires(tmp_path):
    (file := tmp_path / "rewards.py").write_text("def score(prompt, response, answer, level, *, unit): return 0.0")
    with RewardPool(RewardConfig(path=f"{file}:score", workers=1)) as pool:
        assert pool.required_fields == {"level", "unit"}
    with RewardPool(RewardConfig(workers=1)) as pool:
        assert not pool.required_fields


def test_a_field_that_rows_lack_is_refused_with_the_fields_there_are():
    reward = RewardConfig(path="judge.py:score")
    check_required_fields(reward, {"level"}, {"level", "unit"})
    check_required_fields(reward, (), ())
    with pytest.raises(ValueError, match="reward.path='judge.py:score': the reward requires the field 'level', which"):
        check_required_fields(reward, {"level"}, ())
    with pytest.raises(ValueError, match="the field 'a' and 'b', which .* every row has: unit, weight. Give"):
        check_required_fields(reward, {"a", "b", "unit"}, {"weight", "unit"})


PREFILLED = """
def named(prompt, response, answer, prefill, **fields): return float(prefill == "<think>" and response[0] == "a")
def other(prompt, response, answer, **fields): return float(response == "a</think>b" and "prefill" not in fields)
def batch(prompts, responses, answers, prefill): return [float(prefill == ["<think>"]) for _ in responses]
"""


@pytest.mark.parametrize("name", ["named", "other", "batch"])
def test_a_function_gets_the_prefill_if_it_asks_for_it_by_name(tmp_path, name):
    (file := tmp_path / "rewards.py").write_text(PREFILLED)
    with RewardPool(RewardConfig(path=f"{file}:{name}", workers=1)) as pool:
        assert not pool.required_fields
        (outcome,) = pool.score([RewardSample("q", "a</think>b", "", prefill="<think>")])
    assert outcome.reward == 1.0


def test_a_format_is_one_of_prefill_and_response():
    spec = RewardSpec("format", "<think>.*</think>.*", "the term 'format'")
    samples = [RewardSample("q", "a</think>b", "", prefill=prefill) for prefill in ("<think>\n", "")]
    with RewardPool(RewardConfig(workers=1), spec) as pool:
        assert [outcome.reward for outcome in pool.score(samples)] == [1.0, 0.0]

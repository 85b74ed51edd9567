"""How a user's function is called: which fields of the data row it gets, and which functions are refused."""

import pytest

from fusion.rewards import RewardConfig, RewardPool, RewardSample
from fusion.rewards.config import RewardSpec
from fusion.rewards.user import load_user_function
from fusion.rewards.wire import OTHERS


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


@pytest.mark.parametrize(
    ("parameters", "expected", "required"),
    [
        ("data_source, solution_str, ground_truth, extra_info=None", ("web", "r", "g", {"i": 1}), ("data_source",)),
        ("data_source, solution_str, ground_truth, extra_info", ("web", "r", "g", {"i": 1}), None),
        ("solution_str, ground_truth", ("r", "g"), ()),
        ("answer, response, prompt", ("g", "r", "p"), ()),
        ("response, extra_info, *, answer", ("r", {"i": 1}, "g"), ("extra_info",)),
        ("prompt, response, ground_truth", ("p", "r", "g"), ()),
        ("question, completion, gold", ("p", "r", "g"), ()),
        ("solution_str, ground_truth, data_source='none', level=0", ("r", "g", "web", 0), ()),
        ("prompt, response, unit='m', *, answer='none'", ("p", "r", "m", "g"), ()),
    ],
)
def test_arguments_of_known_names_are_given_by_name(tmp_path, parameters, expected, required):
    names = [part.strip().partition("=")[0] for part in parameters.split(",") if part.strip() != "*"]
    loaded = load(tmp_path, f"def score({parameters}): return ({', '.join(names)},)")
    fields = {"data_source": "web", "extra_info": {"i": 1}, "level": None}
    assert loaded.score("p", "r", "g", **fields) == expected and not loaded.scores_batch
    assert loaded.required_fields == (("data_source", "extra_info") if required is None else required)


def test_arguments_of_verl_in_the_plural_are_those_of_a_batch(tmp_path):
    parameters = "data_sources, solution_strs, ground_truths, extra_infos=None"
    loaded = load(tmp_path, f"def score({parameters}, **rest): return ({parameters.split('=')[0]}, rest)")
    assert loaded.scores_batch and loaded.required_fields == ("data_source",)
    fields = {"data_source": ["a", "b"], "extra_info": [None, None], "level": [1, 2]}
    assert loaded.score(["p"] * 2, ["r", "s"], ["g"] * 2, **fields) == (
        ["a", "b"], ["r", "s"], ["g", "g"], None, {"level": [1, 2]}
    )  # fmt: skip


VERL = """
def score(data_source, solution_str, ground_truth, extra_info=None):
    acc = float(data_source == "web" and solution_str == ground_truth and extra_info["index"] == 3)
    return {"score": acc, "acc": acc, "pred": solution_str}
def scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [score(*one) for one in zip(data_sources, solution_strs, ground_truths, extra_infos)]
def unclear(prompt, response, answer): return {"reward": 1.0}
"""


@pytest.mark.parametrize(("name", "rewards"), [("score", [1.0, 0.0]), ("scores", [1.0, 0.0]), ("unclear", [None] * 2)])
def test_a_reward_written_for_verl_and_its_dict_are_scored(tmp_path, name, rewards):
    (file := tmp_path / "rewards.py").write_text(VERL)
    fields = {"data_source": "web", "extra_info": {"index": 3}}
    with RewardPool(RewardConfig(path=f"{file}:{name}", workers=1)) as pool:
        outcomes = pool.score([RewardSample("q", response, "7", fields) for response in "78"])
    assert [outcome.reward for outcome in outcomes] == rewards
    if name == "unclear":
        assert "expected a finite number of float32, or a dict that has one as score" in outcomes[0].detail


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
        (
            "def score(*, prompt, answer): return 0.0",
            r"takes \(\*, prompt, answer\), .*; name them so, or",
        ),
        ("def score(question, prompt, answer): return 0.0", "not clear which parameters"),
        (
            "def score(data_source, solution, truth): return 0.0",
            "not clear which parameters",
        ),
        (
            "def score(data_source, solution_str, /): return 0.0",
            "not clear which parameters",
        ),
        ("def score(prompt, solution_str): return 0.0", "not clear which parameters"),
        ("def score(prompt, response, other_responses): return 0.0", "not clear which parameters"),
        ("def score(prompts, responses, prefill, *, level): return [0.0]", "not clear which parameters"),
        ("def score(question, completion, gold, answer=None): return 0.0", "not clear which parameters"),
        ("def score(r, a): return 0.0", "not clear which parameters"),
        ("def score(prompts, completions, answer): return 0.0", "completions .TRL's. may be texts or chats"),
        ("score = 3", "defines no function 'score'"),
    ],
)
def test_functions_that_cannot_be_called_are_refused(tmp_path, source, message):
    with pytest.raises(ValueError, match=f"reward.path=.*{message}"):
        load(tmp_path, source)


def test_a_field_that_rows_lack_is_refused_with_the_fields_there_are(tmp_path):
    (file := tmp_path / "rewards.py").write_text("def score(prompt, response, answer, level, *, unit): return 0.0")
    with RewardPool(RewardConfig(path=f"{file}:score", workers=1)) as pool:
        assert pool.required_fields == {"level", "unit"}
        pool.check_fields({"level", "unit", "other"})
        with pytest.raises(ValueError, match=r"reward.path='.*:score': the reward requires the field 'level', which"):
            pool.check_fields({"unit"})
        with pytest.raises(ValueError, match="the field 'level' and 'unit', which .* every row has: a, weight. Give"):
            pool.check_fields({"weight", "a"})
    with RewardPool(RewardConfig(workers=1)) as pool:
        assert not pool.required_fields
        pool.check_fields(())


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

"""The environments that are built in, as a model meets them: in a pool, by seed and text."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.environments import EnvironmentConfig, Task, Turn
from fusion.environments.calculator import Calculator, calculator
from fusion.environments.guess import Guess
from fusion.environments.tool_calls import parse


def said(environment, text: str) -> Turn:
    message = {"role": "assistant", "content": text, "tool_calls": parse(text, "hermes")}
    return asyncio.run(environment.step(message))


def begun(environment, prompt: str, answer: str, seed: int = 0):
    asyncio.run(environment.reset(Task(prompt, answer), seed))
    return environment


EXPRESSIONS = st.recursive(
    st.integers(0, 9999).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(["+", "-", "*", " + ", " - ", "* "]), inner).map("".join),
        inner.map("({})".format),
        inner.map("-({})".format),
    ),
    max_leaves=6,
)


@given(EXPRESSIONS)
def test_the_calculator_computes_as_python_does(expression):
    if len(expression) <= 200:
        assert calculator(expression) == str(eval(expression))


@given(st.text(alphabet="0123456789+-*/() ._a", max_size=240))
def test_any_other_expression_is_refused_with_a_reason(expression):
    try:
        int(calculator(expression))
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize("expression", ["", "1+", "(1", "1)", "2**3", "__import__('os')", "1 2", "1/2", "9" * 201])
def test_expressions_that_are_refused(expression):
    with pytest.raises(ValueError, match="is no expression|expected"):
        calculator(expression)


def test_nesting_as_deep_as_an_expression_may_be_is_computed():
    assert calculator("(" * 99 + "12" + ")" * 99) == "12"


def test_a_sum_is_computed_by_a_tool_and_answered():
    environment = begun(Calculator(), "12+34=", "46")
    assert environment.tools[0]["function"]["name"] == "calculator"
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool_call>'
    turn = said(environment, call)
    assert turn == Turn([{"role": "tool", "name": "calculator", "content": "46"}])
    assert [message["content"] for message in said(environment, call + call).messages] == ["46", "46"]
    assert said(environment, "46") == Turn(done=True, reward=1.0)
    assert said(environment, "47") == Turn(done=True, reward=0.0)


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ('{"name": "calculator", "arguments": {"expression": "1+"}}', "error: '1+' is no expression"),
        ('{"name": "calculator", "arguments": {"expression": 12}}', "'expression' is not of type string"),
        ('{"name": "calculator", "arguments": {}}', "missing a required argument: 'expression'"),
        ('{"name": "calculator", "arguments": {"other": "1"}}', "error: missing a required argument"),
        ('{"name": "search", "arguments": {}}', "error: no tool 'search'; there is calculator"),
        ('{"name": "calculator"', "error: the call is not JSON"),
        ("[1]", "error: expected an object with name and arguments"),
    ],
)
def test_a_wrong_call_is_answered_by_what_is_wrong(call, answer):
    turn = said(begun(Calculator(), "", ""), f"<tool_call>{call}</tool_call>")
    assert not turn.done and answer in turn.messages[0]["content"]


@pytest.mark.parametrize("seed", range(20))
def test_bisection_finds_every_number(seed):
    environment, low, high = begun(Guess(), "?", "", seed), 0, 15
    for _ in range(5):
        guess = (low + high) // 2
        turn = said(environment, f" {guess}\n")
        if turn.done:
            assert turn.reward == 1.0
            return
        (message,) = turn.messages
        low, high = (guess + 1, high) if message["content"] == "higher" else (low, guess - 1)
    raise AssertionError("five guesses are enough")


def test_numbers_cover_0_to_15_and_five_wrong_guesses_earn_nothing():
    found = set()
    for seed in range(200):
        number = next(n for n in range(16) if said(begun(Guess(), "?", "", seed), str(n)).done)
        found.add(number)
    assert found == set(range(16))
    environment = begun(Guess(), "?", "", 0)
    turns = [said(environment, text) for text in ("x", "99", "", "-1", "٣")]
    assert [turn.done for turn in turns] == [False, False, False, False, True] and turns[-1].reward == 0.0
    assert turns[0].messages[0]["content"] == "no number" and turns[1].messages[0]["content"] == "lower"


def test_guessing_at_random_without_repetition_earns_what_five_of_sixteen_do():
    rng = random.Random(0)
    wins = 0
    for seed in range(2000):
        environment = begun(Guess(), "?", "", seed)
        wins += any(said(environment, str(n)).reward == 1.0 for n in rng.sample(range(16), 5))
    assert 0.27 < wins / 2000 < 0.36


@pytest.mark.parametrize("name", ["calculator", "guess"])
def test_they_are_selected_by_name(name):
    EnvironmentConfig(name=name).validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "chess"}, "environment.name='chess': expected one of single, calculator, guess, custom"),
        ({"name": "custom"}, "environment.path=null: expected file.py:Class"),
        ({"name": "custom", "path": "x.py"}, "environment.path='x.py': expected file.py:Class"),
        ({"path": "x.py:Y"}, "environment.path='x.py:Y': expected null"),
        ({"name": "guess", "step_timeout_s": 0}, r"environment.step_timeout_s=0: expected a number in \(0, 1e\+06\]"),
        ({"max_turns": 3}, "environment.max_turns=3: expected 8"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        EnvironmentConfig(**changes).validate()

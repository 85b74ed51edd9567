"""Tool calls in the model's text, in the formats of model families, and what answers them."""

from __future__ import annotations

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fusion.environments.config import TOOL_FORMATS
from fusion.environments.interface import checked_messages
from fusion.environments.tools import PARSERS, Tools, parse

NAMES = st.text("abc_", min_size=1, max_size=6)
ARGUMENTS = st.dictionaries(NAMES, st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.none()), max_size=3)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)


def written(tool_format: str, calls: list) -> str:
    """The calls as a model of the family writes them."""
    texts = [(name, json.dumps(arguments)) for name, arguments in calls]
    if tool_format == "hermes":
        tags = [f'<tool_call>\n{{"name": "{name}", "arguments": {text}}}\n</tool_call>' for name, text in texts]
        return "I call:\n" + "\n".join(tags)
    if tool_format == "llama3":
        return "; ".join(f'{{"name": "{name}", "parameters": {text}}}' for name, text in texts)
    if tool_format == "deepseek v3":
        tail = "\n```<｜tool▁call▁end｜>"
        tags = [f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}{tail}" for name, text in texts]
    else:
        tags = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for name, text in texts]
    return "I call:<｜tool▁calls▁begin｜>" + "\n".join(tags) + "<｜tool▁calls▁end｜>"


@pytest.mark.parametrize("tool_format", ["hermes", "llama3", "deepseek v3", "deepseek v3.1"])
@given(calls=CALLS)
def test_calls_are_read_as_they_were_written(tool_format, calls):
    found = parse(written(tool_format, calls), tool_format.partition(" ")[0])
    assert found == [{"name": name, "arguments": arguments, "error": ""} for name, arguments in calls]


def greet(name: str, times: int = 1, loud: bool = False) -> str:
    """Greet somebody.

    Not part of the description.
    """
    if times > 3:
        raise ValueError("too often")
    return " ".join([f"hello {name}" + "!" * loud] * times)


async def half(value: float) -> float:
    return value / 2


TOOLS = Tools(greet, half)
PIECES = st.sampled_from(
    [
        "<tool_call>", "</tool_call>", "{", "}", '{"name": ', '"greet"', ', "arguments": ', ', "parameters": ',
        "[" * 9000, '{"name": "a"}', "; ", "\n", "x", "1", "<|python_tag|>", "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
        "```json", "function", "null", r'"\ud800"',
    ]
)  # fmt: skip


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@given(pieces=st.lists(PIECES, max_size=10))
def test_no_text_raises(tool_format, pieces):
    for call in parse("".join(pieces), tool_format):
        message = asyncio.run(TOOLS.answer(call))
        assert message["role"] == "tool" and checked_messages([message]) == [message]
        assert not call["error"] or message["content"] == f"error: {call['error']}"


@pytest.mark.parametrize(
    ("tool_format", "text"),
    [
        ("hermes", "4"),
        ("hermes", "<tool_call>"),
        ("llama3", "the answer is {1, 2}"),
        ("llama3", '{"answer": 4}'),
        ("deepseek", "<｜tool▁sep｜>"),
    ],
)
def test_an_answer_is_no_call(tool_format, text):
    assert parse(text, tool_format) == []


def test_half_of_a_surrogate_pair_in_a_call_is_the_models_mistake():
    for value in (r'{"name": "\ud800"}', r'{"name": "greet", "arguments": {"\udfff": 1}}'):
        (call,) = parse(f"<tool_call>{value}</tool_call>", "hermes")
        message = asyncio.run(TOOLS.answer(call))
        assert checked_messages([message]) == [message] and "the call is not JSON" in message["content"]


def test_a_llama_may_begin_with_its_tag_and_end_in_the_middle():
    assert parse('<|python_tag|>{"name": "a", "parameters": {}}', "llama3")[0]["name"] == "a"
    (call,) = parse('{"name": "a", "param', "llama3")
    assert call["error"].startswith("the call is not JSON")


@pytest.mark.parametrize(
    ("name", "arguments", "content"),
    [
        ("greet", {"name": "you"}, "hello you"),
        ("greet", {"name": "you", "times": 2, "loud": True}, "hello you! hello you!"),
        ("half", {"value": 3}, "1.5"),
        ("greet", {}, "error: missing a required argument: 'name'"),
        ("greet", {"name": "you", "other": 1}, "error: got an unexpected keyword argument 'other'"),
        ("greet", {"name": "you", "times": True}, "error: argument 'times' is not of type integer"),
        ("greet", {"name": "you", "times": "2"}, "error: argument 'times' is not of type integer"),
        ("greet", {"name": "you", "times": 4}, "error: too often"),
        ("other", {}, "error: no tool 'other'; there is greet, half"),
    ],
)
def test_a_call_is_answered_by_its_result_or_by_what_is_wrong(name, arguments, content):
    message = asyncio.run(TOOLS.answer({"name": name, "arguments": arguments, "error": ""}))
    assert message == {"role": "tool", "name": name, "content": content}


def test_what_a_function_raises_else_is_no_mistake_of_the_model():
    def broken(value: int) -> str:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        asyncio.run(Tools(broken).answer({"name": "broken", "arguments": {"value": 1}, "error": ""}))


def test_a_schema_is_read_from_the_function():
    assert TOOLS.schemas[0] == {
        "type": "function",
        "function": {
            "name": "greet",
            "description": "Greet somebody.",
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "times": {"type": "integer"}, "loud": {"type": "boolean"}},
                "required": ["name"],
            },
        },
    }
    with pytest.raises(ValueError, match="tool bare: expected an annotation of str, .* for parameter 'value'"):
        Tools(_bare())


def _bare():
    def bare(value): ...

    return bare


def test_there_is_a_parser_for_every_format():
    assert (*PARSERS,) == TOOL_FORMATS

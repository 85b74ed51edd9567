"""Tool calls in the model's text, in the formats of model families, and what answers them."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Literal

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fusion.environments.config import TOOL_FORMATS
from fusion.environments.interface import checked_messages
from fusion.environments.tool_calls import PARSERS, ToolCall, parse
from fusion.environments.tools import Tools, fits, type_schema
from tests.machine import cpu_within

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
    if tool_format in TAGGED_CALLS:
        return "I call:\n" + "\n".join(TAGGED_CALLS[tool_format](name, arguments) for name, arguments in calls)
    if tool_format == "kimi_k2":
        begin, between, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
        tags = [f"{begin}functions.{name}:{at}{between}{text}{end}" for at, (name, text) in enumerate(texts)]
        return f"I call:<|tool_calls_section_begin|>{''.join(tags)}<|tool_calls_section_end|>"
    if tool_format == "deepseek v3":
        tail = "\n```<｜tool▁call▁end｜>"
        tags = [f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}{tail}" for name, text in texts]
    else:
        tags = [f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>" for name, text in texts]
    return "I call:<｜tool▁calls▁begin｜>" + "\n".join(tags) + "<｜tool▁calls▁end｜>"


def glm45_call(name: str, arguments: dict) -> str:
    """As the family's chat template writes it."""
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    tags = [f"<arg_key>{key}</arg_key>\n<arg_value>{text}</arg_value>\n" for key, text in texts.items()]
    return f"<tool_call>{name}\n{''.join(tags)}</tool_call>"


def qwen3_coder_call(name: str, arguments: dict) -> str:
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    tags = [f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts.items()]
    return f"<tool_call>\n<function={name}>\n{''.join(tags)}</function>\n</tool_call>"


TAGGED_CALLS = {"glm45": glm45_call, "qwen3_coder": qwen3_coder_call}


def schemas_for(calls: list) -> list:
    """Of tools whose parameters have the types of these arguments."""
    found: dict[str, dict] = {}
    for name, arguments in calls:
        for key, value in arguments.items():
            kind = "string" if isinstance(value, str) else "integer"
            found.setdefault(name, {}).setdefault(key, {"type": kind})
    return [{"function": {"name": name, "parameters": {"properties": kinds}}} for name, kinds in found.items()]


@pytest.mark.parametrize(
    "tool_format", ["hermes", "llama3", "deepseek v3", "deepseek v3.1", "kimi_k2", "glm45", "qwen3_coder"]
)
@given(calls=CALLS)
def test_calls_are_read_as_they_were_written(tool_format, calls):
    names = [name for name, _ in calls]
    assume(tool_format not in TAGGED_CALLS or len({*names}) == len(names))  # equal names might take other types
    found = parse(written(tool_format, calls), tool_format.partition(" ")[0], schemas_for(calls))
    ids = [f"functions.{name}:{at}" if tool_format == "kimi_k2" else "" for at, name in enumerate(names)]
    assert found == [call_of(*call, id) for call, id in zip(calls, ids, strict=True)]


def call_of(name: str, arguments: dict, id: str = "") -> ToolCall:
    return {"name": name, "arguments": arguments, "error": "", "id": id}


@pytest.mark.parametrize("tool_format", TAGGED_CALLS)
def test_what_tells_a_text_from_json_is_the_tools_schema(tool_format):
    text = TAGGED_CALLS[tool_format]("find", {"query": "12", "limit": 3, "tags": ["a"], "other": "{"})
    schema = [{"function": {"name": "find", "parameters": {"properties": {"query": {"type": "string"}}}}}]
    (call,) = parse(text, tool_format, schema)
    assert call == call_of("find", {"query": "12", "limit": 3, "tags": ["a"], "other": "{"})
    for unknown in ([], [{}], [{"function": 1}], [{"function": {"name": "find", "parameters": {"properties": []}}}]):
        assert parse(text, tool_format, unknown)[0]["arguments"]["query"] == 12


@pytest.mark.parametrize(
    "body", ["", "find <b>", "find <arg_key>a</arg_key>", "<function=a>b</function>", "<function=>"]
)
@pytest.mark.parametrize("tool_format", TAGGED_CALLS)
def test_tags_that_make_no_call_are_the_models_mistake(tool_format, body):
    (call,) = parse(f"<tool_call>{body}</tool_call>", tool_format)
    assert call["error"].startswith("expected ") and call["error"].endswith(("argument", "</function>"))


def test_an_answer_names_the_call_where_the_format_has_ids():
    text = '<|tool_call_begin|>functions.greet:3<|tool_call_argument_begin|>{"name": "you"}<|tool_call_end|>'
    (call,) = parse(text, "kimi_k2")
    message = asyncio.run(TOOLS.answer(call))
    assert message == {"role": "tool", "name": "greet", "content": "hello you", "tool_call_id": "functions.greet:3"}
    (call,) = parse(text.replace("functions.greet:3", "greet"), "kimi_k2")
    assert asyncio.run(TOOLS.answer(call))["content"].startswith("error: no tool ''; there is greet")


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
        "```json", "function", "null", r'"\ud800"', "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "name",
        "<function=greet>", "</function>", "<parameter=name>", "</parameter>", "<|tool_call_begin|>",
        "functions.greet:0", "<|tool_call_argument_begin|>", "<|tool_call_end|>",
    ]
)  # fmt: skip


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@given(pieces=st.lists(PIECES, max_size=10))
def test_no_text_raises(tool_format, pieces):
    for call in parse("".join(pieces), tool_format):
        message = asyncio.run(TOOLS.answer(call))
        assert message["role"] == "tool" and checked_messages([message]) == [message]
        assert not call["error"] or message["content"] == f"error: {call['error']}"


FRAMES = [
    ("<tool_call>", "</tool_call>"),
    ("<tool_call>a<arg_key>b</arg_key><arg_value>", "</arg_value></tool_call>"),
    ("<tool_call><function=a>", "</function></tool_call>"),
    ("<｜tool▁call▁begin｜>a<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ("<|tool_call_begin|>", "<|tool_call_end|>"),
]


@pytest.mark.parametrize("tool_format", TOOL_FORMATS)
@pytest.mark.parametrize("token", [
    "<tool_call>", "</tool_call>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>", "<arg_value>", "<parameter=a>", "<function=a>", "{",
    "\n```json\n", " ",
])  # fmt: skip
def test_a_model_that_repeats_itself_is_read_in_time(tool_format, token):
    """By the square of the length each text would take a minute."""
    started, many = time.thread_time(), token * 20_000
    for text in (many, *(f"{begin}{many}{end}" for begin, end in FRAMES)):
        parse(text, tool_format)
    assert cpu_within(time.thread_time() - started, 2)


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
    message = asyncio.run(TOOLS.answer(call_of(name, arguments)))
    assert message == {"role": "tool", "name": name, "content": content}


def test_what_a_function_raises_else_is_no_mistake_of_the_model():
    def broken(value: int) -> str:
        raise KeyError("gone")

    with pytest.raises(KeyError):
        asyncio.run(Tools(broken).answer(call_of("broken", {"value": 1})))


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


def find(
    query: str,
    tags: list[str],
    order: Literal["new", "best"] = "new",
    limit: int | None = None,
    weights: dict[str, float] = {},  # noqa: B006
) -> str:
    """Search the documents.

    Args:
        query: What to look for.
        tags (list[str]): Documents must have
            all of them.

    Returns:
        unknown: Nothing.
    """
    return f"{query} {tags} {order} {limit} {weights}"


def test_a_schema_has_the_types_within_types_and_what_the_docstring_says_of_parameters():
    (schema,) = Tools(find).schemas
    assert schema["function"]["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "tags": {"type": "array", "items": {"type": "string"}, "description": "Documents must have all of them."},
            "order": {"type": "string", "enum": ["new", "best"]},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "weights": {"type": "object", "additionalProperties": {"type": "number"}},
        },
        "required": ["query", "tags"],
    }


@pytest.mark.parametrize(
    ("arguments", "content"),
    [
        ({"tags": ["a"]}, "x ['a'] new None {}"),
        ({"tags": [], "order": "best", "limit": 1, "weights": {"a": 1}}, "x [] best 1 {'a': 1}"),
        ({"tags": [1]}, "error: argument 'tags' is not of type array of string"),
        ({"tags": "a"}, "error: argument 'tags' is not of type array of string"),
        ({"tags": [], "order": "old"}, 'error: argument \'order\' is not of type "new" or "best"'),
        ({"tags": [], "limit": "1"}, "error: argument 'limit' is not of type integer or null"),
        ({"tags": [], "weights": {"a": True}}, "error: argument 'weights' is not of type object of number"),
    ],
)
def test_types_within_types_are_checked(arguments, content):
    assert asyncio.run(Tools(find).answer(call_of("find", {"query": "x", **arguments})))["content"] == content


HINTS = st.recursive(
    st.sampled_from([str, int, float, bool, type(None), Literal["a", 1]]),
    lambda inner: st.one_of(
        inner.map(lambda one: list[one]),
        inner.map(lambda one: dict[str, one]),
        st.tuples(inner, inner).map(lambda both: both[0] | both[1]),
    ),
    max_leaves=4,
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(0, 2), st.floats(0, 2), st.sampled_from("ab")),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(st.sampled_from("ab"), inner, max_size=2)),
    max_leaves=4,
)


@given(hint=HINTS, value=VALUES)
def test_a_value_fits_as_jsonschema_has_it(hint, value):
    """But 1.0 is no integer here, as no Python function would take it for one."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = type_schema(hint)
    expected = jsonschema.Draft202012Validator(schema).is_valid(value)
    assert fits(value, schema) == expected or "1.0" in f"{value}" or "0.0" in f"{value}" or "2.0" in f"{value}"


@pytest.mark.parametrize("hint", [bytes, list[bytes], dict[int, str], str | bytes, Literal[b"a"], None])
def test_what_json_does_not_know_is_refused(hint):
    def tool(value): ...

    tool.__annotations__ = {} if hint is None else {"value": hint}
    with pytest.raises(ValueError, match="tool tool: expected an annotation of str, .* for parameter 'value'"):
        Tools(tool)


def test_there_is_a_parser_for_every_format():
    assert (*PARSERS,) == TOOL_FORMATS

"""Find tool calls in the model's text.

    hermes     <tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>
    llama3     {"name": "calculator", "parameters": {"expression": "1+2"}}    the whole turn; others behind ;
    deepseek   <｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "1+2"}<｜tool▁call▁end｜>
               of V3, name and arguments (between ```json and ```) are both behind the separator
    kimi_k2    <|tool_call_begin|>functions.calculator:0
               <|tool_call_argument_begin|>{"expression": "1+2"}<|tool_call_end|>
    glm45      <tool_call>calculator
               <arg_key>expression</arg_key>
               <arg_value>1+2</arg_value>
               </tool_call>                  texts as they are, other values as JSON
    qwen3_coder
               <tool_call>
               <function=calculator>
               <parameter=expression>
               1+2
               </parameter>
               </function>
               </tool_call>                  likewise

Invariants (tests/environments/test_tools.py): whatever the text is, parsing it raises nothing, and takes time in
proportion to its length, since a model that repeats itself may begin a call with every token."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypedDict

DECODER = json.JSONDecoder()
TAGGED = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
LLAMA3 = re.compile(r'\{\s*"(name|type|parameters)"')
DEEPSEEK = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
FENCE, FENCE_END = "\n```json\n", "\n```"
KIMI_K2 = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"

Schemas = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's API describes them"""


class Tags(NamedTuple):
    """A format in which each argument stands between tags. ``opening``, ``name_end``, ``closing``: around the name and
    behind the arguments; ``begin``, ``value``, ``end``: before an argument's name, between name and value, and behind
    it; ``form``: how a call looks."""

    opening: str
    name_end: re.Pattern[str]
    closing: str
    begin: str
    value: re.Pattern[str]
    end: re.Pattern[str]
    form: str


TAGS = {
    "glm45": Tags(
        "", re.compile("(?=<)"), "",
        "<arg_key>", re.compile(r"</arg_key>\s*<arg_value>"), re.compile("</arg_value>"),
        "a name, and <arg_key>…</arg_key><arg_value>…</arg_value> for each argument",
    ),
    "qwen3_coder": Tags(
        "<function=", re.compile(">"), "</function>",
        "<parameter=", re.compile(">\n?"), re.compile("\n?</parameter>"),
        "<function=NAME>, <parameter=NAME>…</parameter> for each argument, and </function>",
    ),
}  # fmt: skip


class ToolCall(TypedDict):
    """A call in the model's text. `error`: why it cannot be called, "" if it can. `id`: by which the answer names it,
    "" where the format has none."""

    name: str
    arguments: dict[str, Any]
    error: str
    id: str


def parse(text: str, tool_format: str, schemas: Schemas = ()) -> list[ToolCall]:
    """Return the tool calls in a text, in order. ``schemas``: of the tools, which tell texts from JSON where the format
    does not."""
    calls = PARSERS[tool_format](text)
    return [_decoded_values(call, schemas) for call in calls] if tool_format in TAGS else calls


def _hermes(text: str) -> list[ToolCall]:
    return [_call_of(*_decoded(body), "arguments") for body in _between(text, *TAGGED)]


def _llama3(text: str) -> list[ToolCall]:
    """A turn that is not the beginning of a call is an answer, also if it is JSON."""
    rest, calls = text.strip().removeprefix(PYTHON_TAG).lstrip(), []
    if not LLAMA3.match(rest):
        return []
    while rest:
        value, error, end = _decoded_first(rest)
        calls.append(_call_of(value, error, "parameters"))
        rest = "" if error else rest[end:].lstrip("; \n")
    return calls


def _deepseek(text: str) -> list[ToolCall]:
    calls = []
    for head, body in _divided(text, *DEEPSEEK):
        name, arguments = head, body
        before, _, fenced = body.rstrip().partition(FENCE)
        if fenced.endswith(FENCE_END):
            name, arguments = before, fenced.removesuffix(FENCE_END)
        value, error = _decoded(arguments)
        calls.append(_call_of({"name": name.strip(), "arguments": value}, error, "arguments"))
    return calls


def _kimi_k2(text: str) -> list[ToolCall]:
    calls = []
    for head, body in _divided(text, *KIMI_K2):
        value, error = _decoded(body)
        name = (id := head.strip()).removeprefix("functions.").rpartition(":")[0]
        call = _call_of({"name": name, "arguments": value}, error, "arguments")
        call["id"] = id
        calls.append(call)
    return calls


def _between(text: str, begin: str, end: str) -> Iterator[str]:
    """Yield what stands between the first ``begin`` and each ``end`` that follows one."""
    for part in text.split(end)[:-1]:
        _, mark, body = part.partition(begin)
        if mark:
            yield body


def _divided(text: str, begin: str, separator: str, end: str) -> Iterator[tuple[str, str]]:
    """Yield the same in two parts, where there is a separator."""
    for body in _between(text, begin, end):
        head, mark, rest = body.partition(separator)
        if mark:
            yield head, rest


def _tagged(tags: Tags, text: str) -> list[ToolCall]:
    """Return calls whose arguments are all texts."""
    calls = []
    for body in map(str.strip, _between(text, *TAGGED)):
        is_framed = body.startswith(tags.opening) and body.endswith(tags.closing)
        inner = body.removeprefix(tags.opening).removesuffix(tags.closing)
        name, *rest = tags.name_end.split(inner, maxsplit=1)
        arguments = _arguments(tags, "".join(rest)) if is_framed and name.strip() else None
        error = f"expected {tags.form}" if arguments is None else ""
        calls.append(_call_of({"name": name.strip(), "arguments": arguments}, error, "arguments"))
    return calls


def _arguments(tags: Tags, text: str) -> dict[str, str] | None:
    """Return arguments by name; None if there is anything else."""
    *parts, left = tags.end.split(text)
    arguments = {}
    for part in parts:
        before, _, argument = part.partition(tags.begin)
        name, *value = tags.value.split(argument, maxsplit=1)
        if before.strip() or not value:
            return None
        arguments[name] = value[0]
    return None if left.strip() else arguments


def _decoded_values(call: ToolCall, schemas: Schemas) -> ToolCall:
    """Decode the arguments that are JSON and that the tool does not take as texts."""
    functions = [function for schema in schemas if isinstance(function := schema.get("function"), dict)]
    parameters = next((one.get("parameters") for one in functions if one.get("name") == call["name"]), None)
    properties = parameters.get("properties") if isinstance(parameters, dict) else None
    arguments = {}
    for name, text in call["arguments"].items():
        schema = properties.get(name) if isinstance(properties, dict) else None
        value, error = _decoded(text)
        is_text = error or isinstance(schema, dict) and schema.get("type") == "string"
        arguments[name] = text if is_text else value
    return {**call, "arguments": arguments}


PARSERS: Mapping[str, Callable[[str], list[ToolCall]]] = {
    "hermes": _hermes,
    "llama3": _llama3,
    "deepseek": _deepseek,
    "kimi_k2": _kimi_k2,
    **{name: partial(_tagged, tags) for name, tags in TAGS.items()},
}


def _decoded(text: str) -> tuple[Any, str]:
    """Return the JSON value of a text, and why it has none."""
    text = text.strip()
    value, error, end = _decoded_first(text)
    return value, error or (f"the call is not JSON: more follows it: {text[end : end + 20]!r}" if text[end:] else "")


def _decoded_first(text: str) -> tuple[Any, str, int]:
    """Return the JSON value at the start of a text, why there is none, and where it ends."""
    try:
        value, end = DECODER.raw_decode(text)
        json.dumps(value, ensure_ascii=False).encode()  # fails for halves of surrogate pairs, which are no text
    except (ValueError, RecursionError) as error:
        return None, f"the call is not JSON: {error}", 0
    return value, "", end


def _call_of(value: Any, error: str, arguments_name: str) -> ToolCall:
    """Return the call that a JSON object describes."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(arguments_name, {}) if isinstance(value, dict) else None
    if not error and isinstance(name, str) and isinstance(arguments, dict):
        return ToolCall(name=name, arguments=arguments, error="", id="")
    error = error or f"expected an object with name and {arguments_name}"
    return ToolCall(name="", arguments={}, error=error, id="")

"""Find tool calls in the model's text.

    hermes     <tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>
    llama3     {"name": "calculator", "parameters": {"expression": "1+2"}}    the whole turn; others behind ;
    deepseek   <｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "1+2"}<｜tool▁call▁end｜>
               of V3, name and arguments (between ```json and ```) are both behind the separator
    glm45      <tool_call>calculator
               <arg_key>expression</arg_key>
               <arg_value>1+2</arg_value>
               </tool_call>    texts as they are, other values as JSON

Invariant (tests/environments/test_tools.py): whatever the text is, parsing it raises nothing.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

DECODER = json.JSONDecoder()
TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
LLAMA3 = re.compile(r'\{\s*"(name|type|parameters)"')
DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
FENCED = re.compile(r"(.*?)\n```json\n(.*)\n```\s*$", re.DOTALL)
ARGUMENT = re.compile(r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", re.DOTALL)

Schemas = Sequence[Mapping[str, Any]]
"""Tools as OpenAI's API describes them"""


class ToolCall(TypedDict):
    """A call in the model's text. `error`: why it cannot be called, "" if it can."""

    name: str
    arguments: dict[str, Any]
    error: str


def parse(text: str, tool_format: str, schemas: Schemas = ()) -> list[ToolCall]:
    """Return the tool calls in a text, in order. ``schemas``: of the tools, which tell texts from JSON in `glm45`."""
    calls = PARSERS[tool_format](text)
    return [_decoded_values(call, schemas) for call in calls] if tool_format == "glm45" else calls


def _hermes(text: str) -> list[ToolCall]:
    return [_call_of(*_decoded(body), "arguments") for body in TAGGED.findall(text)]


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
    for head, body in DEEPSEEK.findall(text):
        fenced = FENCED.match(body)
        name, arguments = (fenced[1], fenced[2]) if fenced else (head, body)
        value, error = _decoded(arguments)
        calls.append(_call_of({"name": name.strip(), "arguments": value}, error, "arguments"))
    return calls


def _glm45(text: str) -> list[ToolCall]:
    """Return calls whose arguments are all texts."""
    calls = []
    for body in TAGGED.findall(text):
        name, tag, rest = body.partition("<arg_key>")
        error = "expected <arg_key> and <arg_value> by turns" if ARGUMENT.sub("", tag + rest).strip() else ""
        value = {"name": name.strip(), "arguments": dict(ARGUMENT.findall(tag + rest))}
        calls.append(_call_of(value, error, "arguments"))
    return calls


def _decoded_values(call: ToolCall, schemas: Schemas) -> ToolCall:
    """Decode the arguments that are JSON and that the tool does not take as texts."""
    functions = [function for one in schemas if isinstance(function := one.get("function"), dict)]
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
    "hermes": _hermes, "llama3": _llama3, "deepseek": _deepseek, "glm45": _glm45
}  # fmt: skip


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
        return ToolCall(name=name, arguments=arguments, error="")
    return ToolCall(name="", arguments={}, error=error or f"expected an object with name and {arguments_name}")

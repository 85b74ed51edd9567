"""Find tool calls in the model's text, describe Python functions by JSON schemas, and call them.

    hermes     <tool_call>{"name": "calculator", "arguments": {"expression": "1+2"}}</tool_call>
    llama3     {"name": "calculator", "parameters": {"expression": "1+2"}}    the whole turn; others behind ;
    deepseek   <｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "1+2"}<｜tool▁call▁end｜>
               of V3, name and arguments (between ```json and ```) are both behind the separator

Invariant (tests/environments/test_tools.py): whatever the text is, parsing it and answering its calls raises
nothing: a mistake of the model is answered by a message that states it.
"""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypedDict, get_type_hints

from fusion.environments.interface import Message

JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object"}
DECODER = json.JSONDecoder()
HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
PYTHON_TAG = "<|python_tag|>"
LLAMA3 = re.compile(r'\{\s*"(name|type|parameters)"')
DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)<｜tool▁sep｜>(.*?)<｜tool▁call▁end｜>", re.DOTALL)
FENCED = re.compile(r"(.*?)\n```json\n(.*)\n```\s*$", re.DOTALL)


class ToolCall(TypedDict):
    """A call in the model's text. `error`: why it cannot be called, "" if it can."""

    name: str
    arguments: dict[str, Any]
    error: str


def parse(text: str, tool_format: str) -> list[ToolCall]:
    """Return the tool calls in a text, in order."""
    return PARSERS[tool_format](text)


def _hermes(text: str) -> list[ToolCall]:
    return [_call_of(*_decoded(body), "arguments") for body in HERMES.findall(text)]


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


PARSERS: Mapping[str, Callable[[str], list[ToolCall]]] = {"hermes": _hermes, "llama3": _llama3, "deepseek": _deepseek}


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


class Tools:
    """Functions that the model may call, by name; parameters need annotations of JSON's types.
    ``schemas``: the functions as OpenAI's API and chat templates describe them."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._by_name = {function.__name__: function for function in functions}
        self.schemas = [schema_of(function) for function in functions]

    async def answer(self, call: ToolCall) -> Message:
        """Return the result of a call as a message of role `tool`, which states a mistake of the call. A function
        raises ValueError for values that it refuses; whatever else it raises is a failure of the environment."""
        message = {"role": "tool", "name": call["name"] or "unknown"}
        return message | {"content": await self._result(call)}

    async def _result(self, call: ToolCall) -> str:
        function = self._by_name.get(call["name"])
        if call["error"] or function is None:
            unknown = f"no tool {call['name']!r}; there is {', '.join(self._by_name)}"
            return f"error: {call['error'] or unknown}"
        try:
            inspect.signature(function).bind(**call["arguments"])
            check_types(function, call["arguments"])
        except TypeError as error:
            return f"error: {error}"
        try:
            result = function(**call["arguments"])
            result = await result if inspect.isawaitable(result) else result
        except ValueError as error:
            return f"error: {error}"
        return result if isinstance(result, str) else json.dumps(result)


def check_types(function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check arguments against the annotations.
    Raise TypeError: names an argument of another type."""
    hints = get_type_hints(function)
    for name, value in arguments.items():
        expected = hints.get(name)
        is_number = expected is float and type(value) is int
        if expected in JSON_TYPES and type(value) is not expected and not is_number:
            raise TypeError(f"argument {name!r} is not of type {JSON_TYPES[expected]}")


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function: its name, the first line of its docstring, its annotated parameters.
    Raise ValueError: a parameter has no annotation that JSON knows."""
    hints, properties, required = get_type_hints(function), {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        if hints.get(name) not in JSON_TYPES:
            kinds = ", ".join(kind.__name__ for kind in JSON_TYPES)
            raise ValueError(f"tool {function.__name__}: expected an annotation of {kinds} for parameter {name!r}")
        properties[name] = {"type": JSON_TYPES[hints[name]]}
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = (inspect.getdoc(function) or "").partition("\n")[0]
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": description, "parameters": parameters},
    }

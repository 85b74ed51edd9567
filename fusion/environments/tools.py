"""Describe Python functions by JSON schemas, and call them.

Invariant (tests/environments/test_tools.py): whatever a call is, answering it raises nothing that the function does not
raise: a mistake of the model is answered by a message that states it."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fusion.environments.interface import Message
from fusion.environments.tool_calls import ToolCall

JSON_TYPES: Mapping[Any, str] = {
    str: "string", int: "integer", float: "number", bool: "boolean", list: "array", dict: "object", NoneType: "null"
}  # fmt: skip
PARAMETER = re.compile(r" {1,4}(\w+)(?: \(.*?\))?: (.*)")
"""The beginning of a parameter's description in the section `Args:` of a docstring"""


class Tools:
    """Functions that the model may call, by name; parameters need annotations of JSON's types.
    ``schemas``: the functions as OpenAI's API and chat templates describe them."""

    def __init__(self, *functions: Callable[..., Any]) -> None:
        self._by_name = {function.__name__: function for function in functions}
        self.schemas = [schema_of(function) for function in functions]

    async def answer(self, call: ToolCall) -> Message:
        """Return the result of a call as a message of role `tool`, which states a mistake of the call. A function
        raises ValueError for values that it refuses; whatever else it raises is a failure of the environment."""
        message = {"role": "tool", "name": call["name"] or "unknown", "content": await self._result(call)}
        return message | ({"tool_call_id": call["id"]} if call["id"] else {})

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
    """Check arguments against the annotations. Raise TypeError: names an argument of another type."""
    hints = get_type_hints(function)
    for name, value in arguments.items():
        if not fits(value, schema := type_schema(hints[name])):
            raise TypeError(f"argument {name!r} is not of type {named(schema)}")


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a JSON value is one that `type_schema` describes."""
    if "enum" in schema:
        return any(type(value) is type(one) and value == one for one in schema["enum"])
    if "anyOf" in schema:
        return any(fits(value, kind) for kind in schema["anyOf"])
    kind = JSON_TYPES.get(type(value))
    if kind != schema["type"]:
        return kind == "integer" and schema["type"] == "number"
    inner = schema.get("items") or schema.get("additionalProperties")
    return inner is None or all(fits(one, inner) for one in (value if kind == "array" else value.values()))


def named(schema: Mapping[str, Any]) -> str:
    """Return the type that a schema describes, for a message."""
    if "enum" in schema:
        return " or ".join(map(json.dumps, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(map(named, schema["anyOf"]))
    inner = schema.get("items") or schema.get("additionalProperties")
    return f"{schema['type']} of {named(inner)}" if inner else schema["type"]


def type_schema(hint: Any) -> dict[str, Any]:
    """Return the JSON schema of an annotation: a type of JSON, a list or dict of such, Literal, or one of several.
    Raise KeyError: it is something else."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Literal:
        kinds = {JSON_TYPES[type(part)] for part in parts}
        return ({"type": kinds.pop()} if len(kinds) == 1 else {}) | {"enum": [*parts]}
    if origin in (Union, UnionType):
        return {"anyOf": [type_schema(part) for part in parts]}
    if origin is list:
        return {"type": "array", "items": type_schema(parts[0])}
    if origin is dict and parts[0] is str:
        return {"type": "object", "additionalProperties": type_schema(parts[1])}
    return {"type": JSON_TYPES[hint]}


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a function: its name, the first line of its docstring, its annotated parameters, and
    what the docstring says of them in a section `Args:`.
    Raise ValueError: a parameter has no annotation that JSON knows."""
    hints, described, properties, required = get_type_hints(function), _described(function), {}, []
    for name, parameter in inspect.signature(function).parameters.items():
        try:
            properties[name] = type_schema(hints.get(name)) | described.get(name, {})
        except (KeyError, TypeError):
            kinds = ", ".join(kind.__name__ for kind in JSON_TYPES if kind is not NoneType)
            expected = f"an annotation of {kinds}, of lists and dicts of them, Literal or a union"
            raise ValueError(f"tool {function.__name__}: expected {expected} for parameter {name!r}") from None
        if parameter.default is parameter.empty:
            required.append(name)
    parameters = {"type": "object", "properties": properties, "required": required}
    description = (inspect.getdoc(function) or "").partition("\n")[0]
    return {
        "type": "function",
        "function": {"name": function.__name__, "description": description, "parameters": parameters},
    }


def _described(function: Callable[..., Any]) -> dict[str, dict[str, str]]:
    """Return the descriptions of parameters, by name, each as a part of its schema."""
    texts: dict[str, str] = {}
    section = (inspect.getdoc(function) or "").partition("\nArgs:\n")[2].partition("\n\n")[0]
    for line in section.splitlines():
        if begun := PARAMETER.fullmatch(line):
            texts[begun[1]] = begun[2]
        elif texts:
            texts[[*texts][-1]] += f" {line.strip()}"
    return {name: {"description": text} for name, text in texts.items()}

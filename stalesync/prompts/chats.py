"""Check chats and bring them to one form, before a chat template reads them: a template renders a message whose fields
it does not know as an empty one, without an error.

    {"role": "user", "content": "…"}                            as it is
    {"role": "user", "content": [{"type": "text", …}, …]}       the texts, joined by line ends (as vLLM does)
    {"from": "human", "value": "…"}                             ShareGPT's form
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

ROLES = ("system", "developer", "user", "assistant", "tool")
ROLE_BY_SENDER = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
}
"""Roles by ShareGPT's `from`."""

FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"}
"""Fields of a message that chat templates read."""


def normalize_chat(messages: list[Any], *, answered: bool = False) -> list[dict[str, Any]]:
    """Return the messages as `role` and `content`, both texts, with the other fields that templates read. Raise
    ValueError with the number of the message (counted from 0), what is wrong with it, and what is accepted. Also for a
    chat that ends with the assistant: the response would follow an answer. With ``answered``, for one that begins with
    the assistant, or in which it says nothing."""
    if not messages:
        raise ValueError("the chat has no message")
    chat = []
    for number, message in enumerate(messages):
        try:
            chat.append(_normalize(message))
        except ValueError as error:
            raise ValueError(f"message {number}: {error}") from None
    if answered:
        if all(message["role"] != "assistant" for message in chat):
            raise ValueError("the chat has no message of the assistant, so nothing is trained on it")
        if chat[0]["role"] == "assistant":
            raise ValueError("message 0 is the assistant's; expected what it answers")
    elif chat[-1]["role"] not in ("user", "tool"):
        raise ValueError(f"message {len(chat) - 1}, the last one, is the {chat[-1]['role']}'s; expected the user's")
    return chat


def _normalize(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise ValueError(f"a {type(message).__name__}; expected an object with role and content")
    stated = {name: value for name, value in message.items() if value is not None}  # a Parquet column has all fields
    if "from" in stated or "value" in stated:
        stated = _of_sharegpt(stated)
    if unknown := sorted(stated.keys() - FIELDS):
        raise ValueError(f"the field {unknown[0]!r} is not supported; expected {', '.join(sorted(FIELDS))}")
    if stated.get("role") not in ROLES:
        raise ValueError(f"role={stated.get('role')!r}: expected one of {', '.join(ROLES)}")
    content = _text(stated["content"]) if "content" in stated else ""
    if not content.strip() and (stated["role"] == "user" or "content" not in stated and "tool_calls" not in stated):
        raise ValueError(f"the {stated['role']}'s content is empty")
    if calls := stated.get("tool_calls"):
        stated = stated | {"tool_calls": _calls(calls)}
    return stated | {"content": content}


def without_nulls(value: Any) -> Any:
    """Return a value of a Parquet file without the nulls of its objects: there all have the fields of any of them."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [*map(without_nulls, value)] if isinstance(value, list) else value


def _calls(calls: Any) -> list[dict[str, Any]]:
    """Return calls of tools in the form of OpenAI's API, with arguments as objects, as most templates read them.
    Raise ValueError: one is neither such a call nor its function alone."""
    checked = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        arguments = function.get("arguments", {}) if isinstance(function, dict) else None
        if isinstance(arguments, str):
            with suppress(ValueError):
                arguments = json.loads(arguments)
        if (
            not isinstance(function, dict)
            or not isinstance(arguments, dict)
            or not isinstance(function.get("name"), str)
        ):
            expected = "a list of objects with name and arguments, an object or its JSON, or with these in function"
            raise ValueError(f"tool_calls has {call!r:.60}; expected {expected}")
        whole = call if "function" in call else {"type": "function"}
        checked.append(whole | {"function": function | {"arguments": arguments}})
    return checked


def with_texts(chat: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the chat with the arguments of its calls as JSON."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls") else {**message}
        for message in chat
    ]  # fmt: skip


def _with_text(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    text = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _of_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    if unknown := sorted(message.keys() - {"from", "value"}):
        raise ValueError(f"the field {unknown[0]!r} is not supported beside from and value")
    sender = message.get("from")
    if not isinstance(sender, str) or sender not in ROLE_BY_SENDER:
        raise ValueError(f"from={sender!r}: expected one of {', '.join(ROLE_BY_SENDER)}")
    stated = {"role": ROLE_BY_SENDER[sender]}
    return stated | ({"content": message["value"]} if "value" in message else {})


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content is a {type(content).__name__}; expected a text or a list of text parts")
    texts = []
    for number, part in enumerate(content):
        stated = {name: value for name, value in part.items() if value is not None} if isinstance(part, dict) else {}
        kind = stated.get("type")
        if kind != "text" or not isinstance(stated.get("text"), str) or len(stated) > 2:
            shown = f"of type {kind!r}" if kind is not None and kind != "text" else repr(part)[:60]
            raise ValueError(f"content part {number} is {shown}; only parts of type 'text' are supported")
        texts.append(stated["text"])
    return "\n".join(texts)

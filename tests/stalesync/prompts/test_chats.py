"""Chats as data files hold them, and what is refused before a template could ignore it."""

import pytest

from stalesync.prompts.chats import normalize_chat

USER = {"role": "user", "content": "1"}


def test_a_chat_with_role_and_content_is_kept_as_it_is():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [
        {"role": "system", "content": ""},
        USER,
        {"role": "assistant", "content": "2", "reasoning_content": "hm"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "3", "tool_call_id": "c"},
    ]
    assert normalize_chat(chat) == chat
    assert normalize_chat([{"role": "assistant", "tool_calls": [call]}, USER])[0]["content"] == ""


def test_fields_of_other_messages_in_a_parquet_column_are_left_out():
    assert normalize_chat([USER | {"name": None, "images": None}]) == [USER]


def test_the_form_of_sharegpt_is_understood():
    chat = [("system", "be kind"), ("human", "1"), ("gpt", "2"), ("human", "3")]
    assert normalize_chat([{"from": sender, "value": text} for sender, text in chat]) == [
        {"role": role, "content": text}
        for role, (_, text) in zip(("system", "user", "assistant", "user"), chat, strict=True)
    ]


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "a", "image_url": None}, {"type": "text", "text": "b"}]
    assert normalize_chat([{"role": "user", "content": parts}]) == [{"role": "user", "content": "a\nb"}]


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([], "the chat has no message"),
        (["hello"], "message 0: a str; expected an object with role and content"),
        ([{"content": "1"}], "message 0: role=None: expected one of system, developer, user"),
        ([{"role": "bot", "content": "1"}], "message 0: role='bot': expected one of"),
        ([{"role": "user"}], "message 0: the user's content is empty"),
        ([{"role": "user", "content": " "}], "message 0: the user's content is empty"),
        ([{"role": "assistant"}, USER], "message 0: the assistant's content is empty"),
        ([{"role": "user", "content": 1}], "message 0: content is a int; expected a text or a list of text parts"),
        ([USER | {"images": ["a.png"]}], "message 0: the field 'images' is not supported; expected content, name"),
        (
            [USER, {"role": "assistant", "content": "2"}],
            "message 1, the last one, is the assistant's; expected the user's",
        ),
        ([{"role": "system", "content": "2"}], "message 0, the last one, is the system's"),
        ([{"from": "human", "value": "1", "weight": 0}], "message 0: the field 'weight' is not supported beside from"),
        ([{"from": "function_call", "value": "1"}], "message 0: from='function_call': expected one of system, human"),
        ([{"from": "human"}], "message 0: the user's content is empty"),
        ([{"value": "1"}], "message 0: from=None: expected one of system, human"),
        ([{"role": "assistant", "tool_calls": 3}, USER], "message 0: tool_calls has 3; expected a list of objects"),
        ([{"role": "assistant", "tool_calls": ["add"]}, USER], "message 0: tool_calls has 'add'; expected a list of"),
        ([{"role": "assistant", "tool_calls": [{"name": "add", "arguments": "1"}]}, USER], "arguments, an object or"),
        ([{"role": "assistant", "tool_calls": [{"function": {"arguments": {}}}]}, USER], "message 0: tool_calls has"),
    ],
)
def test_a_message_that_a_template_would_ignore_is_refused(chat, message):
    with pytest.raises(ValueError, match=message):
        normalize_chat(chat)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "content part 1 is of type 'image_url'; only parts of"),
        ({"type": "image"}, "content part 1 is of type 'image'"),
        ({"type": "text"}, "content part 1 is {'type': 'text'}; only parts of type 'text'"),
        ({"type": "text", "text": "1", "image": "a"}, "content part 1 is {'type': 'text', 'text': '1', 'image': 'a'}"),
        ("1", "content part 1 is '1'"),
    ],
)
def test_parts_that_are_no_text_are_refused_by_name(part, message):
    with pytest.raises(ValueError, match=message):
        normalize_chat([{"role": "user", "content": [{"type": "text", "text": "look"}, part]}])

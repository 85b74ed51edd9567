"""A chat's parts are tokenised as a conversation would be, and what the assistant says is trained."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stalesync.job.sft import ChatTokenizer
from stalesync.prompts import ChatTemplate, DataConfig, make_tokenizer
from stalesync.prompts.chats import normalize_chat
from stalesync.prompts.tokenizer import CALL, CALL_END, END

TOKENIZER = make_tokenizer(chat=True)
TEXTS = st.text("0123456789+-= abc", min_size=1, max_size=8).filter(str.strip)
CHATS = st.lists(st.tuples(st.sampled_from(["user", "tool", "assistant"]), TEXTS), min_size=1, max_size=6).map(
    lambda turns: [{"role": role, "content": text} for role, text in [("user", "1"), *turns]]
)
QWEN3 = (
    "{% set last = messages | length - 1 %}{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' and loop.index0 != last %}{{ message.content.split('=')[-1] }}"
    "{% else %}{{ message.content }}{% endif %}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Of the templates that rewrite earlier turns of the assistant"""


def tokenize(template: str | None = None) -> ChatTokenizer:
    tokenizer = make_tokenizer(chat=True)
    tokenizer.chat_template = template or tokenizer.chat_template
    return ChatTokenizer(ChatTemplate(DataConfig(), tokenizer), tokenizer)


@given(CHATS, st.booleans())
def test_the_turns_of_the_assistant_and_their_ends_are_trained(chat, breaks_lines):
    lines = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    template = lines + "{% if add_generation_prompt %}<|assistant|>{% endif %}" if breaks_lines else None
    ids, trained = tokenize(template)(chat)
    said = [message["content"] + END for message in chat if message["role"] == "assistant"]
    of_assistant = [id for id, is_trained in zip(ids, trained, strict=True) if is_trained]
    assert TOKENIZER.decode(of_assistant) == "".join(said)
    whole = TOKENIZER.apply_chat_template(chat, tokenize=False) if template is None else TOKENIZER.decode(ids)
    assert whole.startswith(TOKENIZER.decode(ids)) and ids[-1:] == ([TOKENIZER.eos_token_id] if said else [])


def test_a_call_of_the_calculator_has_two_tokens_more_than_its_expression():
    text = f"{CALL}12+34{CALL_END}"
    ids = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == 7 and TOKENIZER.decode(ids) == text
    assert text == '<tool_call>{"name": "calculator", "arguments": {"expression": "12+34"}}</tool_call>'


def test_every_printable_character_has_a_token_and_words_have_one():
    text = "".join(map(chr, range(32, 127))) + "\n"
    assert TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
    assert [len(TOKENIZER(word)["input_ids"]) for word in ("higher", "lower", "<|user|>", "12")] == [1, 1, 1, 2]


def test_a_template_that_rewrites_earlier_turns_is_refused():
    turns = ("user", "1"), ("assistant", "2=3"), ("user", "4"), ("assistant", "5")
    chat = [{"role": role, "content": text} for role, text in turns]
    with pytest.raises(ValueError, match="message 1: the chat template renders it in another way when others follow"):
        tokenize(QWEN3)(chat)
    assert tokenize(QWEN3)(chat[:2]).trained.count(True) == 4


def test_calls_that_a_template_leaves_out_are_refused_and_others_are_trained():
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2", "tool_calls": [call]}]
    with pytest.raises(ValueError, match="message 1: the chat template leaves out tool_calls; write them in content"):
        tokenize()(chat)
    rendered = "{{ message.content }}{% for call in message.tool_calls %}{{ call.function.name }}{% endfor %}"
    rendering = tokenize(QWEN3.replace("{{ message.content }}", rendered))
    without = [chat[0], {**chat[1], "tool_calls": []}]
    assert rendering(chat).trained.count(True) > tokenize()(without).trained.count(True)


CALLS = "{% for call in message.tool_calls %}<call>{{ call.function.name }} {{ ARGUMENTS }}</call>{% endfor %}"
ARGUMENTS = {
    "objects": ("call.function.arguments | tojson", '{"b": "ä"}'),  # most families
    "texts": ("call.function.arguments", '{"b": "ä"}'),  # DeepSeek's, which writes an object as Python does
    "joined": ("'' + call.function.arguments", '{"b": "ä"}'),  # and refuses one here
    "items": ("call.function.arguments.items() | list", "[('b', 'ä')]"),  # GLM's, which refuses a text
}


@pytest.mark.parametrize("given", [{"b": "ä"}, '{"b": "ä"}'])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_of_calls_reach_a_template_as_it_reads_them(kind, given):
    expression, written = ARGUMENTS[kind]
    tokenizer = make_tokenizer(chat=True)
    calls = CALLS.replace("ARGUMENTS", expression)
    tokenizer.chat_template = QWEN3.replace("{{ message.content }}", "{{ message.content }}" + calls)
    asked = {"role": "user", "content": "1"}
    for call in (
        {"name": "a", "arguments": given},
        {"type": "function", "function": {"name": "a", "arguments": given}},
    ):
        chat = normalize_chat([asked, {"role": "assistant", "tool_calls": [call]}], answered=True)
        rendered = ChatTemplate(DataConfig(), tokenizer).render_chat(chat, add_generation_prompt=False)
        assert f"<call>a {written}</call>" in rendered


def test_tools_of_a_chat_are_read_by_its_template_or_refused():
    chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]
    with pytest.raises(ValueError, match="the chat template leaves out tools; write them in a message of the system"):
        tokenize()(chat, [{"name": "add"}])
    reading = tokenize("{% for tool in tools or [] %}{{ tool.name }}{% endfor %}" + QWEN3)
    with_tools, without = reading(chat, [{"name": "add"}]), reading(chat)
    assert TOKENIZER.decode(with_tools.ids) == "add" + TOKENIZER.decode(without.ids)
    assert with_tools.trained == [False] * (len(with_tools.ids) - len(without.ids)) + without.trained

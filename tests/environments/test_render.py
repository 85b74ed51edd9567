"""Tokens that were sampled, and the bridges between them, are the tokens of the whole conversation, unless the template
rewrites what was sampled."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fusion.environments.render import Bridge
from stalesync.prompts import ChatTemplate, DataConfig
from tests.environments.templates import FAMILIES, QWEN3, SPECIAL, Family, tokenizer_of

TEMPLATES = {
    name: ChatTemplate(DataConfig(chat_template_kwargs=family.settings or None), tokenizer_of(family.template))
    for name, family in FAMILIES.items()
}
ENDS = {name: {SPECIAL.index(end) for end in family.ends.values()} for name, family in FAMILIES.items()}
BRIDGES = {name: Bridge(template, ENDS[name]) for name, template in TEMPLATES.items()}

TEXTS = st.text(st.sampled_from('abz059 .,:{}"\n'), min_size=1, max_size=12).map(str.strip).filter(bool)
OBSERVATIONS = st.one_of(
    TEXTS.map(lambda text: [("user", text)]),
    st.lists(TEXTS, min_size=1, max_size=3).map(lambda texts: [("tool", text) for text in texts]),
)
TURNS = st.lists(st.tuples(st.one_of(st.just(""), TEXTS), TEXTS, OBSERVATIONS, st.booleans()), min_size=1, max_size=4)
"""Of each turn: thought, answer, observation, whether the end of the turn was sampled"""


def ids_of(template: ChatTemplate, text: str) -> list[int]:
    return template.tokenize([text])[0]


def chat(family: Family, turns: list[Any], upto: int) -> list[dict[str, str]]:
    """The conversation after ``upto`` turns and observations."""
    messages = [{"role": "user", "content": "what is it?"}]
    for thought, answer, observation, _ in turns[:upto]:
        messages.append({"role": "assistant", "content": family.written(thought, answer).strip()})
        messages += [{"role": role, "content": text} for role, text in observation]
    return messages


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=100)
@given(shots=st.one_of(st.just([]), TURNS), turns=TURNS)
def test_tokens_and_bridges_are_those_of_the_whole_conversation(name, shots, turns):
    """``shots``: turns of the first messages, which the model has not said."""
    family, template, bridge = FAMILIES[name], TEMPLATES[name], BRIDGES[name]
    turns = [*shots, *turns]
    if name == "glm45_silent":
        turns = [("", *turn[1:]) for turn in turns]
    first = chat(family, turns, len(shots))
    tokens, had_thought = bridge.first(first), False
    for number, (thought, answer, observation, is_ended) in enumerate(turns[len(shots) :], len(shots) + 1):
        turn = ids_of(template, family.written(thought, answer))
        kept = [*tokens, *turn]
        if is_ended:
            turn.append(SPECIAL.index(family.ends[observation[0][0]]))
        tokens += turn
        messages = [{"role": role, "content": text} for role, text in observation]
        earlier = chat(family, turns, number - 1)[len(first) :]
        following = bridge.bridge(bridge.end_of(turn), messages, had_thought=had_thought, earlier=earlier, first=first)
        had_thought |= bool(thought)
        whole = ids_of(template, template.render_chat(chat(family, turns, number)))
        if following is None:
            assert whole[: len(kept)] != kept
            return
        tokens += following
        assert tokens == whole


@pytest.mark.parametrize(
    ("name", "thought", "role", "is_bridged"),
    [
        ("qwen3", "", "user", True),
        ("qwen3", "t", "tool", True),
        ("qwen3", "t", "user", False),
        ("llama3", "t", "user", True),
        ("deepseek_v3", "t", "tool", True),
        ("glm45", "t", "tool", True),
        ("glm45", "t", "user", False),
        ("glm45", "", "tool", False),
        ("glm45_silent", "", "user", True),
    ],
)
def test_which_turns_a_template_rewrites(name, thought, role, is_bridged):
    family, template, bridge = FAMILIES[name], TEMPLATES[name], BRIDGES[name]
    end = bridge.end_of(ids_of(template, family.written(thought, "b")))
    assert (bridge.bridge(end, [{"role": role, "content": "c"}]) is not None) == is_bridged


def test_separators_around_a_tool_turn_are_kept():
    bridge, template = BRIDGES["qwen3"], TEMPLATES["qwen3"]
    end = bridge.end_of(ids_of(template, "b<|im_end|>"))
    text = "\n<|im_start|>user\n<tool_response>\nc\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert bridge.bridge(end, [{"role": "tool", "content": "c"}]) == ids_of(template, text)


def test_behind_a_template_that_rewrites_every_turn_the_model_speaks_after_the_whole_conversation():
    """Qwen3's without thinking opens a turn with an empty thought, which it leaves out later."""
    template = ChatTemplate(DataConfig(chat_template_kwargs={"enable_thinking": False}), tokenizer_of(QWEN3))
    bridge = Bridge(template, [2])
    says = [{"role": "user", "content": "c"}]
    assert bridge.bridge(bridge.end_of(ids_of(template, "b<|im_end|>")), says) is None
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, *says]
    text = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    assert bridge.first(chat) == ids_of(template, text + "<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_a_tokenizer_without_a_template_is_refused_by_name():
    with pytest.raises(ValueError, match="a conversation needs a tokenizer with a chat template"):
        Bridge(ChatTemplate(DataConfig(), tokenizer_of("")), [2])


def test_the_schemas_of_tools_reach_the_template():
    source = "{{ tools[0].function.name if tools }}{% for m in messages %}{{ 'A' if m.role == 'assistant' }}"
    source += "{{ m.content }}<|im_end|>{% endfor %}"
    template = ChatTemplate(DataConfig(), tokenizer_of(source + "{% if add_generation_prompt %}A{% endif %}"))
    first = Bridge(template, [2]).first([{"role": "user", "content": "a"}], [{"function": {"name": "search"}}])
    assert first == ids_of(template, "searcha<|im_end|>A")

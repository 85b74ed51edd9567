"""Tokenise chats for supervised training, and mark what the assistant says.

    rendered up to the assistant's turn │ its text and its end │ others' turns │ …      tokenised apart, as they are
    not trained                         │ trained              │ not trained          when a conversation is sampled

Invariant: the parts are the whole rendered chat, up to the end of the assistant's last turn."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from stalesync.prompts.template import Chat, ChatTemplate


class Supervised(NamedTuple):
    """Tokens of a chat, and whether each is trained."""

    ids: list[int]
    trained: list[bool]


class ChatTokenizer:
    """Tokenises chats by the ``template`` of ``tokenizer``; raises ValueError if it does not show where the assistant's
    turn ends."""

    def __init__(self, template: ChatTemplate, tokenizer: Any) -> None:
        if not template.applies:
            raise ValueError("the tokenizer has no chat template")
        if template.turn_end is None:
            raise ValueError("the tokenizer's chat template ends the assistant's turn with no special token")
        self._template: ChatTemplate = template
        self._tokenizer: Any = tokenizer
        self._end: str = tokenizer.convert_ids_to_tokens(template.turn_end)

    def __call__(self, chat: Chat, tools: Sequence[Mapping[str, Any]] = ()) -> Supervised:
        """Return the tokens of a chat with JSON schemas of ``tools``, up to the end of the assistant's last turn. Raise
        ValueError if the template rewrites earlier turns when later ones follow (named), leaves out tools or their
        calls, or refuses the chat."""
        whole, at = self._template.render_chat(chat, tools=tools, add_generation_prompt=False), 0
        if tools and whole == self._template.render_chat(chat, add_generation_prompt=False):
            raise ValueError("the chat template leaves out tools; write them in a message of the system")
        ids: list[int] = []
        trained: list[bool] = []
        for number, message in enumerate(chat):
            if message["role"] != "assistant":
                continue
            asked = self._template.render_chat(chat[:number], tools=tools)
            said = self._template.render_chat(chat[: number + 1], tools=tools, add_generation_prompt=False)
            end = said.find(self._end, len(asked)) + len(self._end)
            if end < len(asked) + len(self._end) or not said.startswith(asked) or not whole.startswith(said[:end]):
                raise ValueError(f"message {number}: the chat template renders it in another way when others follow")
            text = whole[len(asked) : end]
            if message.get("tool_calls") and text.strip() == f"{message['content']}{self._end}".strip():
                raise ValueError(f"message {number}: the chat template leaves out tool_calls; write them in content")
            for part, is_trained in ((whole[at : len(asked)], False), (text, True)):
                tokens = self._tokenizer(part, add_special_tokens=False)["input_ids"]
                ids += tokens
                trained += [is_trained] * len(tokens)
            at = end
        return Supervised(ids, trained)

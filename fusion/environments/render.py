"""Turn messages into the tokens that follow those of the model, by the chat template. Sampled tokens are never
tokenized again.

    tokens so far          bridge
    … header, turn, end    separator, the environment's messages, header of the model's next turn

A bridge costs the same behind every turn: it depends on the last turn's tokens, and of all earlier ones only on whether
the model has thought and who has spoken.

Invariant (tests/environments/test_render.py): where the template leaves earlier turns as they are, tokens and bridge
are the tokens of the whole conversation as the template renders it. Where it rewrites them, such as Qwen3's, which
removes thoughts before a later message of the user, there is no bridge: the model speaks behind another prompt then, of
which these turns are a part as the template writes them (`first`)."""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from fusion.environments.interface import Message

MARK, CONTENT, THOUGHT, THOUGHT_END = "mark7", "content8", "thought9", "</think>"
TURN = re.compile(re.escape(MARK))
TURN_WITH_THOUGHT = re.compile(rf"(?:\s*<think>)?\s*{THOUGHT}\s*{THOUGHT_END}\s*{MARK}")
"""What a template writes behind a header for a turn of the model. Space before it, which some templates write, is the
model's."""
ASKED = {"role": "user", "content": "a"}

TurnEnd = tuple[int, bool]
"""Last token of a turn of the model, and whether it has a thought"""


class Template(Protocol):
    def render_chat(
        self, chat: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] = (), add_generation_prompt: bool = True
    ) -> str:
        """Return the text of a chat; raises ValueError if the template refuses it."""

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of rendered texts."""


class Bridge:
    """Continue conversations of one template.
    ``end_token_ids``: tokens that end a turn when they are sampled.
    Raise ValueError: there is no template."""

    def __init__(self, template: Template, end_token_ids: Collection[int]) -> None:
        self._template, self._ends = template, frozenset(end_token_ids)
        template.render_chat([ASKED])  # says so where there is no template
        self._thought_end = self._ids(THOUGHT_END)
        tails = {role: self._probe(role) for role in ("user", "tool")}
        firsts = {self._ids(tail)[0] for tail in tails.values() if tail}
        self._turn_end = firsts.pop() if len(firsts) == 1 else None
        self._distinguished = {role for role, tail in tails.items() if tail and self._distinguishes(role)}

    def first(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the tokens of the first messages, or of all, up to where the model speaks."""
        return self._ids(self._template.render_chat(messages, tools=tools))

    def end_of(self, turn: Sequence[int]) -> TurnEnd:
        """Return what `bridge` needs to know of the tokens of the model's last turn, which may have its end."""
        return turn[-1], self.has_thought(turn)

    def has_thought(self, tokens: Sequence[int]) -> bool:
        size = len(self._thought_end)
        return any(tokens[at : at + size] == self._thought_end for at in range(len(tokens) - size + 1))

    def bridge(
        self,
        end: TurnEnd,
        messages: Sequence[Message],
        *,
        had_thought: bool = False,
        earlier: Iterable[Message] = (),
        first: Sequence[Message] = (),
    ) -> list[int] | None:
        """Return the tokens of ``messages`` and of the header of the model's next turn; None where the template would
        rewrite a turn of the model, or of the assistant in the first messages.
        ``end``: of the last turn.
        ``had_thought``: whether an earlier turn has a thought.
        ``earlier``: the messages behind the ``first`` ones so far."""
        last_token, has_thought = end
        begins = first if any(message["role"] == "assistant" for message in first) else (ASKED,)
        distinguished = self._distinguished & {message["role"] for message in messages}
        is_repeated = bool(distinguished) and any(message["role"] in distinguished for message in earlier)
        tail_after = partial(self._tail, messages, is_repeated=is_repeated, begins=begins)
        tail = tail_after(has_thought=has_thought)
        if tail is None or had_thought and tail_after(has_thought=True) is None:
            return None
        ids = self._ids(tail)
        is_ended = last_token in self._ends and ids[0] in (last_token, self._turn_end)
        return ids[1:] if is_ended else ids

    def _probe(self, role: str) -> str | None:
        """Return what follows a turn of the model that the template leaves as it is before a message of ``role``; None
        if it leaves none."""
        messages = [{"role": role, "content": CONTENT}]
        try:
            tails = [self._tail(messages, has_thought=has_thought) for has_thought in (False, True)]
        except ValueError:  # a template without tools; `bridge` names it
            return None
        return next((tail for tail in tails if tail is not None), None)

    def _distinguishes(self, role: str) -> bool:
        """Return whether the template writes the first message of ``role`` after a turn of the model in another way
        than later ones (DeepSeek's)."""
        messages = [{"role": role, "content": CONTENT}]
        first, later = (self._tail(messages, is_repeated=is_repeated) for is_repeated in (False, True))
        return first is not None and later is not None and first != later

    def _tail(
        self,
        messages: Sequence[Message],
        *,
        has_thought: bool = False,
        is_repeated: bool = False,
        begins: Sequence[Message] = (ASKED,),
    ) -> str | None:
        """Return what the template writes behind a turn of the model, from its end to the next header; None if it does
        not leave the turn, and those before it, as they are.
        ``is_repeated``: the same messages followed an earlier turn, too; ``begins``: the first messages."""
        thought = f"<think>\n{THOUGHT}\n{THOUGHT_END}\n\n" if has_thought else ""
        turn = {"role": "assistant", "content": thought + MARK}
        before = [*begins, turn, *messages] if is_repeated else begins
        head = self._template.render_chat(before)
        whole = self._template.render_chat([*before, turn, *messages])
        written = (TURN_WITH_THOUGHT if has_thought else TURN).match(whole[len(head) :].lstrip())
        if not whole.startswith(head) or written is None:
            return None
        return whole[len(head) :].lstrip()[written.end() :]

    def _ids(self, text: str) -> list[int]:
        return self._template.tokenize([text])[0]

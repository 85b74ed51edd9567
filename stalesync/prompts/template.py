"""Render prompts by the chat template of a tokenizer and tokenize them, and find how the template frames a response.

    header         prefill          response           turn end
    <|im_start|>…  <think>\\n        (the model's)       <|im_end|>
    └── generation prompt ──┘

Invariants (tests/stalesync/prompts/test_template.py): a prompt's tokens are those of its rendered text, and never end
with a token that only the tokenizer appended; `prefill` is the end of what is rendered, or empty."""

import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import takewhile
from typing import Any

from stalesync.prompts.chats import with_texts
from stalesync.prompts.config import DataConfig

Chat = list[dict[str, Any]]
OWN_VARIABLES = {"messages", "add_generation_prompt", "tools", "documents", "bos_token", "eos_token"}
"""Variables of a template that `data.chat_template_kwargs` cannot set"""
MOST_CPU_S, MOST_CHARACTERS = 0.5, 1 << 24
"""What a template may take, and write, for one prompt"""
MARK = "mark7"
"""The response of the chat that is rendered to find the end of a turn"""
THOUGHT = re.compile(r"<(?:think|thinking|thought|reasoning)>|◁think▷")
"""Tags that open a response"""


class EndlessTemplate(ValueError):
    """A template that takes too long, or writes too much, for one prompt: no row is rendered by it any more."""

    def __init__(self, what: str) -> None:
        super().__init__(f"model.path: the chat template (chat_template of the tokenizer) {what}")


class _CpuLimitReached(BaseException):
    """End a template at its limit of CPU time: no template and no library catches the base class."""


@contextmanager
def _cpu_limit(seconds: float) -> Iterator[None]:
    """Raise `_CpuLimitReached` in the block after ``seconds`` of this process's CPU time; only in the main thread,
    which alone receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _CpuLimitReached

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class ChatTemplate:
    """The template of ``tokenizer`` with the settings of ``config``. ``applies``: whether prompts are rendered by it;
    else they are read as they are; ``prefill``: text at the end of the generation prompt that belongs to the response;
    "" if there is none; ``turn_end``: the special token with which it closes the assistant's turn; None if there is
    none; ``appended``: tokens that the tokenizer appends to a text, which are removed from prompts without a template.
    Raise ValueError if `data.system_prompt` or a name of `data.chat_template_kwargs` is not read by the template."""

    def __init__(self, config: DataConfig, tokenizer: Any) -> None:
        self._tokenizer, self._system, self._kwargs = tokenizer, config.system_prompt, config.chat_template_kwargs or {}
        self.applies = config.chat_template == "auto" and bool(getattr(tokenizer, "chat_template", None))
        self.prefill, self.turn_end = "", None
        self.appended = () if self.applies else self._appended_tokens()
        if self.applies:
            self._check_names()
            self._read_frame()
        elif self._system or self._kwargs:
            key = "system_prompt" if self._system else "chat_template_kwargs"
            raise ValueError(f"data.{key} needs a tokenizer with a chat template, and data.chat_template=auto")

    def render(self, prompt: str | Chat) -> str:
        """Return the text of a prompt as the model reads it; raise ValueError if the template refuses it, or there is
        none for a chat."""
        if not self.applies:
            if isinstance(prompt, str):
                return prompt
            raise ValueError(
                "the prompt is a chat, which needs a tokenizer with a chat template, and data.chat_template=auto"
            )
        return self.render_chat([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)

    def render_chat(
        self,
        chat: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        add_generation_prompt: bool = True,
    ) -> str:
        """Return the text of a conversation, and of JSON schemas of tools; raise ValueError if there is no template, or
        it refuses them."""
        if not self.applies:
            raise ValueError("a conversation needs a tokenizer with a chat template, and data.chat_template=auto")
        if self._system and chat[0].get("role") not in ("system", "developer"):
            chat = [{"role": "system", "content": self._system}, *chat]
        if any(message.get("tool_calls") for message in chat) and self._reads_arguments_as_texts:
            chat = with_texts(chat)
        return self._rendered(chat, tools, add_generation_prompt)

    @cached_property
    def _reads_arguments_as_texts(self) -> bool:
        """Whether the template writes the arguments of calls as they are (DeepSeek's), so that they must be JSON."""
        call = {"type": "function", "function": {"name": "a", "arguments": {"b": "c"}}}
        said = {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return "{'b': 'c'}" in self._rendered([{"role": "user", "content": "a"}, said], (), False)
        except EndlessTemplate:
            raise
        except ValueError:
            return True

    def _rendered(
        self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], add_generation_prompt: bool
    ) -> str:
        try:
            with _cpu_limit(MOST_CPU_S):
                text = self._tokenizer.apply_chat_template(
                    [*chat],
                    tools=[*tools] or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **self._kwargs,
                )
        except _CpuLimitReached:
            raise EndlessTemplate(f"takes more than {MOST_CPU_S} s of processor time for one prompt") from None
        except Exception as error:  # whatever the template's code raises
            raise ValueError(f"the chat template refuses the prompt: {error}") from error
        if len(text) > MOST_CHARACTERS:
            raise EndlessTemplate(f"writes {len(text):,} characters for one prompt, more than {MOST_CHARACTERS:,}")
        return text

    def tokenize(self, texts: list[str]) -> list[list[int]]:
        """Return the tokens of rendered prompts. Raise ValueError if the tokenizer refuses one."""
        try:  # a template writes the special tokens itself
            encoded = self._tokenizer(texts, add_special_tokens=not self.applies)["input_ids"]
        except Exception as error:  # the tokenizers library raises plain `Exception`
            raise ValueError(f"the tokenizer refuses the prompt: {error}") from error
        return [ids[: len(ids) - len(self.appended)] for ids in encoded] if self.appended else encoded

    def prefill_of(self, text: str) -> str:
        """Return the part of a rendered prompt that belongs to the response."""
        return self.prefill if text.endswith(self.prefill) else ""

    def describe(self, end_token_ids: tuple[int, ...]) -> list[str]:
        """Return what its user may not expect, a line each; ``end_token_ids``: the ends without the template's."""
        name, lines = self._tokenizer.convert_ids_to_tokens, []
        if self.appended:
            lines.append(f"the tokenizer appends {' '.join(map(name, self.appended))} to a text: removed from prompts")
        if self.prefill:
            lines.append(
                f"the chat template begins every response with {self.prefill!r}: terms of reward=format see it before "
                "the response, and your own reward as its argument `prefill`"
            )
        if self.turn_end is not None and self.turn_end not in end_token_ids:
            others = ", ".join(map(name, end_token_ids)) or "nothing"
            lines.append(f"the chat template ends a turn with {name(self.turn_end)}, the model with {others}: all end")
        return lines

    def _check_names(self) -> None:
        if not self._kwargs:
            return
        from jinja2 import meta
        from transformers.utils.chat_template_utils import _compile_jinja_template

        source = self._tokenizer.get_chat_template()
        environment = _compile_jinja_template(source).environment
        read = meta.find_undeclared_variables(environment.parse(source))
        accepted = read - environment.globals.keys() - OWN_VARIABLES
        if unknown := sorted(self._kwargs.keys() - accepted):
            raise ValueError(
                f"data.chat_template_kwargs: the chat template does not read {unknown[0]!r}; it reads "
                f"{', '.join(sorted(accepted)) or 'no such name'}"
            )

    def _read_frame(self) -> None:
        user = [{"role": "user", "content": "a"}]
        try:
            prompt, asked = self.render_chat(user), self.render_chat(user, add_generation_prompt=False)
            answered = self.render_chat([*user, {"role": "assistant", "content": MARK}], add_generation_prompt=False)
        except EndlessTemplate:
            raise
        except ValueError:  # the check of the rows names what a template refuses
            return
        if self._system and self._system.strip() not in prompt:
            raise ValueError("data.system_prompt: the chat template leaves out the message of the role system")
        head, mark, tail = answered.rpartition(MARK)
        if not mark:
            return
        opened = prompt[len(asked) :] if prompt.startswith(asked) else ""
        header = head[len(asked) :] if head.startswith(asked) else ""
        thought = THOUGHT.search(opened)
        # A response follows its header directly, unless the template puts an empty thought before it.
        start = len(header) if header and opened.startswith(header) else len(opened)
        self.prefill = opened[min(start, thought.start() if thought else start) :]
        end = max((token for token in self._special_tokens() if tail.lstrip().startswith(token)), key=len, default=None)
        self.turn_end = None if end is None else self._tokenizer.convert_tokens_to_ids(end)

    def _special_tokens(self) -> set[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        return {*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)}

    def _appended_tokens(self) -> tuple[int, ...]:
        """Return the tokens that the tokenizer puts behind every text: its end token, or a separator."""
        ids, whole = (self._tokenizer("1", add_special_tokens=add)["input_ids"] for add in (False, True))
        if not ids or ids[-1] not in whole:
            return ()
        return tuple(takewhile(lambda id: id != ids[-1], reversed(whole)))[::-1]

"""Decide what an engine sends to the text store of its run, and what it asks for. Pure.

    note ─► changed texts ─ take ─► pieces, cursors of prompts with running requests ─► store
    apply ◄─ pieces of others ◄─ observe ◄─ reply ◄─────────────────────────────────────┘

One message is under way at a time; nothing follows one that is not answered (`exchange`).

Invariant (property-tested): after a message that is answered, the store has every text that was noted before it, as far
as it has not dropped it; a writer whose piece does not join what the store has sends from there next time."""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fusion.rollout.drafts.pieces import TextPiece

MAX_SENT_TOKENS = 1 << 18
"""Maximum of a message; what is left follows with the next"""


class TextMessage(NamedTuple):
    """``cursors``: by prompt that is asked for."""

    pieces: list[TextPiece]
    cursors: dict[bytes, int]

    def __bool__(self) -> bool:
        return bool(self.pieces or self.cursors)


@dataclass
class _SentText:
    """A response that grows. ``stored``: the number of tokens that the store has, as far as is known."""

    prompt: bytes
    group: str
    tokens: "array[int]"
    stored: int


class TextClient:
    """One writer's view of the store. ``sent_tokens``: since construction."""

    def __init__(self) -> None:
        self._changed: dict[str, _SentText] = {}
        """Requests with tokens that the store has not, as far as is known"""
        self._stored: dict[bytes, dict[str, _SentText]] = {}
        """Other requests of this engine, by prompt"""
        self._sent: dict[str, tuple[_SentText, int]] = {}
        """Texts of the message under way by request, each with the length of it that was sent"""
        self._asked: set[bytes] = set()
        """Prompts that the message under way asks for"""
        self._cursors: dict[bytes, int] = {}
        self.sent_tokens = 0

    def note(self, prompt: bytes, group: str, request: str, tokens: "array[int]", known: int) -> None:
        """Record that a response has grown. ``tokens``: the whole response, which the caller extends further;
        ``known``: tokens with which the request came, which another engine has sent."""
        text = self._changed.get(request)
        if text is not None and text.tokens is tokens:
            return
        text = self._stored.get(prompt, {}).pop(request, None)
        if text is None or text.tokens is not tokens:
            text = _SentText(prompt, group, tokens, stored=known)
        text.stored = max(text.stored, known)
        self._changed[request] = text

    def end_group(self, prompt: bytes) -> None:
        """Record that the responses to a prompt so far are complete."""
        self._stored.pop(prompt, None)

    def forget(self, prompt: bytes) -> None:
        """Record that the index of a prompt was dropped: the text of others is asked for from the beginning."""
        self.end_group(prompt)
        self._cursors.pop(prompt, None)
        self._asked.discard(prompt)

    def is_new(self, prompts: Iterable[bytes]) -> bool:
        """Whether one of these prompts has never been asked for."""
        return not self._cursors.keys() >= {*prompts}

    def take(self, running: Iterable[bytes]) -> TextMessage:
        """Return the next message. ``running``: the prompts with running requests."""
        assert not self._sent, "one message is under way at a time"
        pieces: list[TextPiece] = []
        left = MAX_SENT_TOKENS
        for request, text in self._changed.items():
            if left <= 0:
                break
            new = text.tokens[text.stored : text.stored + left]
            left -= len(new)
            pieces.append(TextPiece(text.prompt, text.group, request, text.stored, new))
            self._sent[request] = text, text.stored + len(new)
        self.sent_tokens += MAX_SENT_TOKENS - left
        self._asked = {*running}
        return TextMessage(pieces, {prompt: self._cursors.get(prompt, 0) for prompt in self._asked})

    def observe(self, cursors: Mapping[bytes, int], behind: Mapping[str, int]) -> None:
        """Record the reply to the message under way."""
        self._cursors.update((prompt, cursor) for prompt, cursor in cursors.items() if prompt in self._asked)
        for request, (text, length) in self._sent.items():
            text.stored = behind.get(request, length)
            if text.stored == len(text.tokens) and self._changed.get(request) is text:
                self._stored.setdefault(text.prompt, {})[request] = self._changed.pop(request)
        self._sent = {}

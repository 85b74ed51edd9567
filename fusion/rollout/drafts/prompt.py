"""The text that a drafter has of one prompt."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass
class Prompt:
    """``groups``: whose responses are the siblings, several if one was begun before the others had ended; ``live``: the
    requests that run here; ``numbers``: request → sequence in the index; ``texts``: request → its response so far, here
    or on another engine; ``history``: what is in the index of earlier groups, the last one first; ``past``: group →
    request → text, of other groups on other engines."""

    key: bytes
    version: int
    """Policy when a request began"""
    index: int
    history: list[list[array[int]]]
    groups: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)
    texts: dict[str, array[int]] = field(default_factory=dict)
    past: dict[str, dict[str, array[int]]] = field(default_factory=dict)
    unchecked: int = 0
    """Tokens added since the bytes of its text were counted"""

    @property
    def num_tokens(self) -> int:
        """Tokens of texts and history, which are held besides the index."""
        past = [text for texts in self.past.values() for text in texts.values()]
        return sum(map(len, (*self.texts.values(), *(text for texts in self.history for text in texts), *past)))

    def join(self, group: str) -> None:
        """Counts a group's responses as siblings."""
        self.groups.add(group)
        self.texts |= self.past.pop(group, {})

    def next_history(self, max_groups: int, group: str = "") -> list[list[array[int]]]:
        """Returns what a group that begins now has as its history, of at most ``max_groups`` groups, the last one
        first: those that said anything; ``group``: the one that begins, of which other engines may have said
        something."""
        past = [text for name, texts in self.past.items() if name != group for text in texts.values()]
        own = [text for text in self.texts.values() if text]
        last, *older = self.history or [[]]
        earlier = [last + past, *older]
        return [texts for texts in ([own, *earlier] if own else earlier) if texts][:max_groups]

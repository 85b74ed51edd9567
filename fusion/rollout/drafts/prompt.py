"""The text that a drafter has of one prompt."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

from fusion.inference.request import LastRewards
from fusion.rollout.drafts.rewards import reward_by_request


class PastResponse(NamedTuple):
    """A response of an earlier group. ``reward``: None: not known, or the response has none."""

    request: str
    tokens: array[int]
    reward: float | None = None


History = list[list[PastResponse]]
"""Responses by group, those of the last one first"""


@dataclass
class PromptText:
    """``groups``: whose responses are the siblings, several if one was begun before the others had ended; ``live``: the
    requests that run here; ``numbers``: request → sequence in the index; ``texts``: request → its response so far, here
    or on another engine; ``history``: responses of earlier groups; ``past``: group → request → text, of other groups
    on other engines."""

    key: bytes
    version: int
    """Policy when a request began"""
    tokens: array[int]
    """What is indexed of the prompt itself; empty when the index exists"""
    history: History
    restored: bool = False
    """Whether the history is that of a checkpoint, whose phrases are not counted yet"""
    index: int | None = None
    """None: nothing was looked up since the group began"""
    groups: set[str] = field(default_factory=set)
    live: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)
    texts: dict[str, array[int]] = field(default_factory=dict)
    past: dict[str, dict[str, array[int]]] = field(default_factory=dict)
    indexed: dict[str, int] = field(default_factory=dict)
    """Request → tokens of its text that are in the index"""
    stale: dict[str, None] = field(default_factory=dict)
    """Requests whose text has more, in order"""
    unchecked: int = 0
    """Tokens added since the bytes of its text were counted"""

    @property
    def num_tokens(self) -> int:
        """Tokens of texts and history, which are held besides the index."""
        past = [text for texts in self.past.values() for text in texts.values()]
        history = [text.tokens for texts in self.history for text in texts]
        return sum(map(len, (self.tokens, *self.texts.values(), *history, *past)))

    def join(self, group: str) -> None:
        """Count a group's responses as siblings."""
        self.groups.add(group)
        self.texts |= self.past.pop(group, {})

    def text_of(self, request: str) -> tuple[array[int], bool]:
        """Return the text of a request, and whether it is a sibling's."""
        text = self.texts.get(request)
        if text is not None:
            return text, True
        return next(texts[request] for texts in self.past.values() if request in texts), False

    def next_history(self, max_groups: int, group: str = "") -> History:
        """Return what a group that begins now has as its history, of at most ``max_groups`` groups, the last one
        first: those that have text; ``group``: the one that begins, of which other engines may have text."""
        past = [PastResponse(*item) for name, texts in self.past.items() if name != group for item in texts.items()]
        own = [PastResponse(*item) for item in self.texts.items() if item[1]]
        last, *older = self.history or [[]]
        earlier = [last + past, *older]
        return [texts for texts in ([own, *earlier] if own else earlier) if texts][:max_groups]


def rewarded(history: History, last: LastRewards) -> History:
    """Return a history in which the responses of the last group have their rewards, as far as they are known."""
    if not last[1]:
        return history
    known = reward_by_request(last)
    return [[text._replace(reward=known.get(text.request, text.reward)) for text in texts] for texts in history]

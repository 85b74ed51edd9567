"""Find where a response's text contains a stop string, token by token. Pure, given a function that decodes tokens.

Only the last tokens are decoded: as many as could spell the longest stop string. A token that cannot end any stop
string is recognised by its own text, which is decoded once."""

from collections.abc import Callable, Sequence

MARGIN = 8
"""Tokens decoded before the longest stop string, as decoders treat the first of a text in its own way."""

BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder writes for an incomplete character."""


class StopStrings:
    """Hold stop strings (at least one, none empty). ``decode``: text of some tokens, special tokens included.

    Invariant: if `completes` was False for all shorter responses, it is True exactly where the text of the whole
    response contains a stop string."""

    def __init__(self, strings: Sequence[str], decode: Callable[[Sequence[int]], str]):
        self._strings, self._decode = tuple(strings), decode
        self._window = max(len(string.encode()) for string in strings) + MARGIN  # a token has at least one byte of text
        # A decoder may remove spaces that are alone, and an incomplete character has no text of its own.
        self._last = {string[-1] for string in strings}
        self._any_token = any(last.isspace() or not last.isascii() for last in self._last)
        self._may_end: dict[int, bool] = {}
        """Whether a token can be the last one of a stop string"""

    def completes(self, tokens: Sequence[int], start: int) -> bool:
        """Return whether the last token of the response ``tokens[start:]`` completes a stop string."""
        if not self._can_end(tokens[-1]):
            return False
        text = self._decode(tokens[max(start, len(tokens) - self._window) :])
        return any(string in text for string in self._strings)

    def _can_end(self, token: int) -> bool:
        if self._any_token:
            return True
        known = self._may_end.get(token)
        if known is None:
            text = self._decode([token])
            known = self._may_end[token] = BROKEN in text or any(last in text for last in self._last)
        return known

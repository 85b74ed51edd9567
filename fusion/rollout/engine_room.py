"""Bound what an engine has: requests, and KV tokens reserved for their next chunks. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import NamedTuple


class EngineRoom(NamedTuple):
    """The bounds of an engine. ``requests``: that it has at most; ``kv_tokens``: of its cache, None: not known yet;
    ``chunk_tokens``: after which a request returns, 0: it does not."""

    requests: int
    kv_tokens: int | None = None
    chunk_tokens: int = 0

    def chunk(self, left: int) -> int:
        """Returns how many of the ``left`` tokens of a response its next chunk may add."""
        return min(left, self.chunk_tokens) if self.chunk_tokens else left

    def left(self, requests: int, kv_tokens: int) -> Vacancy:
        """Returns what an engine can still take. ``requests``, ``kv_tokens``: that it has."""
        free = inf if self.kv_tokens is None else self.kv_tokens - kv_tokens
        return Vacancy(self.requests - requests, free, not requests)


@dataclass(slots=True)
class Vacancy:
    """What an engine can still take. ``kv_tokens``: infinite if unknown; ``empty``: it has no request, and takes
    any."""

    requests: int
    kv_tokens: float
    empty: bool

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Of several engines, the one of the lowest rank has the most room."""
        return (self.requests <= 0, -self.kv_tokens, -self.requests)

    def takes(self, tokens: int) -> bool:
        return self.requests > 0 and (self.empty or tokens <= self.kv_tokens)

    def add(self, tokens: int) -> None:
        self.requests, self.kv_tokens, self.empty = self.requests - 1, self.kv_tokens - tokens, False

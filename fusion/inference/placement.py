"""Choose the attention rank of each new request of an engine. Pure, the same on every rank."""

from collections.abc import Sequence
from typing import Protocol

APART = 32
"""Times a response's maximum must be as long as the prompt for siblings to be placed apart. By simulation: where
prompts are longer, even lengths lose more than others gain, as a rank that computes a prompt stops all others."""


class Placeable(Protocol):
    """The fields of `Request` that its place depends on."""

    @property
    def group(self) -> str: ...

    @property
    def kv_rank(self) -> int | None: ...


def shares_prompt(prompt_tokens: int, max_tokens: int, *, placed_again: bool) -> bool:
    """Return whether a request is placed beside its siblings, with which it shares the prompt's KV. Siblings resemble
    each other in length, and the ranks of an engine step together: where siblings are apart, ranks are done at about
    the same time. That is worth computing a short prompt on several ranks, one of at most 1 / `APART` of
    ``max_tokens``. Requests that are ``placed_again``, after a chunk or turn, even the ranks out without it."""
    return placed_again or APART * prompt_tokens > max_tokens


def place(loads: list[int], requests: Sequence[Placeable], shares: Sequence[bool]) -> list[int]:
    """Return the attention rank of each new request: where its KV is parked, and siblings that share their prompt
    together, as long as the ranks stay balanced. ``loads``: unfinished requests of each attention rank. ``requests``:
    the new ones, in order of arrival. ``shares``: `shares_prompt` of each.

    Requests with parked KV are placed first. A rank takes requests of a group until it has its even share of all
    requests, then the least loaded rank continues. No rank gets a request beyond the even share,
    rounded up, unless it already had more."""
    share = -(-(sum(loads) + len(requests)) // len(loads))
    now, placed = list(loads), [0] * len(requests)
    members: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        home = request.kv_rank
        if home is not None and home < len(now) and now[home] < share:
            placed[index] = home
            now[home] += 1
        else:
            members.setdefault((request.group if shares[index] else "") or f"\0{index}", []).append(index)
    for indices in members.values():
        rank = now.index(min(now))
        for index in indices:
            if now[rank] >= share:
                rank = now.index(min(now))
            placed[index] = rank
            now[rank] += 1
    return placed

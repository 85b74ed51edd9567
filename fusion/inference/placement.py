"""Choose the attention rank of each new request of an engine. Pure, the same on every rank."""

from collections.abc import Iterable
from typing import Protocol


class Placeable(Protocol):
    """The fields of `Request` that its place depends on."""

    @property
    def group(self) -> str: ...

    @property
    def kv_rank(self) -> int | None: ...


def place(loads: list[int], requests: Iterable[Placeable]) -> list[int]:
    """Return the attention rank of each new request: where its KV is parked, and siblings together, as long as the
    ranks stay balanced. ``loads``: unfinished requests of each attention rank. ``requests``: the new ones, in order of
    arrival.

    Requests with parked KV are placed first. A rank takes requests of a group until it has its even share of all
    requests, then the least loaded rank continues. No rank gets a request beyond the even share,
    rounded up, unless it already had more."""
    requests = list(requests)
    share = -(-(sum(loads) + len(requests)) // len(loads))
    now, placed = list(loads), [0] * len(requests)
    members: dict[str, list[int]] = {}
    for index, request in enumerate(requests):
        home = request.kv_rank
        if home is not None and home < len(now) and now[home] < share:
            placed[index] = home
            now[home] += 1
        else:
            members.setdefault(request.group or f"\0{index}", []).append(index)
    for indices in members.values():
        rank = now.index(min(now))
        for index in indices:
            if now[rank] >= share:
                rank = now.index(min(now))
            placed[index] = rank
            now[rank] += 1
    return placed

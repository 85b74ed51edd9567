"""What several cards do together succeeds on all of them or fails on all.

A card that fails by itself tells the others before anybody goes on: nobody waits for it in the next collective, and
nobody serves while another cannot.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class CardFailure(NamedTuple):
    rank: int
    part: str
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank}, {self.part}: {self.reason}"


class BrokenOff(RuntimeError):
    """Raised on every card of the group, with the failures of all of them."""

    def __init__(self, failures: list[CardFailure]):
        super().__init__(failures)
        self.failures = failures

    def __str__(self) -> str:
        return "broken off on all cards, as it failed on " + "; ".join(map(str, self.failures))


def together(group: dist.ProcessGroup | None, rank: int, part: str, work: Callable[[], T]) -> T:
    """Does ``work``, and returns what it does once it is done on every card of the group.

    Raises:
        BrokenOff: on all cards, where it raised on any; ``part`` says what was being done.
    """
    mine: CardFailure | None = None
    cause: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as error:
        cause, mine = error, CardFailure(rank, part, f"{type(error).__name__}: {error}")
    failures = [mine]
    if group is not None:
        failed = torch.tensor([mine is not None])
        dist.all_reduce(failed, dist.ReduceOp.MAX, group=group)
        if not failed:
            return result
        failures = [None] * dist.get_world_size(group)
        dist.all_gather_object(failures, mine, group=group)
    found = [failure for failure in failures if failure is not None]
    if found:
        raise BrokenOff(found) from cause
    return result

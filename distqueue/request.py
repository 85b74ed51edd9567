"""The arguments of `get`, stated once: `GetRequest` holds them with their defaults, documentation and validation.

Every `get` (of `DistQueue` and `LocalQueue`), `stream` and `QueueDataset` take them."""

import asyncio
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, fields
from typing import Any

from distqueue.samples import Selection


@dataclass(frozen=True, kw_only=True)
class GetRequest(Selection):
    """Requests one batch: the arguments of `get`.

    ValueError names the argument that can never be served and what was expected."""

    timeout_s: float | None = None
    """raise TimeoutError, which names the missing columns, after this long; None: wait until the queue is closed"""

    def selection(self) -> Selection:
        """Without the timeout, so that readers of the same samples ask for equal selections."""
        return Selection(**{field.name: getattr(self, field.name) for field in fields(Selection)})


def resolving(
    future: asyncio.Future[Any] | Future[Any], then: Callable[[Any], Any] = lambda value: value
) -> Callable[[Any], None]:
    """Return the callback with which the core answers: it resolves the future, with `then` of a value."""

    def answer(value: Any) -> None:
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(then(value))

    return answer


def await_first(answer: Future[Any], left: Future[None] | None, timeout_s: float | None = None) -> None:
    """Wait for the answer to a request. CancelledError: `left` was done first."""
    wait([answer] if left is None else [answer, left], timeout_s, return_when=FIRST_COMPLETED)
    if left is not None and left.done() and not answer.done():
        raise CancelledError

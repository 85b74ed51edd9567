"""The arguments of `get`, stated once: `GetRequest` holds them with their defaults, documentation and validation.

Every `get` (of `DistQueue`, `LocalQueue` and `hierarchy.GroupReader`), `stream` and `QueueDataset`
takes these arguments; `takes` gives a method the parameters of `GetRequest` and passes it the validated request.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from dataclasses import dataclass, fields
from typing import Any, Concatenate, ParamSpec, TypeVar

from distqueue.samples import Selection

P = ParamSpec("P")
Self = TypeVar("Self")
Request = TypeVar("Request")
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class GetRequest(Selection):
    """Requests one batch: the arguments of `get`.

    ValueError names the argument that can never be served and what was expected.
    """

    timeout_s: float | None = None
    """raise TimeoutError, which names the missing columns, after this long; None: wait until the queue is closed"""

    def selection(self) -> Selection:
        """Without the timeout, so that readers of the same samples ask for equal selections."""
        return Selection(**{field.name: getattr(self, field.name) for field in fields(Selection)})

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for another `get`."""
        return dict(vars(self))


def await_first(answer: Future[Any], left: Future[None] | None, timeout_s: float | None = None) -> None:
    """Wait for the answer to a request. CancelledError: `left` was done first."""
    wait([answer] if left is None else [answer, left], timeout_s, return_when=FIRST_COMPLETED)
    if left is not None and left.done() and not answer.done():
        raise CancelledError


def takes(
    make: Callable[P, Request],
) -> Callable[[Callable[[Self, Request], Result]], Callable[Concatenate[Self, P], Result]]:
    """Give a method the parameters of `make`; the method itself is passed the object they make.

    >>> class Counter:
    ...     @takes(GetRequest)
    ...     def get(self, request: GetRequest) -> int | None:
    ...         return request.count
    >>> Counter().get("train", ["tokens"], count=64)
    64
    """

    def decorate(method: Callable[[Self, Request], Result]) -> Callable[Concatenate[Self, P], Result]:
        @functools.wraps(method)
        def call(self: Self, *args: P.args, **options: P.kwargs) -> Result:
            return method(self, make(*args, **options))

        itself, _ = inspect.signature(method).parameters.values()
        made = inspect.signature(make)
        call.__signature__ = made.replace(  # type: ignore[attr-defined]
            parameters=[itself, *made.parameters.values()],
            return_annotation=inspect.signature(method).return_annotation,
        )
        return call

    return decorate

"""A client's operation as a generator of actor calls, driven by a thread (`run`) or by a coroutine (`run_async`).

    generator ── yields a call ──► made and awaited ── result sent in, error raised ──► generator ── … ──► the result

While an actor is restarting (after it was killed), the call is retried: every call is idempotent.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import ray

from distqueue.core import QueueClosed

log = logging.getLogger(__name__)

RESTART_TIMEOUT_S = 120.0
"""How long a restarting actor is awaited"""

RETRY_S = 0.2
"""Time between two attempts to reach it"""

GONE = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
"""An actor or its node has ended for good …"""

UNAVAILABLE = ray.exceptions.ActorUnavailableError
"""… or, a subclass of the former, it is restarting"""

T = TypeVar("T")
Calls = Generator[Callable[[], Any], Any, T]
"""Yields functions that make an actor call and return its object reference; is sent what the call returns"""


class ActorGone(QueueClosed):
    """An actor that was called has ended for good."""


def run(calls: Calls[T]) -> T:
    """Make the calls one after the other in this thread and return the operation's result."""
    driver = _Driver(calls)
    while driver.call is not None:
        ref = driver.call()
        with driver.answering(ref):
            driver.answer(ray.get(ref))
        if driver.wait_s:
            time.sleep(driver.wait_s)
    return driver.result  # type: ignore[return-value]


async def run_async(calls: Calls[T]) -> T:
    """`run` for a coroutine."""
    driver = _Driver(calls)
    while driver.call is not None:
        ref = driver.call()
        with driver.answering(ref):
            driver.answer(await ref)
        if driver.wait_s:
            await asyncio.sleep(driver.wait_s)
    return driver.result  # type: ignore[return-value]


class _Driver:
    """The state of an operation: `call` is the next one to make, None at the end."""

    def __init__(self, calls: Calls[Any]) -> None:
        self.calls = calls
        self.result: Any = None
        self.wait_s = 0.0
        self.call: Callable[[], Any] | None = None
        self._unavailable_since_s: float | None = None
        self._advance(lambda: next(calls))

    def answer(self, value: Any) -> None:
        self.wait_s, self._unavailable_since_s = 0.0, None
        self._advance(lambda: self.calls.send(value))

    @contextmanager
    def answering(self, ref: Any) -> Iterator[None]:
        """Raise in the generator what the actor raised; cancel the call and the generator if this wait is cancelled."""
        try:
            yield
        except ray.exceptions.RayTaskError as error:
            self._throw(error.cause)
        except UNAVAILABLE as error:
            self._retry(error)
        except GONE:
            self._throw(ActorGone("the queue's actor has ended: closed, killed, or its node lost"))
        except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
            ray.cancel(ref)
            self.calls.close()
            raise

    def _retry(self, error: Exception) -> None:
        """Make the same call again soon: the actor is restarting."""
        now_s = time.monotonic()
        if self._unavailable_since_s is None:
            self._unavailable_since_s = now_s
            log.warning("a process of the queue has died; waiting for it to restart")
        if now_s - self._unavailable_since_s > RESTART_TIMEOUT_S:
            self._throw(ActorGone(f"a process of the queue did not restart within {RESTART_TIMEOUT_S:.0f} s: {error}"))
        self.wait_s = RETRY_S

    def _throw(self, error: BaseException) -> None:
        self.wait_s = 0.0
        self._advance(lambda: self.calls.throw(error))

    def _advance(self, step: Callable[[], Callable[[], Any]]) -> None:
        try:
            self.call = step()
        except StopIteration as end:
            self.call, self.result = None, end.value

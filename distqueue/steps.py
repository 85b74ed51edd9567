"""A client's call as steps: each is one call of an actor, and the same steps are driven by threads and by coroutines.

    steps ── yields a call ──► made, awaited ── its result is sent, its error raised ──► steps ── … ──► the result

An actor that is started anew (after it was killed) is awaited, and the same call made again: every call may be repeated
without harm.
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

PATIENCE_S = 120.0
"""An actor that is being started anew is awaited for this long"""

RETRY_S = 0.2
"""… and asked again this often"""

GONE = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
"""An actor has ended for good, or its node has"""

UNAVAILABLE = ray.exceptions.ActorUnavailableError
"""… or, a kind of the former, it is being started anew"""

T = TypeVar("T")
Steps = Generator[Callable[[], Any], Any, T]
"""Yields calls that make an object reference each, is sent what they return"""


class ActorGone(QueueClosed):
    """An actor that was called has ended for good."""


def run(steps: Steps[T]) -> T:
    driver = _Driver(steps)
    while driver.call is not None:
        ref = driver.call()
        with driver.answering(ref):
            driver.answer(ray.get(ref))
        time.sleep(driver.wait_s)
    return driver.result  # type: ignore[return-value]


async def run_async(steps: Steps[T]) -> T:
    driver = _Driver(steps)
    while driver.call is not None:
        ref = driver.call()
        with driver.answering(ref):
            driver.answer(await ref)
        await asyncio.sleep(driver.wait_s)
    return driver.result  # type: ignore[return-value]


class _Driver:
    """Where the steps of a call stand: `call` is the next one to make, None at the end."""

    def __init__(self, steps: Steps[Any]) -> None:
        self.steps, self.result, self.wait_s = steps, None, 0.0
        self.call: Callable[[], Any] | None = None
        self._unavailable_s: float | None = None
        self._go_on(lambda: next(steps))

    def answer(self, value: Any) -> None:
        self.wait_s, self._unavailable_s = 0.0, None
        self._go_on(lambda: self.steps.send(value))

    @contextmanager
    def answering(self, ref: Any) -> Iterator[None]:
        """What an actor raised is raised in the steps; a wait that is broken off here ends there, too."""
        try:
            yield
        except ray.exceptions.RayTaskError as error:
            self._throw(error.cause)
        except UNAVAILABLE as error:
            self._come_again(error)
        except GONE:
            self._throw(ActorGone("the queue's actor is gone: closed, killed, or its node lost"))
        except (KeyboardInterrupt, asyncio.CancelledError, GeneratorExit):
            ray.cancel(ref)
            self.steps.close()
            raise

    def _come_again(self, error: Exception) -> None:
        """The actor is being started anew: the same call once more, soon."""
        now_s = time.monotonic()
        if self._unavailable_s is None:
            self._unavailable_s = now_s
            log.warning("a process of the queue has died; waiting for it to be started anew")
        if now_s - self._unavailable_s > PATIENCE_S:
            self._throw(ActorGone(f"a process of the queue has not come back in {PATIENCE_S:.0f} s: {error}"))
        self.wait_s = RETRY_S

    def _throw(self, error: BaseException) -> None:
        self.wait_s = 0.0
        self._go_on(lambda: self.steps.throw(error))

    def _go_on(self, advance: Callable[[], Callable[[], Any]]) -> None:
        try:
            self.call = advance()
        except StopIteration as end:
            self.call, self.result = None, end.value

"""Calls of the queue's actors: made, awaited, and repeated while an actor is restarting (after it was killed).

A call may be repeated because every call is idempotent."""

import logging
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import ray

from distqueue.errors import QueueClosed
from distqueue.request import await_first

log = logging.getLogger(__name__)

RESTART_TIMEOUT_S = 120.0
"""How long a restarting actor is awaited"""
RETRY_S = 0.2
"""Time between two attempts to reach it"""
GONE = (ray.exceptions.RayActorError, ray.exceptions.ActorUnschedulableError)
"""An actor or its node has ended for good …"""
UNAVAILABLE = ray.exceptions.ActorUnavailableError
"""… or, a subclass of the former, it is restarting"""


class ActorGone(QueueClosed):
    """An actor that was called has ended for good."""


def call(make: Callable[[], Any], left: futures.Future[None] | None = None) -> Any:
    """Make an actor call, which `make` returns the reference of, and return its result or raise its error.

    Raise CancelledError: `left` was done first; the call is cancelled."""
    unavailable_since_s: float | None = None
    while True:
        ref = make()
        try:
            if left is not None:
                await_first(ref.future(), left)
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except UNAVAILABLE as error:
            now_s = time.monotonic()
            if unavailable_since_s is None:
                unavailable_since_s = now_s
                log.warning("a process of the queue has died; waiting for it to restart")
            if now_s - unavailable_since_s > RESTART_TIMEOUT_S:
                raise ActorGone(
                    f"a process of the queue did not restart within {RESTART_TIMEOUT_S:.0f} s: {error}"
                ) from None
            time.sleep(RETRY_S)
        except GONE:
            raise ActorGone("the queue's actor has ended: closed, killed, or its node lost") from None
        except (KeyboardInterrupt, futures.CancelledError):
            ray.cancel(ref)
            raise

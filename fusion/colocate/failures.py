"""Send the failure of a stage from a worker to the controller as typed plain data.

A worker's exception may have any type, may not be picklable, and may not name a rank. At the end of a stage it is
converted to a `StageFailed`: rank, stage, kind, message, trace. The controller separates root causes from consequences
by the kind."""

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from typing import Any, TypeVar

from distqueue import QueueClosed
from fusion.npu.failures import AbortedOnAllRanks, FailureKind, RankFailure, kind_of

log = logging.getLogger(__name__)
C = TypeVar("C", bound=type)


class StageFailed(RuntimeError):
    """Raised in place of a stage's exception; ``trace`` is the worker's traceback."""

    def __init__(self, failure: RankFailure, trace: str):
        super().__init__(failure, trace)
        self.failure, self.trace = failure, trace

    @classmethod
    def of(cls, error: Exception, *, rank: int, stage: str) -> "StageFailed":
        held = dict(getattr(error, "bytes_by_owner", {}))
        failure = RankFailure.of(error, rank=rank, stage=stage)
        failure = replace(failure, kind=stage_kind(error, rank), bytes_by_owner=held)
        return cls(failure, "".join(traceback.format_exception(error)).strip())

    def __str__(self) -> str:
        return f"{self.failure}\n{self.trace}"


def stage_kind(error: Exception, rank: int) -> FailureKind:
    """Classify the exception of a stage on a rank: an abort on all ranks is this rank's failure if it is among those
    that failed, else a consequence of another rank's failure."""
    if isinstance(error, QueueClosed):
        return FailureKind.QUEUE_CLOSED
    if isinstance(error, AbortedOnAllRanks):
        own = error.failure_of(rank)
        return own.kind if own else FailureKind.PEER_FAILED
    return kind_of(error)


def ships_failures(*stages: str) -> Callable[[C], C]:
    """Make these methods of a worker class raise `StageFailed` for any exception, and log their begin and failure."""

    def decorate(worker: C) -> C:
        for stage in stages:
            setattr(worker, stage, _shipped(getattr(worker, stage), stage))
        return worker

    return decorate


def _shipped(method: Callable[..., Any], stage: str) -> Callable[..., Any]:
    @wraps(method)
    def shipped(self: Any, *args: Any, **kwargs: Any) -> Any:
        log.info("stage %s", stage)
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            log.error("stage %s failed", stage, exc_info=True)
            raise StageFailed.of(error, rank=self.rank, stage=stage) from None

    return shipped

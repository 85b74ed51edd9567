"""The calls of a stage on several cards, what is still missing of their results, and their failures."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import ray

from fusion.model import Parallel
from fusion.telemetry import wall_ns
from stalesync.cards.card import Card
from stalesync.process.failures import FailedStage, is_consequence
from stalesync.process.hosts import Host, describe_ranks

GATHER_FAILURES_S = 1.5
"""Time to wait for other cards' failures after the first: the card that caused it is not always the first to report."""
GATHER_CAUSE_S = 15.0
"""Time to wait for the cause where only consequences are reported: other ranks notice the end of a host before Ray."""
BESIDE = frozenset({"receive", "save", "save_drafts"})
"""Stages that a card runs beside others; it runs the rest one after the other, in the order in which they are begun."""
Params = ParamSpec("Params")
Result = TypeVar("Result")


class EnginesLost(Exception):
    """A stage has no results: cards of it have died, and their engines are replaced (`Cards.take_dead`)."""


class StageCall(NamedTuple, Generic[Result]):
    """One card's call of a stage: the name of the worker's method, and its arguments."""

    stage: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def stage_call(
    stage: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
) -> StageCall[Result]:
    """Bind arguments to a stage, for `Cards.call_each`."""
    return StageCall(stage.__name__, args, kwargs)


def calls_of_replicas(
    layout: Parallel, ranks: Sequence[int], calls: Sequence[StageCall[Result]]
) -> dict[int, StageCall[Result]]:
    """Return the calls by rank of a stage that replicas compute with different samples. ``layout``: of the mesh that
    ``ranks`` form, in its order; ``calls``: by replica of that mesh."""
    return {rank: calls[layout.coordinate("replica", place)] for place, rank in enumerate(ranks)}


@dataclass
class RunningStage(Generic[Result]):
    """A stage in progress on some cards. ``pending``: Ray's references → rank; ``results``: by rank, of the others."""

    stage: str
    ranks: tuple[int, ...]
    pending: dict[Any, int]
    results: dict[int, Result] = field(default_factory=dict)
    reported_until_ns: int = field(default_factory=wall_ns)
    """End of the reported work: the beginning of the stage, until an interim report"""
    begun_s: float = field(default_factory=time.monotonic)
    thread: int = field(default_factory=threading.get_ident)
    """The thread that takes its results"""
    died: bool = False
    """Whether its cards have died, and are replaced: it has no results"""


class Reported(NamedTuple):
    """A failure, and the stage in which a card has reported it."""

    failed: FailedStage
    stage: RunningStage[Any]


def gather_failures(first: FailedStage, running: Sequence[RunningStage[Any]]) -> list[FailedStage]:
    """Return the failures of the stages in progress, among them their root cause if it is reported in time; ``first``
    was reported first, in ``running[0]``. Of one card's stages only the first counts."""
    pending = {ref: (rank, stage) for stage in running for ref, rank in stage.pending.items()}
    reported = [Reported(first, running[0]), *_failures_of(pending, GATHER_FAILURES_S)]
    if all(map(is_consequence, first_of_each_card(reported))):
        for failure in _failures_of(pending, GATHER_CAUSE_S):
            reported.append(failure)
            if not all(map(is_consequence, first_of_each_card(reported))):
                break
    return first_of_each_card(reported)


def gather_causes(call: FailedStage, running: Sequence[RunningStage[Any]]) -> list[FailedStage]:
    """Return the failures of stages in progress of which that of a control call may be a consequence: what ends a card
    ends its stage, which is to be named. If none fails within `GATHER_FAILURES_S`, the control call's."""
    pending = {ref: (rank, stage) for stage in running for ref, rank in stage.pending.items()}
    failed = first_of_each_card([*_failures_of(pending, GATHER_FAILURES_S)])
    return [failure for failure in failed if not is_consequence(failure)] or [call]


def first_of_each_card(reported: Sequence[Reported]) -> list[FailedStage]:
    """Return the failures without those of stages that were begun behind another failed one on the same card."""
    first_s: dict[int, float] = {}
    for failed, stage in reported:
        if stage.stage not in BESIDE:
            rank = failed.failure.rank
            first_s[rank] = min(stage.begun_s, first_s.get(rank, stage.begun_s))
    return [
        failed for failed, stage in reported if stage.stage in BESIDE or stage.begun_s == first_s[failed.failure.rank]
    ]


def _failures_of(pending: dict[Any, tuple[int, RunningStage[Any]]], timeout_s: float) -> Iterator[Reported]:
    """Yield failures reported within ``timeout_s``. ``pending``: Ray's reference → rank, stage, until reported."""
    deadline = time.monotonic() + timeout_s
    while pending and time.monotonic() < deadline:
        done, _ = ray.wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        for ref in done:
            rank, stage = pending.pop(ref)
            try:
                ray.get(ref)
            except Exception as error:
                yield Reported(FailedStage.of(error, rank=rank, stage=stage.stage), stage)


def describe_hanging(ranks: Sequence[int], hosts: Sequence[Host] = ()) -> str:
    """Return the part of an error message that names the ranks that did not answer a status call, with their hosts if
    there are several; "" if all did."""
    if not ranks:
        return ""
    hang = "it hangs" if len(ranks) == 1 else "they hang"
    return f"; {describe_ranks(ranks, hosts)} did not answer a status call: {hang}"

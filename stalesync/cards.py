"""Run the workers as Ray actors, one per card, and call their stages.

    cards.on(ranks).call(Worker.train, minibatches, version=7)       on several cards at once: results by rank
    cards.on(ranks).begin(Worker.generate, []) … cards.wait(stage)   other cards may run other stages at the same time
    cards.call_each({0: stage_call(Worker.answer, requests), …})     different arguments for each rank
    cards.on([rank]).ask(Worker.status)                              a control call: answered while a stage runs

A stage is passed as the method of `Worker` itself, so that a type checker checks its arguments and results. Every hang
and every failure is reported: a card that raises or dies ends the stage, and the error names its rank and the stage;
the other cards, which may wait for it in a collective, are ended with it. If a stage exceeds its timeout, the cards
that do not answer a control call are named, whichever stage they run. A failing health check (`health_checks`) also
ends the wait.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

import ray

from distqueue import DistQueue
from fusion.colocate import Worker, WorkerSpec
from fusion.npu.config import claim
from fusion.telemetry import wall_ns
from stalesync.card import Card
from stalesync.failures import CardFailed, FailedStage, root_cause
from stalesync.placing import check_cards, order_by_place

log = logging.getLogger(__name__)

WARN_EVERY_S = 30.0
"""Interval at which a stage that is still running is reported."""

POLL_S = 0.2
"""Interval at which the callback of `Cards.polling` is called while waiting for a stage."""

CONTROL_TIMEOUT_S = 30.0
"""Timeout of a control call (and at most `cluster.stage_timeout_s`), during any stage of the card."""

STATUS_TIMEOUT_S = 5.0
"""When a stage times out, a card that reports its status within this time is assumed to wait for another card."""

GATHER_FAILURES_S = 1.5
"""Time to wait for failures of other cards after the first one: the card that caused a failure is not always the first
to report."""

Params = ParamSpec("Params")
Result = TypeVar("Result")


@dataclass(frozen=True)
class StageCall(Generic[Result]):
    """One card's call of a stage: the name of the worker's method, and its arguments."""

    stage: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def stage_call(
    stage: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
) -> StageCall[Result]:
    """Binds arguments to a stage, for `Cards.call_each`."""
    return StageCall(stage.__name__, args, kwargs)


@dataclass
class RunningStage(Generic[Result]):
    """A stage in progress on some cards. ``pending``: Ray's references → rank; ``results``: by rank, of the others."""

    stage: str
    ranks: tuple[int, ...]
    pending: dict[Any, int]
    results: dict[int, Result] = field(default_factory=dict)
    reported_until_ns: int = field(default_factory=wall_ns)
    """End of the reported work: the beginning of the stage, until an interim report"""
    thread: int = field(default_factory=threading.get_ident)
    """The thread that takes its results; another one may run other stages on other cards."""


class CardGroup:
    """Some cards of a run (`Cards.on`)."""

    def __init__(self, cards: Cards, ranks: Sequence[int]):
        self._cards, self._ranks = cards, tuple(ranks)

    def call(
        self, stage: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> list[Result]:
        """Runs a stage on these cards at once; returns the results by rank.

        Raises:
            CardFailed: the first card that raised, died or timed out; or one of another stage in progress.
        """
        return self._cards.wait(self.begin(stage, *args, **kwargs))

    def begin(
        self, stage: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> RunningStage[Result]:
        """Starts a stage and returns at once; `Cards.wait` waits for it."""
        call = stage_call(stage, *args, **kwargs)
        return self._cards.begin_each({rank: call for rank in self._ranks})

    def ask(
        self, request: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> list[Result]:
        """Sends a control call to these cards, which answer while a stage runs; returns the answers by rank.

        Raises:
            CardFailed: a card is dead, or does not answer.
        """
        return self._cards.ask_each(self._ranks, stage_call(request, *args, **kwargs))


class Cards:
    """All workers of a run. Use it as a context manager: however the block ends, the workers end with it."""

    def __init__(self, spec: WorkerSpec, queue: DistQueue, timeout_s: float):
        self.world, self.timeout_s = spec.world, timeout_s
        self.health_checks: list[Callable[[], None]] = []
        """Called while waiting; an exception of one ends the run."""
        self._running: list[RunningStage[Any]] = []
        self._poll: Callable[[], None] | None = None
        self._polling_thread = 0
        kind, resources = claim(spec.device.kind, ray.cluster_resources())
        check_cards(kind, spec.world, ray.cluster_resources())
        spec = replace(spec, device=replace(spec.device, kind=kind))
        remote: Any = ray.remote
        actor = remote(concurrency_groups={"control": 2, "weights": 1, "save": 1}, **resources)(Card)
        self._actors = [actor.remote(spec, queue) for _ in range(spec.world)]
        try:
            order = order_by_place(self.on().call(Card.place))
            self._actors = [self._actors[index] for index in order]
            self.call_each({rank: stage_call(Card.take_rank, rank) for rank in range(self.world)})
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> list[str]:
        """Joins the workers in one process group and loads the model; returns a description of each card."""
        return self.on().call(Worker.prepare, self.on([0]).call(Worker.rendezvous)[0])

    def on(self, ranks: Sequence[int] | None = None) -> CardGroup:
        """Selects cards by rank (None: all of them)."""
        return CardGroup(self, range(self.world) if ranks is None else ranks)

    def call_each(self, calls: Mapping[int, StageCall[Result]]) -> list[Result]:
        """Runs one stage on several cards at once, each with its own arguments (by rank); returns the results in the
        same order.

        Raises:
            CardFailed: as `CardGroup.call`.
        """
        return self.wait(self.begin_each(calls))

    def begin_each(self, calls: Mapping[int, StageCall[Result]]) -> RunningStage[Result]:
        """Starts what `call_each` runs, and returns at once; `wait` waits for it."""
        (stage,) = {call.stage for call in calls.values()}
        refs = {
            getattr(self._actors[rank], stage).remote(*call.args, **call.kwargs): rank for rank, call in calls.items()
        }
        running: RunningStage[Result] = RunningStage(stage, tuple(calls), refs)
        self._running.append(running)
        return running

    def wait(self, running: RunningStage[Result]) -> list[Result]:
        """Waits for a stage; returns its results in the order of its ranks.

        Raises:
            CardFailed: as `CardGroup.call`.
        """
        start = warned = time.monotonic()
        while running.pending:
            poll = self._poll if self._polling_thread == threading.get_ident() else None
            self.check(POLL_S if poll else 1.0)
            if poll:
                poll()
            now, late = time.monotonic(), sorted(running.pending.values())
            if late and now - start > self.timeout_s:
                raise CardFailed(
                    f"stage {running.stage!r}: ranks {late} were not done after {self.timeout_s:.0f} s "
                    f"(cluster.stage_timeout_s){self.describe_unresponsive()}"
                )
            if late and now - warned > WARN_EVERY_S:
                warned = now
                log.warning("stage %s: waiting for ranks %s, %.0f s", running.stage, late, now - start)
        self._running.remove(running)
        return [running.results[rank] for rank in running.ranks]

    @contextmanager
    def polling(self, poll: Callable[[], None]) -> Iterator[None]:
        """Inside the block, this thread calls ``poll`` every `POLL_S` while it waits for a stage."""
        self._poll, self._polling_thread = poll, threading.get_ident()
        try:
            yield
        finally:
            self._poll, self._polling_thread = None, 0

    def check(self, timeout_s: float = 0.0) -> None:
        """Polls the health checks and collects results of the stages that this thread began, waiting at most
        ``timeout_s`` for the first.

        Raises:
            CardFailed: as `CardGroup.call`; also the exceptions of the health checks.
        """
        for health_check in self.health_checks:
            health_check()
        running = [stage for stage in list(self._running) if stage.thread == threading.get_ident()]
        stage_by_ref = {ref: stage for stage in running for ref in stage.pending}
        if not stage_by_ref:
            return
        done, _ = ray.wait(list(stage_by_ref), timeout=timeout_s)
        for ref in done:
            stage = stage_by_ref[ref]
            try:
                stage.results[stage.pending[ref]] = ray.get(ref)
            except Exception as error:
                self._running.remove(stage)
                self._fail(stage, stage.pending[ref], error)
            del stage.pending[ref]

    @property
    def reported_until_ns(self) -> int:
        """Time up to which the work of all cards has been reported (`wall_ns`)."""
        return min([wall_ns(), *(running.reported_until_ns for running in list(self._running))])

    def ask_each(self, ranks: Sequence[int], request: StageCall[Result]) -> list[Result]:
        """Sends one control call to several cards at once; returns their answers in this order.

        Raises:
            CardFailed: as `CardGroup.ask`.
        """
        timeout_s, name, answers = min(CONTROL_TIMEOUT_S, self.timeout_s), request.stage, list[Result]()
        deadline = time.monotonic() + timeout_s
        refs = [getattr(self._actors[rank], name).remote(*request.args, **request.kwargs) for rank in ranks]
        for rank, ref in zip(ranks, refs, strict=True):
            try:
                answers.append(ray.get(ref, timeout=max(0.0, deadline - time.monotonic())))
            except ray.exceptions.GetTimeoutError:
                raise CardFailed(f"rank {rank} did not answer {name!r} in {timeout_s:.0f} s: it hangs") from None
            except ray.exceptions.RayActorError as error:
                raise FailedStage.of(error, rank=rank, stage=name).error() from None
        return answers

    def describe_unresponsive(self) -> str:
        """Returns the part of an error message that names the ranks that do not answer a control call; "" if all do."""
        rank_by_ref = {actor.status.remote(): rank for rank, actor in enumerate(self._actors)}
        _, unanswered = ray.wait(list(rank_by_ref), num_returns=len(rank_by_ref), timeout=STATUS_TIMEOUT_S)
        names = " and ".join(f"rank {rank}" for rank in sorted(rank_by_ref[ref] for ref in unanswered))
        return f"; {names} did not answer a status call: it hangs" if names else ""

    def close(self) -> None:
        """Ends all workers."""
        for actor in self._actors:
            ray.kill(actor)

    def _fail(self, running: RunningStage[Any], rank: int, error: Exception) -> None:
        """Raises the root cause among the failures of a stage; ``rank`` was the first to report one."""
        failed = [FailedStage.of(error, rank=rank, stage=running.stage)]
        deadline = time.monotonic() + GATHER_FAILURES_S
        left = {ref: other for ref, other in running.pending.items() if other != rank}
        while left and time.monotonic() < deadline:
            done, _ = ray.wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            for ref in done:
                try:
                    ray.get(ref)
                except Exception as error:
                    failed.append(FailedStage.of(error, rank=left[ref], stage=running.stage))
                del left[ref]
        raise root_cause(failed).error() from None

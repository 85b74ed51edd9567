"""Run the workers as Ray actors, one per card, and call their stages.

    cards.on(ranks).call(Worker.switch, "infer", version, share)     on several cards at once: results by rank
    cards.on(ranks).begin(Worker.generate, []) … cards.wait(stage)   other cards may run other stages at the same time
    cards.call_each({0: stage_call(Worker.answer, requests), …})     different arguments for each rank
    cards.on([rank]).ask(Worker.status)                              a control call: answered while a stage runs

A stage is passed as the method of `Worker` itself, so that a type checker checks its arguments and results. Every hang
and every failure is reported: a card that raises or dies ends the stage, and the error names its rank and the stage;
the other cards, which may wait for it in a collective, are ended with it. If a stage exceeds its timeout, the cards
that do not answer a control call are named, whichever stage they run. A control call has the same timeout: a card whose
machine is busy or suspended answers late, which is reported while it lasts and ends nothing. A failing health check
(`health_checks`) also ends the wait.

An engine of cards that only generate can be replaced when one of them dies (`card_failures.py`): its other cards are
ended, waiting for its stage raises `EnginesLost`, `take_dead` reports it, and `restart` starts other processes. If
weights were being sent, waiting for that raises the same, once it has ended on all other cards; what they were to do
behind it is dropped."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Concatenate, cast

import ray

from distqueue import DistQueue
from fusion.colocate import Worker, WorkerSpec
from fusion.colocate.rendezvous import LOOPBACK
from fusion.telemetry import wall_ns
from stalesync.cards.actors import CardActors
from stalesync.cards.card import Card
from stalesync.cards.card_failures import CardFailures
from stalesync.cards.servers import RayPeer
from stalesync.cards.stage_calls import EnginesLost, Params, Result, RunningStage, StageCall, stage_call
from stalesync.policy.engine_deaths import EngineDeaths
from stalesync.policy.patience import Patience
from stalesync.process.failures import FailedStage, is_consequence
from stalesync.process.hosts import Host

log = logging.getLogger(__name__)
WARN_EVERY_S = 30.0
"""Interval at which a stage that is still running, or a control call that is not answered, is reported."""
POLL_S = 0.2
"""Interval at which the callback of `Cards.polling` is called while waiting for a stage."""
WAIT_S = 1.0
"""Interval at which health checks are polled while waiting."""


class CardGroup:
    """Some cards of a run (`Cards.on`)."""

    def __init__(self, cards: "Cards", ranks: Sequence[int]):
        self._cards, self._ranks = cards, tuple(ranks)

    def call(
        self, stage: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> list[Result]:
        """Run a stage on these cards at once; return the results by rank. Raise CardFailed, naming the root cause of
        several failures, if a card raised, died or timed out, in this stage or in another one in progress, QueueFailed
        if the queue has ended, EnginesLost if cards of this stage have died whose engines are replaced."""
        return self._cards.wait(self.begin(stage, *args, **kwargs))

    def begin(
        self, stage: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> RunningStage[Result]:
        """Start a stage and return at once; `Cards.wait` waits for it."""
        call = stage_call(stage, *args, **kwargs)
        return self._cards.begin_each({rank: call for rank in self._ranks})

    def ask(
        self, request: Callable[Concatenate[Card, Params], Result], *args: Params.args, **kwargs: Params.kwargs
    ) -> list[Result]:
        """Send a control call to these cards, which answer while a stage runs; return the answers by rank. Raise
        CardFailed if a card raised, is dead, or does not answer; if its stage has failed, too, that is named."""
        call = stage_call(request, *args, **kwargs)
        return self._cards.ask_each({rank: call for rank in self._ranks})


class Cards:
    """All workers of a run. Use it as a context manager: however the block ends, the workers end with it. What waits
    for a stage raises as `CardGroup.call`, what sends a control call as `CardGroup.ask`. ``timeout_s``: of a stage, and
    of a control call; ``log_of``: the file in which the worker of a rank writes its log; None: Ray's;
    ``health_checks``: from the start of the workers on; ``text_server``: the actor through which engines exchange text
    (`servers.py`), or None; ``max_engine_restarts``: maximum number of engines that are replaced; ``kv_peers``: the
    KV pool of each machine by Ray's id of its node (`servers.py`); None: KV does not travel between machines."""

    def __init__(
        self,
        spec: WorkerSpec,
        queue: DistQueue,
        timeout_s: float,
        log_of: Callable[[int], Path] | None = None,
        health_checks: Sequence[Callable[[], None]] = (),
        text_server: Any = None,
        max_engine_restarts: int = 0,
        kv_peers: Mapping[str, RayPeer] | None = None,
    ):
        self.world, self.timeout_s, self.engines = spec.world, timeout_s, spec.engines
        self.health_checks: list[Callable[[], None]] = [*health_checks]
        """Called while waiting; an exception of one ends the run."""
        self._running: list[RunningStage[Any]] = []
        self._sending = threading.Lock()
        """Held while the calls of a stage are sent: stages of two threads reach all cards in the same order"""
        self._poll: Callable[[], None] | None = None
        self._polling_thread = 0
        self._address = ""
        """Address of the first card's rendezvous"""
        self._thread = threading.get_ident()
        """The thread that takes note of the deaths of engines"""
        self._log_of, self._kv_peers = log_of, kv_peers or {}
        self._actors = CardActors(spec, queue, text_server)
        self._failures = CardFailures(
            spec.engines,
            EngineDeaths.of(spec.deployment, spec.engines, max_engine_restarts),
            actors=self._actors,
            running=self._running,
            health_checks=self.health_checks,
        )
        try:
            self._actors.order(self.on().call(Card.place))
            self._assign_ranks(range(self.world))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Cards":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> list[str]:
        """Join the workers in one process group and load the model; return a description of each card."""
        host = self.hosts[0].address if len({*self.hosts}) > 1 else LOOPBACK
        (self._address,) = self.on([0]).call(Worker.rendezvous, host)
        descriptions = self.on().call(Worker.prepare, self._address)
        self._failures.watch()
        return descriptions

    @property
    def hosts(self) -> list[Host]:
        """The host of every rank; none until the workers have started."""
        return self._actors.hosts

    def take_dead(self) -> dict[int, str]:
        """Return the engines that have died since the last call, with how. Their processes have ended."""
        return self._failures.take_dead()

    @property
    def living(self) -> list[int]:
        """Ranks of the cards whose engine, if they have one, has not died or is started again."""
        return [rank for rank in range(self.world) if not self._failures.is_down(rank)]

    def num_starts(self, rank: int) -> int:
        """Number of processes that this card has had."""
        return self._actors.num_starts[rank]

    def restart(self, engine: int, number: int) -> None:
        """Start other processes for an engine that has died, on the same hosts if these live, and prepare them; the
        actor's cards `rejoin` then. May be called on another thread. ``number``: of this restart in the run, from 1."""
        ranks = self.engines[engine]
        self._actors.restart(ranks)
        self._actors.observe_places(ranks, self.on(ranks).call(Card.place))
        self._assign_ranks(ranks)
        self.on(ranks).call(Worker.prepare, self._address, restart=number)
        self._failures.observe_restarted(engine)
        self._failures.watch(ranks)

    def on(self, ranks: Sequence[int] | None = None) -> CardGroup:
        """Select cards by rank (None: all of them)."""
        return CardGroup(self, range(self.world) if ranks is None else ranks)

    def call_each(self, calls: Mapping[int, StageCall[Result]]) -> list[Result]:
        """Run one stage on several cards at once, each with own arguments (by rank); return the results in order."""
        return self.wait(self.begin_each(calls))

    def begin_each(self, calls: Mapping[int, StageCall[Result]]) -> RunningStage[Result]:
        """Start what `call_each` runs, and return at once; `wait` waits for it."""
        (stage,) = {call.stage for call in calls.values()}
        with self._sending:
            rank_by_ref = dict(zip(self._send(calls), calls, strict=True))
            running: RunningStage[Result] = RunningStage(stage, tuple(calls), rank_by_ref)
            self._running.append(running)
        return running

    def wait(self, running: RunningStage[Result]) -> list[Result]:
        """Wait for a stage; return its results in the order of its ranks."""
        return self.wait_all([running])[0]

    def wait_all(self, stages: Sequence[RunningStage[Result]]) -> list[list[Result]]:
        """Wait for stages; return the results of each by its ranks' order. Raise EnginesLost once all have ended."""
        for running in stages:
            self._await_end(running)
        if any(running.died for running in stages):
            raise EnginesLost
        return [[running.results[rank] for rank in running.ranks] for running in stages]

    def _await_end(self, running: RunningStage[Any]) -> None:
        patience = self._patience()
        while running.pending:
            poll = self._poll if self._polling_thread == threading.get_ident() else None
            self.check(POLL_S if poll else WAIT_S)
            if poll:
                poll()
            if late := sorted(running.pending.values()):
                match patience.observe_waiting(time.monotonic()):
                    case "stop":
                        raise self._failures.hang(running.stage, late, self.timeout_s)
                    case "warn":
                        waited_s = time.monotonic() - patience.begun_s
                        log.warning("stage %s: waiting for ranks %s, %.0f s", running.stage, late, waited_s)
        if running in self._running:
            self._running.remove(running)

    @contextmanager
    def polling(self, poll: Callable[[], None]) -> Iterator[None]:
        """Inside the block, this thread calls ``poll`` every `POLL_S` while it waits for a stage."""
        self._poll, self._polling_thread = poll, threading.get_ident()
        try:
            yield
        finally:
            self._poll, self._polling_thread = None, 0

    def check(self, timeout_s: float = 0.0) -> None:
        """Poll the health checks, raising what they do, and collect this thread's results, waiting ``timeout_s``."""
        for health_check in self.health_checks:
            health_check()
        if threading.get_ident() == self._thread:
            for rank, error in self._failures.take_ended():
                self._failures.observe_end(rank, error)
        running = [stage for stage in list(self._running) if stage.thread == threading.get_ident()]
        stage_by_ref = {ref: stage for stage in running for ref in stage.pending}
        if not stage_by_ref:
            return
        done, _ = ray.wait(list(stage_by_ref), timeout=timeout_s)
        for ref in done:
            stage = stage_by_ref[ref]
            rank = stage.pending.pop(ref)
            try:
                stage.results[rank] = ray.get(ref)
            except Exception as error:
                failed = FailedStage.of(error, rank=rank, stage=stage.stage)
                if stage.died and is_consequence(failed):
                    continue
                self._failures.observe(stage, failed)
                return

    @property
    def reported_until_ns(self) -> int:
        """Time up to which the work of all cards has been reported (`wall_ns`)."""
        return min([wall_ns(), *(running.reported_until_ns for running in list(self._running))])

    def ask_each(self, calls: Mapping[int, StageCall[Result]]) -> list[Result]:
        """Send control calls to several cards at once, each with its own arguments (by rank); return the answers in the
        same order, None from a card that has died and is replaced."""
        if not calls:
            return []
        (stage,) = {call.stage for call in calls.values()}
        rank_by_ref = dict(zip(self._send(calls), calls, strict=True))
        answers, patience = dict[int, Result](), self._patience()
        while True:
            done, _ = ray.wait(list(rank_by_ref), num_returns=len(rank_by_ref), timeout=WAIT_S)
            for ref in done:
                rank = rank_by_ref.pop(ref)
                try:
                    answers[rank] = ray.get(ref)
                except Exception as error:
                    self._fail_call(FailedStage.of(error, rank=rank, stage=stage))
                    answers[rank] = cast(Any, None)
            if not rank_by_ref:
                return [answers[rank] for rank in calls]
            self.check()
            late = sorted(rank_by_ref.values())
            match patience.observe_waiting(time.monotonic()):
                case "stop":
                    raise self._failures.silence(stage, late, self.timeout_s)
                case "warn":
                    waited_s = time.monotonic() - patience.begun_s
                    log.warning("%s: ranks %s have not answered for %.0f s, but live", stage, late, waited_s)

    def begin_asking(
        self, call: StageCall[Result], ranks: Sequence[int], on_answer: Callable[[], None]
    ) -> dict[int, Any]:
        """Send a control call that may wait on these cards; return Ray's reference of each answer, by rank.
        ``on_answer``: called at each answer, on another thread."""
        ref_by_rank = dict(zip(ranks, self._send(dict.fromkeys(ranks, call)), strict=True))
        for ref in ref_by_rank.values():
            ref.future().add_done_callback(lambda _: on_answer())
        return ref_by_rank

    def take_answers(self, asked: dict[int, Any], timeout_s: float = 0.0) -> dict[int, Any]:
        """Remove those calls of `begin_asking` that are answered; return the answers by rank. Wait at most
        ``timeout_s`` until all are."""
        if not asked:
            return {}
        done, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s)
        answered = set(done)
        answers = {}
        for rank in [rank for rank, ref in asked.items() if ref in answered]:
            try:
                answers[rank] = ray.get(asked.pop(rank))
            except Exception as error:
                self._fail_call(FailedStage.of(error, rank=rank, stage="await_ended_chunks"))
        return answers

    def find_unresponsive(self) -> list[int]:
        """Return the ranks that do not answer a control call within seconds."""
        return self._failures.find_unresponsive()

    def close(self) -> None:
        self._actors.end()

    def _assign_ranks(self, ranks: Sequence[int]) -> None:
        logs = {rank: None if self._log_of is None else str(self._log_of(rank).resolve()) for rank in ranks}
        known = all(host.node in self._kv_peers for host in self.hosts)  # not a host that has joined the cluster since
        peers: Any = ray.put([self._kv_peers[host.node] for host in self.hosts] if known else [])  # sent once a machine
        self.call_each({rank: stage_call(Card.take_rank, rank, log, peers) for rank, log in logs.items()})

    def _patience(self) -> Patience:
        return Patience(time.monotonic(), limit_s=self.timeout_s, warn_every_s=WARN_EVERY_S)

    def _send(self, calls: Mapping[int, StageCall[Any]]) -> list[Any]:
        """Send calls by rank; return Ray's references in the same order."""
        return [
            getattr(self._actors[rank], call.stage).remote(*call.args, **call.kwargs) for rank, call in calls.items()
        ]

    def _fail_call(self, call: FailedStage) -> None:
        """Raise the failure of a control call, or of the stage that caused it, unless the engine is replaced."""
        if self._failures.is_replaced(call):
            return
        self.check()
        raise self._failures.of_call(call) from None

"""The workers of a run as Ray actors, one a card, called stage by stage.

A stage is one method of the worker, called on every card at once; some cards may be at one while others are at another.
Nothing hangs without a message and nothing fails without one: a card that raises or dies ends the stage, and the error
names its rank and the stage; the others, which may wait for it in a collective, are ended with it. Of those that are
not done in time, the one that answers nothing is named. What goes wrong beside the stages (``heed``) ends whatever is
waited for, too.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import ray

from distqueue import DistQueue, QueueClosed
from fusion.colocate import Worker, WorkerSpec
from fusion.npu.config import claim
from fusion.telemetry import wall_ns
from stalesync.failures import CardFailed, QueueFailed, consequence, say
from stalesync.placing import check_cards, order_by_place

log = logging.getLogger(__name__)

SAY_EVERY_S = 30.0
"""A stage that is not done is spoken of after this long, and again."""

ATTEND_S = 0.2
"""While a stage is waited for, what is to be done meanwhile is done as often as this"""

CONTROL_S = 30.0
"""A control call is answered within this (and `cluster.stage_timeout_s`), whatever the card is at"""

ANSWER_S = 5.0
"""A card that says within this what it is at, when others are late, is taken to wait for somebody else."""

GATHER_FAILURES_S = 1.5
"""After a first failure the others' are awaited this long: the card that broke off a collective is not always the first
to report, and the one that died is the one to name."""


@dataclass
class Running:
    """A stage that cards are at. ``pending``: Ray's references → rank; ``results``: of the others, by rank."""

    stage: str
    ranks: tuple[int, ...]
    pending: dict[Any, int]
    results: dict[int, Any] = field(default_factory=dict)
    told_ns: int = field(default_factory=wall_ns)
    """Up to when it has been reported: its beginning, until it reports so far"""
    thread: int = field(default_factory=threading.get_ident)
    """Who takes its results: another thread may run other stages on other cards."""


class Card(Worker):
    """`Worker` as an actor: stages run one after the other; control calls are answered, and a checkpoint is written,
    meanwhile. It gets its rank once Ray has placed it."""

    def __init__(self, spec: WorkerSpec, queue: DistQueue):
        self._given = spec, queue

    def place(self) -> tuple[str, list[str]]:
        """The node and the card Ray has put this actor on."""
        ids = ray.get_runtime_context().get_accelerator_ids()
        return ray.util.get_node_ip_address(), [card for cards in ids.values() for card in cards]

    def take_rank(self, rank: int) -> None:
        spec, queue = self._given
        super().__init__(spec, rank, queue)

    @ray.method(concurrency_group="weights")
    def receive(self, *args: Any) -> Any:
        return super().receive(*args)

    @ray.method(concurrency_group="control")
    def control(self, request: str, *args: Any) -> Any:
        return super().control(request, *args)

    @ray.method(concurrency_group="save")
    def save(self, *args: Any) -> None:
        super().save(*args)


class Cards:
    """All workers of a run. Use it as a context manager: however the block ends, the workers end with it."""

    def __init__(self, spec: WorkerSpec, queue: DistQueue, timeout_s: float):
        self.world, self.timeout_s = spec.world, timeout_s
        self._running: list[Running] = []
        self._meanwhile: tuple[Callable[[], None] | None, int] = None, 0
        self.heed: list[Callable[[], None]] = []
        """Asked at every look at the cards: what one raises ends the run."""
        kind, resources = claim(spec.device.kind, ray.cluster_resources())
        check_cards(kind, spec.world, ray.cluster_resources())
        spec = replace(spec, device=replace(spec.device, kind=kind))
        remote: Any = ray.remote
        actor = remote(concurrency_groups={"control": 2, "weights": 1, "save": 1}, **resources)(Card)
        self.actors = [actor.remote(spec, queue) for _ in range(spec.world)]
        try:
            order = order_by_place(self.call("place"))
            self.actors = [self.actors[index] for index in order]
            self.call("take_rank", each=[(rank,) for rank in range(self.world)])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Cards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> list[Any]:
        """Joins the workers in one process group and loads the model."""
        return self.call("prepare", self.call("rendezvous", ranks=[0])[0])

    def call(
        self, stage: str, *args: Any, each: Sequence[tuple] | None = None, ranks: Sequence[int] | None = None
    ) -> list[Any]:
        """Runs ``stage(*args)``, or ``stage(*each[rank])``, on all cards (or ``ranks``); returns the results by rank.

        Raises:
            CardFailed: the first card that raised, died, or was not done in time; or one that `begin` has set to work.
        """
        return self.wait(self.begin(stage, *args, each=each, ranks=ranks))

    def begin(
        self, stage: str, *args: Any, each: Sequence[tuple] | None = None, ranks: Sequence[int] | None = None
    ) -> Running:
        """As `call`, but goes on at once; `wait` for it later. Other cards may be called meanwhile."""
        ranks = range(self.world) if ranks is None else ranks
        refs = {
            getattr(self.actors[rank], stage).remote(*(each[rank] if each is not None else args)): rank
            for rank in ranks
        }
        running = Running(stage, tuple(ranks), refs)
        self._running.append(running)
        return running

    def wait(self, running: Running) -> list[Any]:
        """The results of a stage by rank.

        Raises:
            CardFailed: as `call`.
        """
        start = said = time.monotonic()
        while running.pending:
            attend, thread = self._meanwhile
            self.check(ATTEND_S if attend else 1.0)
            if attend and thread == threading.get_ident():
                attend()
            now, left = time.monotonic(), sorted(running.pending.values())
            if left and now - start > self.timeout_s:
                raise CardFailed(
                    f"stage {running.stage!r}: ranks {left} were not done after {self.timeout_s:.0f} s "
                    f"(cluster.stage_timeout_s){self.silent(left)}"
                )
            if left and now - said > SAY_EVERY_S:
                said = now
                log.warning("stage %s: waiting for ranks %s, %.0f s", running.stage, left, now - start)
        self._running.remove(running)
        return [running.results[rank] for rank in running.ranks]

    @contextmanager
    def meanwhile(self, attend: Callable[[], None]) -> Iterator[None]:
        """Inside, this thread calls that again and again while it waits for a stage."""
        self._meanwhile = attend, threading.get_ident()
        try:
            yield
        finally:
            self._meanwhile = None, 0

    def check(self, patience_s: float = 0.0) -> None:
        """Takes what cards have to tell of the stages that this thread has begun; waits at most so long for the first.

        Raises:
            CardFailed: as `call`; and what those in ``heed`` raise.
        """
        for raise_what_went_wrong in self.heed:
            raise_what_went_wrong()
        mine = [running for running in list(self._running) if running.thread == threading.get_ident()]
        of = {ref: running for running in mine for ref in running.pending}
        if not of:
            return
        done, _ = ray.wait(list(of), timeout=patience_s)
        for ref in done:
            running = of[ref]
            try:
                running.results[running.pending[ref]] = ray.get(ref)
            except Exception as error:
                self._running.remove(running)
                self._fail(running.stage, running.pending, {running.pending[ref]: error})
            del running.pending[ref]

    @property
    def settled_ns(self) -> int:
        """Up to when all is reported (`wall_ns`): now, or where the first of the stages under way has got to."""
        return min([wall_ns(), *(running.told_ns for running in list(self._running))])

    def control(self, rank: int, request: str, *args: Any) -> Any:
        """A control call, answered while a stage runs.

        Raises:
            CardFailed: the card is dead, or does not answer.
        """
        return self.ask([rank], request, *args)[0]

    def ask(self, ranks: Iterable[int], request: str, *args: Any) -> list[Any]:
        """The same control call to several cards at once; their answers in this order.

        Raises:
            CardFailed: as `control`.
        """
        patience_s, answers = min(CONTROL_S, self.timeout_s), []
        deadline = time.monotonic() + patience_s
        for rank, asked in [(rank, self.actors[rank].control.remote(request, *args)) for rank in ranks]:
            try:
                answers.append(ray.get(asked, timeout=max(0.0, deadline - time.monotonic())))
            except ray.exceptions.GetTimeoutError:
                raise CardFailed(f"rank {rank} did not answer {request!r} in {patience_s:.0f} s: it hangs") from None
            except ray.exceptions.RayActorError as error:
                raise CardFailed(say(rank, request, error)) from None
        return answers

    def silent(self, ranks: Iterable[int]) -> str:
        """Says for an error which of these ranks answer nothing; empty where all of them do."""
        asked = {self.actors[rank].control.remote("status"): rank for rank in ranks}
        _, unheard = ray.wait(list(asked), num_returns=len(asked), timeout=ANSWER_S)
        names = " and ".join(f"rank {rank}" for rank in sorted(asked[ref] for ref in unheard))
        return f"; {names} did not answer when asked what it is at: it hangs" if names else ""

    def close(self) -> None:
        for actor in self.actors:
            ray.kill(actor)

    def _fail(self, stage: str, pending: dict[Any, int], failures: dict[int, Exception]) -> None:
        deadline = time.monotonic() + GATHER_FAILURES_S
        left = {ref: rank for ref, rank in pending.items() if rank not in failures}
        while left and time.monotonic() < deadline:
            done, _ = ray.wait(list(left), timeout=max(0.0, deadline - time.monotonic()))
            for ref in done:
                try:
                    ray.get(ref)
                except Exception as error:
                    failures[left[ref]] = error
                del left[ref]
        rank = min(failures, key=lambda rank: (consequence(rank, failures[rank]), rank))
        if isinstance(ended := getattr(failures[rank], "cause", None), QueueClosed):
            raise QueueFailed(f"{ended}, as rank {rank} was told in stage {stage!r}") from None
        raise CardFailed(say(rank, stage, failures[rank])) from None

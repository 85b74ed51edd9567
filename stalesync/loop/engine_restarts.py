"""Replace engines that have died: return their requests, start other processes, and let these join the others.

    death ─┬─► its requests ─► admission: observe_died ─► other engines
           └─► processes start on another thread ─┬─► all of the actor's cards rejoin ─► weights come by the plan
               a Publish that stops the engines ──┘

Until they have rejoined, `Admission` dispatches nothing to a replaced engine. The cards rejoin only here, while no
engine runs and no card trains: a process group cannot be renewed under a collective.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from distqueue import DistQueue
from fusion.colocate import Worker, WorkerSpec
from fusion.rollout.partial_samples import COLUMNS, RESUMED
from fusion.rollout.types import parse_row
from fusion.telemetry import Span, wall_ns
from stalesync.cards.cards import WAIT_S, Cards
from stalesync.loop.generation import Generation
from stalesync.loop.groups import Groups
from stalesync.loop.step_metrics import StepMetrics
from stalesync.policy.admission import Admission
from stalesync.policy.engine_deaths import Recovered, recover
from stalesync.process import in_flight
from stalesync.scoring.scoring import RESPONSE

log = logging.getLogger(__name__)


@dataclass
class Restart:
    """A restart under way. ``began_ns``: when the death was noticed (`wall_ns`); ``started``: when the processes are
    prepared."""

    began_ns: int
    started: Future[int]


@dataclass(kw_only=True)
class EngineRestarts:
    """Observes the deaths of engines, and replaces these. ``note``: tells the user, in a line."""

    spec: WorkerSpec
    cards: Cards
    queue: DistQueue
    admission: Admission
    groups: Groups
    generation: Generation
    step_metrics: StepMetrics
    note: Callable[[str], None]
    _restarts: dict[int, Restart] = field(default_factory=dict)
    """By engine, until it has rejoined"""
    num_restarts: int = 0
    """Number of restarts since the run was started"""

    def observe(self) -> None:
        """Report engines that have died to `Admission`, with what survives of their requests, and begin to replace
        them."""
        for engine, how in self.cards.take_dead().items():
            self.generation.forget(engine)
            requests = self._recover(engine)
            self.num_restarts += 1
            self._restarts[engine] = Restart(wall_ns(), in_flight.begin(self._start, engine, self.num_restarts))
            self.step_metrics.metrics.add("rollout/engine_restarts", 1, rule="sum")
            self.note(f"{how}; {requests}, and engine {engine} is started again")

    def return_unstarted(self, engine: int) -> None:
        """Report to `Admission` that an engine that lives has none of its requests, as its cards have not switched."""
        self.admission.observe_stopped(engine, self._find(engine).suspended)

    def check(self) -> None:
        """Check the health of the cards (`Cards.check`), and observes the deaths of engines."""
        self.cards.check()
        self.observe()

    def await_started(self) -> None:
        """Wait until the processes of all replaced engines are prepared.

        Raises:
            CardFailed: one is not, or another card fails.
        """
        while waiting := [one.started for one in self._restarts.values() if not one.started.done()]:
            self.check()
            with suppress(TimeoutError):
                waiting[0].exception(WAIT_S)
        for restart in self._restarts.values():
            restart.started.result()

    def rejoin(self) -> None:
        """Let replaced engines, if there are any, join the other cards; weights must follow. While no engine runs and
        no card trains.

        Raises:
            CardFailed: as `await_started`.
        """
        self.check()
        if not self._restarts:
            return
        self.await_started()
        self.cards.on(self.spec.deployment.actor).call(Worker.rejoin, self.num_restarts)
        for engine, restart in self._restarts.items():
            began_ns, started_ns = restart.began_ns, restart.started.result()
            cards = [f"card {rank}" for rank in self.spec.engines[engine]]
            self.step_metrics.add_spans([Span(card, "restart", "restart", began_ns, started_ns) for card in cards])
            self.note(f"engine {engine} takes part again, {(wall_ns() - began_ns) / 1e9:.0f} s after it was lost")
        self._restarts.clear()

    def _start(self, engine: int, number: int) -> int:
        """Start other processes for an engine; return when they are prepared (`wall_ns`)."""
        self.cards.restart(engine, number)
        return wall_ns()

    def _recover(self, engine: int) -> str:
        """Return the requests of an engine that has died to the buffer, with the tokens that the queue holds of them.
        Return in words what becomes of them."""
        found = self._find(engine)
        self.admission.observe_died(engine, found.suspended)
        if not found.suspended:
            return "it had no unfinished requests"
        kept = sum(one.generated for one in found.suspended)
        return f"its {len(found.suspended)} unfinished requests go on elsewhere, with {kept} tokens that were kept"

    def _find(self, engine: int) -> Recovered:
        """Return what the queue holds of the requests of an engine that does not run any more."""
        finished = {*self.queue.holding(RESPONSE)}
        rows: dict[str, list[int]] = {}
        for row in self.queue.holding(COLUMNS[0]):
            id, num_tokens = parse_row(row)
            rows.setdefault(id, []).append(num_tokens)
        # Samples that the queue has lost count as finished: it would not store them again. Asked for last, as a sample
        # that it does not hold may be lost only since then.
        self.groups.note_lost(self.queue.lost(self.groups.num_noted_lost))
        had = [entry for entry in self.admission.buffer.of("running") if entry.engine == engine]
        found = recover(had, finished=finished, rows=rows, version=self.admission.ledger.version)
        if found.dropped:
            self.queue.drop(found.dropped, RESUMED)
        log.info("engine %d: of %d requests %d samples are in the queue", engine, len(had), found.num_finished)
        return found

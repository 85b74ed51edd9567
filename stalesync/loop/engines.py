"""Publish weights to engines and suspend them, and replace those that die meanwhile.

    death ─┬─► its requests ─► admission ─► other engines
           └─► processes start on another thread ─┬─► all of the actor's cards rejoin ─► weights come by the plan
               a Publish that stops the engines ──┘

Only this file handles `EnginesLost`: what waits for the stage of an engine does so in `replacing`. Until they have
rejoined, `Admission` dispatches nothing to a replaced engine. The cards rejoin only here, while no engine runs and no
card trains: a process group cannot be renewed under a collective.

Weights are published as a transaction: at its end all engines have the version. If engines die while it is under way,
the other cards recover from the transfer, and it is repeated when they are replaced. What was started behind the switch
is started again, with the same requests; engines that were to receive the weights while they generate are stopped
instead, and their requests wait."""

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from distqueue import DistQueue
from fusion.colocate import InferenceShare, Worker, WorkerSpec
from fusion.rollout.partial_samples import COLUMNS, RESUMED, TURN
from fusion.rollout.types import parse_row
from fusion.telemetry import Span, wall_ns
from stalesync.cards.cards import WAIT_S, Cards
from stalesync.cards.stage_calls import EnginesLost
from stalesync.loop.generation import Generation
from stalesync.loop.groups import Groups
from stalesync.loop.step_metrics import StepMetrics
from stalesync.policy.admission import Admission
from stalesync.policy.commands import Dispatch, Publish
from stalesync.policy.engine_deaths import recover
from stalesync.process import in_flight
from stalesync.scoring.scoring import RESPONSE

log = logging.getLogger(__name__)


@dataclass
class Restart:
    """A restart under way. ``began_ns``: of the noticed death (`wall_ns`); ``started``: when processes are prepared."""

    began_ns: int
    started: Future[int]


@dataclass(kw_only=True)
class Engines:
    """Run the engines through ``generation``. ``note``: tells the user, in a line."""

    spec: WorkerSpec
    cards: Cards
    queue: DistQueue
    admission: Admission
    groups: Groups
    generation: Generation
    step_metrics: StepMetrics
    note: Callable[[str], None]
    _restarts: dict[int, Restart] = field(default_factory=dict)
    """Restarts by engine, until it has rejoined"""
    num_restarts: int = 0
    """Number of restarts since the run was started"""
    _published: tuple[Publish, InferenceShare] = field(init=False)
    """The version that is published last, and to which engines"""
    _behind: list[Dispatch] = field(default_factory=list)
    """What was dispatched behind the switch"""

    def begin_publish(self, command: Publish, share: InferenceShare) -> None:
        """Begin to publish to the engines of ``share``; `end_publish` must follow."""
        self._published = command, share
        if not command.overlapped:
            self._rejoin()
        self.generation.begin_publish(command, share)

    def dispatch(self, command: Dispatch) -> None:
        """Dispatch requests; while weights are published, only to engines that start with the command."""
        self.generation.dispatch(command)
        if self.generation.publishing:
            self._behind.append(command)

    def end_publish(self) -> None:
        """Wait until the engines have the weights."""
        while self.generation.publishing:
            with self.replacing():
                self.generation.end_publish()
            if self.generation.publishing:
                self._publish_again(*self._published)
        self._behind.clear()

    def _publish_again(self, command: Publish, share: InferenceShare) -> None:
        if command.overlapped:
            self.suspend([*self.admission.running])
        absent = self.absent_ranks
        self.cards.on([rank for rank in self.spec.deployment.actor if rank not in absent]).call(Worker.recover)
        self.begin_publish(Publish(command.version), share)
        for dispatched in self._behind:
            self.generation.dispatch(dispatched)

    @property
    def absent(self) -> frozenset[int]:
        """Engines that are replaced and have not rejoined yet."""
        return frozenset(self._restarts)

    @property
    def absent_ranks(self) -> set[int]:
        return {rank for engine in self.absent for rank in self.spec.engines[engine]}

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """End the block where an engine is lost whose stage it waits for, and begin to replace it (`observe`)."""
        with suppress(EnginesLost):
            yield
        self.observe()

    def observe(self) -> None:
        """Report engines that have died to `Admission`, with what survives of their requests, and begin to replace
        them. Those that wait for weights have begun no request, and keep theirs."""
        for engine, how in self.cards.take_dead().items():
            self.generation.forget(engine)
            waits = self.generation.publishing and not self._published[0].overlapped
            requests = "it had begun no request" if waits else self._recover(engine)
            self.admission.buffer.forget_kv(engine)
            self.num_restarts += 1
            self._restarts[engine] = Restart(wall_ns(), in_flight.begin(self._start, engine, self.num_restarts))
            self.step_metrics.metrics.add("rollout/engine_restarts", 1, rule="sum")
            self.note(f"{how}; {requests}, and engine {engine} is started again")

    def suspend(self, engines: Sequence[int]) -> None:
        """Stop engines, and report their unfinished requests to `Admission`."""
        self.generation.pause(engines)
        for engine in engines:
            with self.replacing():
                if engine in self.admission.running:
                    samples = self.generation.stop(engine)
                    self.admission.observe_stopped(engine, samples)
                    self.step_metrics.metrics.add("rollout/suspended_total", sum(one.generated > 0 for one in samples))

    def check(self) -> None:
        """Check the health of the cards (`Cards.check`), and observe the deaths of engines."""
        self.cards.check()
        self.observe()

    def await_started(self) -> None:
        """Wait until the processes of all replaced engines are prepared; raise CardFailed if one is not."""
        while waiting := [restart.started for restart in self._restarts.values() if not restart.started.done()]:
            self.check()
            with suppress(TimeoutError):
                waiting[0].exception(WAIT_S)
        for restart in self._restarts.values():
            restart.started.result()

    def _rejoin(self) -> None:
        """Let replaced engines, if there are any, join the other cards; weights must follow. While no engine runs and
        no card trains."""
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

    def close_kv_pools(self) -> None:
        """Close the KV pools of the engines that live, at the end of the run: none is replaced any more."""
        living = [ranks for ranks in self.spec.engines if {*ranks} <= {*self.cards.living}]
        with suppress(EnginesLost):
            self.cards.wait_all([self.cards.on(ranks).begin(Worker.close_kv_pool) for ranks in living])

    def _start(self, engine: int, number: int) -> int:
        """Start other processes for an engine; return when they are prepared (`wall_ns`)."""
        self.cards.restart(engine, number)
        return wall_ns()

    def _recover(self, engine: int) -> str:
        """Return the requests of an engine that has died to the buffer, with the tokens that the queue holds of them.
        Return in words what becomes of them."""
        finished = {*self.queue.holding(RESPONSE)}
        rows: dict[str, list[int]] = {}
        for row in self.queue.holding(COLUMNS[0]):
            id, num_tokens = parse_row(row)
            rows.setdefault(id, []).append(num_tokens)
        # Samples that the queue has lost count as finished: it would not store them again. Asked for last, as a sample
        # that it does not hold may be lost only since then.
        self.groups.note_lost(self.queue.lost(self.groups.num_noted_lost))
        had = [entry for entry in self.admission.buffer.of("running") if entry.engine == engine]
        turns = {*self.queue.holding(TURN)}
        recovered = recover(had, finished=finished, rows=rows, version=self.admission.ledger.version, turns=turns)
        if recovered.dropped:
            self.queue.drop(recovered.dropped, RESUMED)
        log.info("engine %d: of %d requests %d samples are in the queue", engine, len(had), recovered.num_finished)
        self.admission.observe_chunks_ended(engine, recovered.suspended)
        if engine in self.admission.running:
            self.admission.observe_stopped(engine, ())
        if not recovered.suspended:
            return "it had no unfinished requests"
        kept = sum(sample.generated for sample in recovered.suspended)
        return f"{len(recovered.suspended)} requests moved to other engines ({kept} tokens kept)"

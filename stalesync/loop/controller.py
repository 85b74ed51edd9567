"""Run the training loop. It handles only metadata: ids, lengths, rewards; tensors pass between cards in the queue.

    prompts ─admit─► [switch] ─► generate ─► [switch] ─► score ─► advantages ─► reference ─► train ─► next version ─► …
                                 │  ▲ suspended           ▲                        │           │
                                 │  └──────┐              │                        │           │
                                 └──────── queue ─────────┘──────── queue ────────►└── queue ──┘

The same loop runs every staleness and every deployment. `admission.py` decides the next command; the controller
executes it and reports the results to `Admission`. At staleness 0 a step publishes the weights to the engines, admits
this version's batch, generates all of it, switches the cards back, scores and trains. Above 0 a training step begins
when enough groups are ready, or in the tail of their generation (`lending.py`); engines on cards that train are
suspended, the others continue. What is left to do for a
step when its training is done (acknowledge its samples, log its metrics) is done while the cards switch for the next.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distqueue import DistQueue
from fusion.colocate import WorkerSpec
from fusion.telemetry import LiveView, RunFolder, throughput
from stalesync.cards.cards import Cards
from stalesync.job.config import Config
from stalesync.job.control import ControlDesk
from stalesync.loop.conversing import Conversing
from stalesync.loop.engines import Engines
from stalesync.loop.generation import Generation
from stalesync.loop.groups import Groups
from stalesync.loop.sample_columns import SampleColumns
from stalesync.loop.step import Step, StepRows
from stalesync.loop.step_metrics import StepMetrics, add_sample_metrics, add_staleness_metrics
from stalesync.loop.update import Updater
from stalesync.policy.admission import STEP_TAIL, Admission
from stalesync.policy.commands import (
    Accumulate,
    AdmitGroups,
    AwaitSamples,
    Command,
    Dispatch,
    Publish,
    Score,
    Suspend,
    SwitchToTrain,
    Train,
    only_starts,
)
from stalesync.policy.conversations import Conversation
from stalesync.process.failures import logging_errors
from stalesync.prompts import PromptSource
from stalesync.scoring.samples import Sample
from stalesync.scoring.scoring import Scorer

POLL_S = 0.5
"""Interval at which the controller checks the health of the cards while it waits for samples."""


@dataclass(kw_only=True)
class Controller:
    """Execute the commands of `admission`. Between steps, the cards that train are in the training phase."""

    config: Config
    spec: WorkerSpec
    admission: Admission
    cards: Cards
    queue: DistQueue
    source: PromptSource
    scorer: Scorer
    groups: Groups
    generation: Generation
    engines: Engines
    updater: Updater
    desk: ControlDesk
    step_metrics: StepMetrics
    rows: StepRows
    folder: RunFolder
    view: LiveView
    conversing: Conversing | None = None
    """Conversations of a run with environments"""
    _kv_tokens: float | None = None
    """Capacity of the smallest KV cache in the last step"""
    _num_tokens: int = 0
    """Prompt and response tokens of all groups that ended in this step"""
    _last_sample_s: float = 0.0
    """Time at which the last samples arrived or weights were published, whichever is later (`time.perf_counter`)"""
    _published_s: float = 0.0
    """Time at which the cards began to switch for the engines"""
    _lost_polled_s: float = 0.0
    """Time at which the queue was last asked for lost samples"""
    _unlogged: SampleColumns | None = None
    """Samples whose groups ended in this step, until `log_samples` records them"""
    last: Step = field(init=False)
    """The last completed step. It is closed and logged while the cards switch for the next one"""

    def __post_init__(self) -> None:
        self.last = Step(0, self.rows, logged=True)

    @property
    def max_samples(self) -> int:
        """Maximum number of samples in progress."""
        return (self.config.stalesync.max_staleness + 1) * self.admission.ledger.groups_per_step * self.groups.size

    def train_step(self) -> None:
        """Run the step after `last`."""
        start, step = time.perf_counter(), Step(self.last.number + 1, self.rows)
        self.groups.step = step.number
        self.view.begin_step(step.number)
        if reply := self.desk.read(step.number, self._kv_tokens):
            self.view.note(reply)
        self.engines.check()
        for command in self.admission.step(self.config.run.steps - self.last.number, self.desk.share):
            if not (isinstance(command, Publish) or only_starts(command)):
                self.last.log()
            self.execute(command)
        seconds, metrics = time.perf_counter() - start, self.step_metrics.metrics
        metrics.update(throughput(self._num_tokens, seconds, self.config.cluster.npus))
        metrics.add("timing_s/step", seconds)
        self.step_metrics.take(self.scorer.take_reports())
        self.last = step

    def execute(self, command: Command) -> None:
        """Execute a command, and report its results to `Admission`."""
        if self.generation.publishing and not only_starts(command):
            self.end_publish()
        start, share = time.perf_counter(), self.desk.share
        match command:
            case Publish(overlapped=overlapped):
                self.view.phase("send weights" if overlapped else "switch to infer")
                self.engines.begin_publish(command, share)
                if not overlapped:
                    self.last.begin_close()
                    self._published_s = start
                    return  # its seconds are counted at its end
                self.last.log()
                self.engines.end_publish()
                self._last_sample_s = time.perf_counter()
            case AdmitGroups(count):
                self.groups.admit(self.source.next(count) if self.conversing is None else self.conversing.next(count))
            case Dispatch():
                self.engines.dispatch(command)
            case AwaitSamples():
                self.await_samples()
            case Suspend(stopping, to_train):
                if to_train and not self.generation.returning:
                    self.generation.begin_switch_to_train(self.admission.ledger.version, share)
                self.engines.suspend(stopping)
            case SwitchToTrain():
                self.view.phase("switch to train")
                self.generation.switch_to_train(self.admission.ledger.version, share)
            case Score():
                self.view.phase("reward")
                self.score()
            case Accumulate(groups):
                self.train(groups, update=False)
            case Train(groups):
                self.train(groups)
        self.admission.observe_seconds(command, time.perf_counter() - start)
        self.step_metrics.add_seconds(self.admission.stage, time.perf_counter() - start)

    def end_publish(self) -> None:
        """Wait until the cards have switched for the engines, which may have been started meanwhile."""
        self.engines.end_publish()
        self._last_sample_s = time.perf_counter()
        self.step_metrics.add_seconds("switch", self._last_sample_s - self._published_s)

    def observe(self, timeout_s: float) -> bool:
        """Report generated and scored samples and requests whose chunk has ended to `Admission`; wait at most
        ``timeout_s`` for the first sample. Return whether there were any."""
        generated, scored = self.scorer.poll(timeout_s)
        self.groups.note(generated, scored)
        self.note_lost()
        if self.groups.reference is not None:
            self.groups.reference.begin()
        chunks = self.generation.take_ended_chunks()
        for engine, samples in chunks.items():
            self.admission.observe_chunks_ended(engine, samples)
        num_chunks = sum(sample.generated > 0 and not sample.turn for samples in chunks.values() for sample in samples)
        self.step_metrics.metrics.add("rollout/chunks_total", num_chunks)
        self.engines.observe()
        answered = False
        if self.conversing is not None:
            self.conversing.end(generated)
            answered = self.conversing.poll()
        return bool(generated or scored or chunks or answered)

    def note_lost(self, now: bool = False) -> None:
        """Report the samples that the queue has lost, and record how many requests engines have; at most every
        `POLL_S` seconds, unless ``now``."""
        if now or time.perf_counter() - self._lost_polled_s >= POLL_S:
            self.scorer.note_lost(self.groups.note_lost(self.queue.lost(self.groups.num_noted_lost)))
            self._lost_polled_s = time.perf_counter()
            counts = [self.admission.buffer.num_running_on(engine) for engine in self.admission.running]
            if counts:
                self.step_metrics.metrics.add("perf/in_flight_max", max(counts))
                self.step_metrics.metrics.add("perf/in_flight_min", min(counts))
            if self.conversing is not None:
                self.step_metrics.metrics.add("env/away_max", self.admission.buffer.num("away"))

    def await_samples(self) -> None:
        """Wait for samples, and check the health of the cards."""
        ledger, buffer, size = self.admission.ledger, self.admission.buffer, self.groups.size
        self.view.phase("generate", ledger.num_ready * size, ledger.expected_groups * size)
        self.generation.begin_return(ledger.version, self.desk.share)
        in_tail = buffer.num("running") <= STEP_TAIL * ledger.expected_groups * size
        self.step_metrics.begin_wait(for_older=ledger.waits_for_older, in_tail=in_tail)
        if self.observe(POLL_S):
            self._last_sample_s = time.perf_counter()
        self.engines.check()
        self.generation.check_silence(time.perf_counter() - self._last_sample_s, buffer.num_running_on)

    def score(self) -> None:
        """Score the samples that could not be scored while the cards generated."""
        scored, reports = self.scorer.score_waiting()
        self.step_metrics.take(reports)
        self.groups.note([], scored)

    def train(self, trained: Sequence[str], update: bool = True) -> None:
        """Train groups, while other cards generate. ``update``: with an optimizer step, else gradients accumulate."""
        metrics, ledger = self.step_metrics.metrics, self.admission.ledger
        samples, ended = self.groups.take(trained)
        self._unlogged = ended if self._unlogged is None else self._unlogged.merged(ended)
        try:
            with self.cards.polling(self.keep_busy):
                training = self.updater.begin(trained, samples, ledger.version, metrics, update=update)
                if update:
                    self.log_samples()
                has_lost = self.updater.finish(training, metrics)
        except BaseException:
            if self._unlogged is not None:  # it failed before the cards began to train
                with logging_errors("logging the step's samples"):
                    self.log_samples()
            raise
        if has_lost:
            self.note_lost(now=True)
        lost = self.groups.untrained(trained, samples)
        self.groups.log_trained(trained, samples, lost)
        metrics.add("training/parts_total", 1)
        bound = self.config.stalesync.max_staleness
        add_staleness_metrics(metrics, samples, version=ledger.version, max_staleness=bound)
        (self.admission.observe_trained if update else self.admission.observe_accumulated)(trained, lost)

    def keep_busy(self) -> None:
        """Keep engines busy while other cards train: observes them, and dispatch further requests."""
        self.observe(0.0)
        for command in self.admission.feed():
            self.execute(command)

    def stop(self) -> None:
        for command in self.admission.stop():
            self.execute(command)

    def settle(self) -> None:
        """Suspend all engines, and wait until all finished samples have arrived through the queue and are scored,
        what was scored and trained is acknowledged, and the processes of replaced engines are prepared."""
        self.stop()
        self.engines.await_started()
        while self.admission.buffer.num("running") or self._pause_conversations():  # samples that have not arrived yet
            self.groups.note(*self.scorer.poll(POLL_S))
            self.note_lost()
            self.cards.check()
        self.score()
        while self.scorer.num_unscored:
            self.groups.note(*self.scorer.poll(POLL_S))
            self.cards.check()
        self._pause_conversations()
        self.scorer.wait_acknowledged()
        if self.groups.reference is not None:
            self.groups.reference.settle()
        self.updater.acknowledge()

    def _pause_conversations(self) -> int:
        """Hold what environments answer; return the number of conversations whose samples have not arrived."""
        if self.conversing is None:
            return 0
        self.conversing.pause()
        return self.conversing.num_completing

    def log_samples(self) -> None:
        """Record all samples whose groups have ended in this step, once."""
        assert self._unlogged is not None
        samples, self._unlogged = self._unlogged, None
        metrics = self.step_metrics.metrics
        self._num_tokens = sum(samples.tokens)
        metrics.add("rollout/engines", len(self.desk.share.engines))
        metrics.add("rollout/lent_card_s", self.admission.take_lent_s() * len(self.spec.deployment.shared))
        metrics.add("rollout/suspended_total", 0)
        metrics.update(self.admission.buffer.take_metrics())
        self._kv_tokens = metrics.result().get("rollout/kv_tokens_min", self._kv_tokens)
        if self._kv_tokens is not None:
            self.admission.observe_kv_tokens(int(self._kv_tokens) * self.spec.infer_of_one_engine.dp)
        add_sample_metrics(metrics, samples, by_group=self.updater.algorithm.by_group)
        records = {} if self.conversing is None else self.conversing.records(samples.ids, metrics)
        if samples:
            self.folder.log_samples(
                self.groups.step, samples.samples, lambda sample: _describe(sample, records.get(sample.id))
            )

    def state_dict(self) -> dict[str, Any]:
        """Return plain JSON, between two steps. No engine has a request."""
        state: dict[str, Any] = {"step": self.last.number, "prompts": self.source.state_dict()}
        state |= {"share": self.desk.state_dict(), **self.admission.state_dict()}
        state |= {} if self.conversing is None else self.conversing.state_dict()
        state |= {} if self.groups.reference is None else self.groups.reference.state_dict()
        return state | self.groups.state_dict() | self.scorer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], other_order: bool = False) -> None:
        """Restore the state into this new object. ``other_order``: whether prompts may come in another order."""
        self.last = Step(state["step"], self.rows, logged=True)
        self.source.load_state_dict(state["prompts"], other_order)
        self.desk.load_state_dict(state["share"])
        self.admission.load_state_dict(state)
        self.groups.load_state_dict(state)
        self.scorer.load_state_dict(state, self.groups.scored)
        if self.groups.reference is not None:
            finished = self.admission.ledger.finished
            self.groups.reference.load_state_dict(state, [self.groups.scored[group] for group in finished])
        if self.conversing is not None:
            self.conversing.load_state_dict(state)


def _describe(sample: Sample, conversation: Conversation | None) -> dict[str, Any]:
    row: dict[str, Any] = {"prompt": sample.prompt.text, "response": sample.response, "reward": sample.outcome.reward}
    row |= {"answer": sample.prompt.answer} if sample.prompt.answer else {}
    row |= {"terms": sample.outcome.terms} if sample.outcome.terms else {}
    if conversation is None:
        return row
    row |= {"messages": [*sample.prompt.messages, *conversation.messages]}
    first = len(sample.prompt.messages)
    return row | ({"branches": [first + begin for begin in conversation.begins]} if conversation.begins else {})
